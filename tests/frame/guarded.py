"""Memory that ends at a page nobody may touch: one byte too far is a SIGSEGV, not a wrong answer."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

PAGE_BYTES = mmap.PAGESIZE
_PROT_NONE = 0


class Guarded:
    """`capacity_bytes` bytes (rounded up to pages) between two unreadable pages."""

    def __init__(self, capacity_bytes: int) -> None:
        pages = -(-capacity_bytes // PAGE_BYTES)
        self.capacity_bytes = pages * PAGE_BYTES
        self._map = mmap.mmap(-1, self.capacity_bytes + 2 * PAGE_BYTES)
        whole = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        base = ctypes.addressof(whole)
        self.whole = whole
        """All of it, with the pages."""
        self.first = base + PAGE_BYTES
        self.end = self.first + self.capacity_bytes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for page in (base, self.end):
            if libc.mprotect(page, PAGE_BYTES, _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect failed")

    def put_last(self, content: bytes) -> tuple[int, Any]:
        """Copy `content` so that it ends at the upper guard page: (address, memoryview)."""
        address = self.end - len(content)
        ctypes.memmove(address, bytes(content), len(content))
        return address, self.window(address, len(content))

    def put_first(self, content: bytes) -> tuple[int, Any]:
        """Copy `content` so that it begins at the lower guard page: (address, memoryview)."""
        ctypes.memmove(self.first, bytes(content), len(content))
        return self.first, self.window(self.first, len(content))

    def window(self, address: int, byte_count: int) -> Any:
        """The bytes at an address."""
        return memoryview((ctypes.c_ubyte * byte_count).from_address(address))
