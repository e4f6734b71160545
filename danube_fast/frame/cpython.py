"""Where CPython keeps the items of a list and the bytes of a bytes object.

Packing and unpacking walk a `list[bytes]` inside a kernel, by address. That is right only if
objects look like this (64-bit; builds without a GIL are refused before, by `interpreter.py`):

    list    0 refcount | 8 type | 16 item count | 24 address of the items -> object addresses
    bytes   0 refcount | 8 type | 16 byte count | 24 hash                 | 32 the bytes

`OBJECTS_READABLE` says whether they do, found out at import by looking at a few objects. Where they
do not, `plain.py` does the same work through Python, byte for byte.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any

from danube_fast.frame.kernel import external

__all__ = [
    "AT_BYTES_DATA",
    "AT_ITEM_COUNT",
    "AT_LIST_ITEMS",
    "AT_TYPE",
    "BYTES_TYPE",
    "COUNTED_NONE",
    "NONE",
    "OBJECTS_READABLE",
    "POINTER_BYTES",
    "enter_gil",
    "leave_gil",
    "word_at",
]

AT_TYPE = 8
AT_ITEM_COUNT = 16
AT_LIST_ITEMS = 24
AT_BYTES_DATA = 32
POINTER_BYTES = 8

BYTES_TYPE = id(bytes)
"""Address of the type object `bytes`."""
NONE = id(None)
"""Address of `None`."""

leave_gil = external("PyEval_SaveThread", "int64()")
"""Of kernels: let other threads run Python; what `enter_gil` needs to go on."""
enter_gil = external("PyEval_RestoreThread", "void(int64)")

_DISABLE_VARIABLE = "DANUBE_PLAIN_FRAMES"
_PROBES = 1000


def word_at(address: int) -> int:
    """Read a word without a kernel: modules look at objects while they are imported."""
    return int(ctypes.c_int64.from_address(address).value)


def _bytes_look_right(probe: bytes) -> bool:
    address = id(probe)
    return (
        word_at(address + AT_TYPE) == BYTES_TYPE
        and word_at(address + AT_ITEM_COUNT) == len(probe)
        and ctypes.string_at(address + AT_BYTES_DATA, len(probe)) == probe
    )


def _list_looks_right(probe: list[Any]) -> bool:
    address = id(probe)
    if word_at(address + AT_TYPE) != id(list) or word_at(address + AT_ITEM_COUNT) != len(probe):
        return False
    items = word_at(address + AT_LIST_ITEMS)
    return all(word_at(items + POINTER_BYTES * i) == id(item) for i, item in enumerate(probe))


def _objects_readable() -> bool:
    if os.environ.get(_DISABLE_VARIABLE):
        return False
    if platform.python_implementation() != "CPython" or struct.calcsize("P") != POINTER_BYTES:
        return False
    return _bytes_look_right(b"some bytes, more than one word") and _list_looks_right(
        [b"first", None, b"third"]
    )


def _is_none_counted() -> bool:
    before = sys.getrefcount(None)
    probe = [None] * _PROBES
    return sys.getrefcount(None) - before >= len(probe)


OBJECTS_READABLE = _objects_readable()
"""Whether kernels may walk lists of bytes in this process."""
COUNTED_NONE = NONE if _is_none_counted() else 0
"""Address of `None` if references to it are counted (before Python 3.12), else 0."""
