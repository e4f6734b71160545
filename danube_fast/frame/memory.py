"""Raw memory for kernels: plain loads, stores and copies on integer addresses.

Every function here is a Numba intrinsic over an int64 address. They use alignment 1, because a
message that ZeroMQ received may start at any address, and they promise nothing about ordering:
memory shared between threads or processes goes through `ring/atomics.py`.

All values are int64 on the Numba side. Mixing uint64 and int64 in a kernel gives float64, so no
kernel in this project ever sees an unsigned scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from danube_fast.frame.kernel import external, intrinsic

__all__ = [
    "load_i32",
    "load_i64",
    "load_u8",
    "load_u16",
    "load_u32",
    "load_word",
    "memory_compare",
    "memory_copy",
    "memory_zero",
    "store_u8",
    "store_u16",
    "store_u32",
    "store_u64",
    "store_word",
]


def _make_load(name: str, bits: int, *, signed: bool) -> Any:
    """Build the intrinsic `name(address) -> int64` that loads `bits` bits, unaligned."""

    def load(typing_context: Any, address: Any) -> Any:
        from llvmlite import ir
        from numba import types

        element, wide = ir.IntType(bits), ir.IntType(64)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], element.as_pointer())
            value = builder.load(pointer, align=1)
            if bits == 64:
                return value
            return builder.sext(value, wide) if signed else builder.zext(value, wide)

        return types.int64(types.int64), generate

    load.__name__ = name
    return intrinsic(load)


def _make_store(name: str, bits: int) -> Any:
    """Build the intrinsic `name(address, value)` that stores the low `bits` bits, unaligned."""

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        from llvmlite import ir
        from numba import types

        element = ir.IntType(bits)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], element.as_pointer())
            stored = arguments[1] if bits == 64 else builder.trunc(arguments[1], element)
            builder.store(stored, pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    store.__name__ = name
    return intrinsic(store)


def _word(builder: Any, base: Any, word: Any) -> Any:
    """Pointer to the int64 number `word` behind the address `base`."""
    from llvmlite import ir

    pointer = builder.inttoptr(base, ir.IntType(64).as_pointer())
    return builder.gep(pointer, [word])


def _load_word(typing_context: Any, base: Any, word: Any) -> Any:
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_word(builder, *arguments), align=1)

    return types.int64(types.int64, types.int64), generate


def _store_word(typing_context: Any, base: Any, word: Any, value: Any) -> Any:
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _word(builder, *arguments[:2]), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


load_u8: Callable[[int], int] = _make_load("load_u8", 8, signed=False)
load_u16: Callable[[int], int] = _make_load("load_u16", 16, signed=False)
load_u32: Callable[[int], int] = _make_load("load_u32", 32, signed=False)
load_i32: Callable[[int], int] = _make_load("load_i32", 32, signed=True)
load_i64: Callable[[int], int] = _make_load("load_i64", 64, signed=True)
store_u8: Callable[[int, int], None] = _make_store("store_u8", 8)
store_u16: Callable[[int, int], None] = _make_store("store_u16", 16)
store_u32: Callable[[int, int], None] = _make_store("store_u32", 32)
store_u64: Callable[[int, int], None] = _make_store("store_u64", 64)
load_word: Callable[[int, int], int] = intrinsic(_load_word)
"""The int64 number `word` of those behind an address: `load_word(row, RowWord.START)`."""
store_word: Callable[[int, int, int], None] = intrinsic(_store_word)
"""Store the int64 number `word` of those behind an address."""


def _memory_copy(typing_context: Any, destination: Any, source: Any, byte_count: Any) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(  # type: ignore[no-untyped-call]
            builder,
            builder.inttoptr(arguments[0], pointer),
            builder.inttoptr(arguments[1], pointer),
            arguments[2],
            1,
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _memory_zero(typing_context: Any, destination: Any, byte_count: Any) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        cgutils.memset(builder, pointer, arguments[1], 0)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


memory_copy: Callable[[int, int, int], None] = intrinsic(_memory_copy)
"""memcpy(destination, source, byte_count)."""
memory_zero: Callable[[int, int], None] = intrinsic(_memory_zero)
"""memset(destination, 0, byte_count)."""
memory_compare: Callable[[int, int, int], int] = external("memcmp", "int32(int64,int64,int64)")
