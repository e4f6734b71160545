"""Messages that wait for their deliver-at time: a heap of times in one array, moved by kernels.

    entry   due ns i64 | offset i64        16 bytes a message; children of entry i: 2i + 1, 2i + 2

Of those that are due at the same time the one with the lower offset is first. The ledger says DELAYED
of them; when their time has come, they wait for delivery like any other.
"""

from __future__ import annotations

import numpy as np

from danube_fast.broker.ledger.layout import AT_STATES, PAGE_MASK, HeadWord, State
from danube_fast.broker.ledger.ledger import Ledger, Rows
from danube_fast.broker.ledger.pages import add, count_waiting, page_of, prepare
from danube_fast.broker.subscription.timers import NEVER
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.memory import (
    load_i32,
    load_i64,
    load_u32,
    load_word,
    store_u32,
    store_u64,
    store_word,
)

__all__ = ["Delays"]

ENTRIES_AT_FIRST = 256
WAKE_MAX = 100_000
"""Messages that are woken at once; the rest follows in the next turn."""
LOOKED_AT_MAX = 4096
"""Entries at which `due_between` looks at most."""
_ENTRY = 16
_AT_OFFSET = 8


@kernel("void(int64,int64,int64,int64)")
def _put(heap: int, place: int, due: int, offset: int) -> None:
    store_u64(heap + place * _ENTRY, due)
    store_u64(heap + place * _ENTRY + _AT_OFFSET, offset)


@kernel("void(int64,int64,int64)")
def _move(heap: int, source: int, place: int) -> None:
    """Copy an entry."""
    due = load_i64(heap + source * _ENTRY)
    _put(heap, place, due, load_i64(heap + source * _ENTRY + _AT_OFFSET))


@kernel("int64(int64,int64,int64,int64)")
def _is_before(heap: int, place: int, due: int, offset: int) -> int:
    """1 if an entry comes out before one of that time and offset."""
    other = load_i64(heap + place * _ENTRY)
    if other != due:
        return 1 if other < due else 0
    return 1 if load_i64(heap + place * _ENTRY + _AT_OFFSET) < offset else 0


