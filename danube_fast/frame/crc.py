"""crc32c (Castagnoli), inside kernels and in Python.

The work is done by the C library that ships inside the google-crc32c wheel (about 28 GB/s). Kernels
call it through a symbol of our own, `danube_crc32c_extend`, and a word that holds its address. Where
that library cannot be loaded, a table-driven routine stands there: slower, same answers.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

from danube_fast.frame import kernel as kernels
from danube_fast.frame.kernel import address_of, direct, external, kernel
from danube_fast.frame.memory import load_u8

__all__ = ["crc32c", "crc32c_extend"]

_SYMBOL = "danube_crc32c_extend"
_SIGNATURE = "uint32(uint32,int64,int64)"
_POLYNOMIAL = 0x82F6_3B78
_MASK = 0xFFFF_FFFF
_DISABLE_VARIABLE = "DANUBE_PLAIN_CRC"


def _make_table() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Remainders of all 256 bytes, the polynomial bit-reversed."""
    table = np.zeros(256, dtype=np.int64)
    for byte in range(256):
        remainder = byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (_POLYNOMIAL if remainder & 1 else 0)
        table[byte] = remainder
    return table


_TABLE = _make_table()


@kernel("int64(int64,int64,int64)")
def _table_extend(crc: int, address: int, byte_count: int) -> int:
    """The fallback, one byte at a time. `crc` is the finished crc of what came before."""
    remainder = (crc & _MASK) ^ _MASK
    for index in range(byte_count):
        remainder = (remainder >> 8) ^ _TABLE[(remainder ^ load_u8(address + index)) & 0xFF]
    return remainder ^ _MASK


_call_table: Any = _table_extend


def _library_entry() -> int | None:
    """Address of `crc32c_extend` in the wheel's C library; None if there is none."""
    if os.environ.get(_DISABLE_VARIABLE):
        return None
    spec = importlib.util.find_spec("google_crc32c")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    patterns = (package.parent / "google_crc32c.libs", package)
    for folder in patterns:
        for path in sorted(glob.glob(str(folder / "libcrc32c*.so*"))):
            try:
                function = ctypes.CDLL(path).crc32c_extend
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _bind(entry: int | None) -> Any:
    """Put the C library, or the table, behind the symbol; returns what must be kept alive."""
    if not kernels.COMPILING:
        if entry is not None:
            kernels.image.set_crc_entry(entry)  # else the table is there already
        return None
    if kernels.BUILDING:
        return None  # the image has a function of this name
    import llvmlite.binding
    import numba

    kept: Any = None
    if entry is None:

        @numba.cfunc(_SIGNATURE)
        def table(crc: Any, address: Any, byte_count: Any) -> Any:
            return np.uint32(_call_table(np.int64(crc), address, byte_count))

        kept, entry = table, int(table.address or 0)
    llvmlite.binding.add_symbol(_SYMBOL, entry)
    return kept


_entry = _library_entry()
_kept = _bind(_entry)
_extend = external(_SYMBOL, _SIGNATURE)


@kernel("int64(int64,int64,int64)")
def crc32c_extend(crc: int, address: int, byte_count: int) -> int:
    """crc32c of what `crc` covers followed by `byte_count` bytes at `address`; start with 0."""
    if byte_count <= 0:
        return crc
    return np.int64(_extend(np.uint32(crc), address, byte_count))  # type: ignore[return-value]


_call = direct(crc32c_extend)


def crc32c(buffer: Any, crc: int = 0) -> int:
    """crc32c of a contiguous bytes-like object; `crc` continues an earlier one."""
    view = memoryview(buffer)
    if not view.nbytes:
        return crc
    return int(_call(crc, address_of(view), view.nbytes))
