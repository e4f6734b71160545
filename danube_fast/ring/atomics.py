"""All memory ordering of the project: atomic loads, stores, exchanges and fences for kernels.

Each is a Numba intrinsic over an int64 address that must be a multiple of 8. LLVM gives it the
ordering of C11 on every machine, and neither hoists it out of a loop nor merges it with another:
a plain `while a[0] != x` in a kernel spins for ever, one with `load_acquire` does not.

  load_acquire      pairs with store_release: who sees the value sees all that was stored before it
  store_seq_cst, fence
                    for the one pattern that acquire and release cannot do: "I store mine, then
                    look at yours; you store yours, then look at mine; one of us must see"
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, cast

from danube_fast.frame.kernel import intrinsic

__all__ = [
    "compare_exchange",
    "fence",
    "load_acquire",
    "load_relaxed",
    "pause",
    "store_relaxed",
    "store_release",
    "store_seq_cst",
]

_ALIGNMENT = 8


def _make_load(name: str, ordering: str) -> Callable[[int], int]:
    """Build the intrinsic `name(address) -> int64`."""

    def load(typing_context: Any, address: Any) -> Any:
        from llvmlite import ir
        from numba import types

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            return builder.load_atomic(pointer, ordering, _ALIGNMENT)

        return types.int64(types.int64), generate

    load.__name__ = name
    return cast("Callable[[int], int]", intrinsic(load))


def _make_store(name: str, ordering: str) -> Callable[[int, int], None]:
    """Build the intrinsic `name(address, value)`."""

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        from llvmlite import ir
        from numba import types

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            builder.store_atomic(arguments[1], pointer, ordering, _ALIGNMENT)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    store.__name__ = name
    return cast("Callable[[int, int], None]", intrinsic(store))


load_relaxed = _make_load("load_relaxed", "monotonic")
load_acquire = _make_load("load_acquire", "acquire")
store_relaxed = _make_store("store_relaxed", "monotonic")
store_release = _make_store("store_release", "release")
store_seq_cst = _make_store("store_seq_cst", "seq_cst")


def _compare_exchange(typing_context: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Store `desired` if the word at `address` is `expected`; 1 if it was, else 0. Seq_cst."""
    from llvmlite import ir
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        pair = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "acquire")
        return builder.zext(builder.extract_value(pair, 1), ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), generate


def _fence(typing_context: Any) -> Any:
    """Full fence: no load or store moves across it, not even a load before an earlier store."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_PAUSE: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.isb", (15,)),
}
"""LLVM's name, and arguments, of what a spinning loop says to the processor. On aarch64 `yield`
does nothing; an instruction barrier over the full system (15) waits a little."""


def _pause(typing_context: Any) -> Any:
    """Tell the processor that this is a spinning loop; nothing where it cannot be told."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    utilities: Any = cgutils
    name, numbers = _PAUSE.get(platform.machine(), ("", ()))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if name:
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [word] * len(numbers))
            function = utilities.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [word(number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), generate


# As kernels call them; a type checker would take the parameters of the code generators instead.
compare_exchange = cast("Callable[[int, int, int], int]", intrinsic(_compare_exchange))
fence = cast("Callable[[], None]", intrinsic(_fence))
pause = cast("Callable[[], None]", intrinsic(_pause))