@kernel("void(int64,int64,int64,int64)")
def _push(heap: int, size: int, due: int, offset: int) -> None:
    """Add an entry to a heap of `size`."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if _is_before(heap, parent, due, offset):
            break
        _move(heap, parent, place)
        place = parent
    _put(heap, place, due, offset)


@kernel("void(int64,int64)")
def _pop(heap: int, size: int) -> None:
    """Remove the first entry of a heap of `size`."""
    last = size - 1
    due, offset = load_i64(heap + last * _ENTRY), load_i64(heap + last * _ENTRY + _AT_OFFSET)
    place, child = 0, 1
    while child < last:
        below = load_i64(heap + child * _ENTRY)
        beside = load_i64(heap + child * _ENTRY + _AT_OFFSET)
        if child + 1 < last and _is_before(heap, child + 1, below, beside):
            child += 1
        if not _is_before(heap, child, due, offset):
            break
        _move(heap, child, place)
        place, child = child, 2 * child + 1
    _put(heap, place, due, offset)


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def postpone(head: int, heap: int, size: int, base: int, rows: int, count: int, times: int) -> int:
    """Messages base + rows[i] (int32, rising) are DELAYED until times[i] (int64) if they are fresh; the
    new size of the heap, or NEED_..."""
    end = base + load_i32(rows + 4 * (count - 1)) + 1
    code = prepare(head, base + load_i32(rows), end)
    if code < 0:
        return code
    for i in range(count):
        offset = base + load_i32(rows + 4 * i)
        place = page_of(head, offset) + AT_STATES + 4 * (offset & PAGE_MASK)
        if load_u32(place) == State.FRESH:
            store_u32(place, State.DELAYED)
            add(head, HeadWord.DELAYED, 1)
            _push(heap, size, load_i64(times + 8 * i), offset)
            size += 1
    store_word(head, HeadWord.NEXT, max(end, load_word(head, HeadWord.NEXT)))
    return size


@kernel("int64(int64,int64,int64,int64,int64)")
def wake_due(head: int, heap: int, size: int, now_ns: int, count_max: int) -> int:
    """Let the messages whose time has come wait for delivery; the new size of the heap."""
    for _ in range(count_max):
        if size == 0 or load_i64(heap) > now_ns:
            break
        offset = load_i64(heap + _AT_OFFSET)
        _pop(heap, size)
        size -= 1
        page = page_of(head, offset) if offset >= load_word(head, HeadWord.CURSOR) else 0
        place = page + AT_STATES + 4 * (offset & PAGE_MASK)
        if page and load_u32(place) == State.DELAYED:
            store_u32(place, State.WAITING)
            count_waiting(head, page, offset & PAGE_MASK, 1)
            add(head, HeadWord.DELAYED, -1)
            store_word(
                head, HeadWord.FIRST_WAITING, min(offset, load_word(head, HeadWord.FIRST_WAITING))
            )
    return size


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def due_between(heap: int, size: int, low: int, high: int, target: int, count_max: int) -> int:
    """Write (i64) the offset of every entry with a time in [low, high), -1 for one with a time below
    `low`; looks at `count_max` entries at most. How many it wrote."""
    count = 0
    if size > 0 and load_i64(heap) < high:
        store_u64(target, 0)
        count = 1
    at = 0
    while at < count:
        place = load_i64(target + 8 * at)
        for child in range(2 * place + 1, 2 * place + 3):
            if child < size and count < count_max and load_i64(heap + child * _ENTRY) < high:
                store_u64(target + 8 * count, child)
                count += 1
        is_wanted = load_i64(heap + place * _ENTRY) >= low
        offset = load_i64(heap + place * _ENTRY + _AT_OFFSET)
        store_u64(target + 8 * at, offset if is_wanted else -1)
        at += 1
    return count


_postpone, _wake_due, _due_between = direct(postpone), direct(wake_due), direct(due_between)


class Delays:
    """The messages of one ledger that wait for a wall-clock time, nanoseconds since 1970."""

    __slots__ = ("_heap", "_ledger", "_size")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heap = np.zeros((0, 2), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def clear(self) -> None:
        """Forget all: the ledger starts over."""
        self._heap = np.zeros((0, 2), np.int64)
        self._size = 0

    @property
    def first_ns(self) -> int:
        """When the first of them is due; NEVER if there is none."""
        return int(self._heap[0, 0]) if self._size else NEVER

    def postpone(
        self, base: int, rows: Rows, times: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> None:
        """Fresh messages base + rows (rising) wait until `times`, int64, one for each row."""
        if self._size + len(rows) > len(self._heap):
            grown = np.zeros((max(ENTRIES_AT_FIRST, 2 * (self._size + len(rows))), 2), np.int64)
            grown[: self._size] = self._heap[: self._size]
            self._heap = grown
        low, high = base + int(rows[0]), base + int(rows[-1]) + 1
        heap = int(self._heap.ctypes.data)
        self._size = self._ledger.call(
            _postpone, low, high, heap, self._size, base, address_of(rows), len(rows), address_of(times)
        )  # fmt: skip

    def due_between(self, low_ns: int, high_ns: int) -> list[int]:
        """Rising offsets of messages whose time is in [low_ns, high_ns); not all if they are many."""
        found = np.empty(LOOKED_AT_MAX, np.int64)
        heap, target = int(self._heap.ctypes.data), address_of(found)
        count = _due_between(heap, self._size, low_ns, high_ns, target, LOOKED_AT_MAX)
        offsets = np.sort(found[:count])
        return [offset for offset in offsets.tolist() if offset >= 0]

    def wake(self, now_ns: int) -> int:
        """Let the messages that are due wait for delivery; how many left."""
        before = self._size
        heap = int(self._heap.ctypes.data)
        self._size = int(_wake_due(self._ledger.address, heap, before, now_ns, WAKE_MAX))
        if not self._size:
            self.clear()
        return before - self._size
