"""Memory of the ledgers of a process: pages that they take and give back. Kernels take pages through the
two words at `address`; only `grow` allocates."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.ledger.layout import PAGE_BYTES, ROUTED_PAGE_BYTES

__all__ = ["PAGES", "ROUTED_PAGES", "PagePool"]

PAGES_AT_ONCE = 16


class PagePool:
    """Pages of all ledgers of a worker; what they give back they share."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self._chunks: list[Any] = []
        self._count = 0
        self._stack = np.zeros(0, np.int64)
        self._head = np.zeros(2, np.int64)
        self.address = int(self._head.ctypes.data)
        """Of two words: how many pages are free, where their addresses stand."""

    @property
    def free_count(self) -> int:
        """Pages that are free."""
        return int(self._head[0])

    def grow(self, page_count: int) -> None:
        """Have at least so many free pages."""
        free = self.free_count
        wanted = max(PAGES_AT_ONCE, page_count - free, self._count >> 3)
        chunk = np.empty(wanted * self.page_bytes, np.uint8)
        self._chunks.append(chunk)
        self._count += wanted
        stack = np.zeros(self._count, np.int64)
        stack[:free] = self._stack[:free]
        stack[free : free + wanted] = chunk.ctypes.data + self.page_bytes * np.arange(wanted)
        self._stack = stack
        self._head[:] = free + wanted, stack.ctypes.data

    def take_back(self, pages: NDArray[np.int64]) -> None:
        """Take back pages that are free again, by address."""
        free = self.free_count
        self._stack[free : free + len(pages)] = pages
        self._head[0] = free + len(pages)


PAGES = PagePool()
"""Of all ledgers of the process."""
ROUTED_PAGES = PagePool(ROUTED_PAGE_BYTES)
"""Of those whose messages are routed by key."""
