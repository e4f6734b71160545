"""Msgpack in kernels: unsigned integers and arrays, as commands have them (`protocol.py`).

Each returns where the value ends, or 0 if there is none of that kind before `end`. Nothing behind `end` is read.
"""

from __future__ import annotations

from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import load_u8, store_u8, store_u64

__all__ = [
    "EMPTY_MAP",
    "FIXED_ARRAY",
    "UNSIGNED_BYTES_MAX",
    "read_array",
    "read_unsigned",
    "write_unsigned",
]

FIXED_ARRAY = 0x90
"""An array of so many less than 16; the number is added."""
EMPTY_MAP = 0x80
UNSIGNED_BYTES_MAX = 9
_FIXED_MAX = 0x7F
_UNSIGNED_8 = 0xCC
_UNSIGNED_64 = 0xCF
_ARRAY_16 = 0xDC
_SMALL_ARRAY_MAX = 15
_BYTE_BITS = 8
_BYTE_MASK = 0xFF


@kernel("int64(int64,int64,int64)")
def read_unsigned(at: int, end: int, out: int) -> int:
    """Read an unsigned integer below 2**63 into the word at `out`."""
    if at >= end:
        return 0
    kind = load_u8(at)
    if kind <= _FIXED_MAX:
        store_u64(out, kind)
        return at + 1
    if kind < _UNSIGNED_8 or kind > _UNSIGNED_64:
        return 0
    size = 1 << (kind - _UNSIGNED_8)
    if at + 1 + size > end:
        return 0
    value = 0
    for index in range(size):
        value = value << _BYTE_BITS | load_u8(at + 1 + index)
    if value < 0:
        return 0
    store_u64(out, value)
    return at + 1 + size


@kernel("int64(int64,int64,int64)")
def read_array(at: int, end: int, out: int) -> int:
    """Read the head of an array of fewer than 2**16 values: how many, into the word at `out`."""
    if at >= end:
        return 0
    kind = load_u8(at)
    if FIXED_ARRAY <= kind <= FIXED_ARRAY + _SMALL_ARRAY_MAX:
        store_u64(out, kind - FIXED_ARRAY)
        return at + 1
    if kind != _ARRAY_16 or at + 3 > end:
        return 0
    store_u64(out, load_u8(at + 1) << _BYTE_BITS | load_u8(at + 2))
    return at + 3


@kernel("int64(int64,int64)")
def write_unsigned(at: int, value: int) -> int:
    """Write an integer that is not negative in its shortest form, of UNSIGNED_BYTES_MAX at most."""
    if value <= _FIXED_MAX:
        store_u8(at, value)
        return at + 1
    size, kind = 1, _UNSIGNED_8
    while size < 8 and value >> (_BYTE_BITS * size) != 0:
        size, kind = 2 * size, kind + 1
    store_u8(at, kind)
    for index in range(size):
        store_u8(at + 1 + index, (value >> (_BYTE_BITS * (size - 1 - index))) & _BYTE_MASK)
    return at + 1 + size
