"""The route of a key to its consumer: consistent hashing over the consumers of a key_shared subscription.

    key hash -> bucket (16,384 of them) -> owner, by 100 points of each consumer on a ring

A bucket's messages are with one consumer at a time: while one has some, another owner has to wait;
behind a message that waits all others of its bucket wait, so the order of a key is kept, whichever consumer
comes, goes or has no credit. A message without a key goes to any bucket. With filters a message has
a mask that says which sets of filters take its key, and each mask has owners of its own. IO-free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from danube_fast.broker.ledger.layout import (
    BUCKETS,
    NO_SLOT,
    BucketWord,
    HeadWord,
    RouteWord,
)
from danube_fast.broker.ledger.ledger import Ledger, Rows, runs_of
from danube_fast.broker.sparse import by_row
from danube_fast.broker.subscription import routing_kernels as k
from danube_fast.broker.subscription.consumer import Consumer, Stored
from danube_fast.broker.subscription.cuts import view_of
from danube_fast.errors import DataLoss
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.view import FrameView

__all__ = ["Router"]

POINTS = 100
"""Of each consumer on the ring."""
AHEAD_MAX = 1 << 18
"""So many messages may wait for their consumers; then nothing fresh is looked at."""
KEYS_KEPT_MAX = 1 << 16
TABLES_MAX = 1024
"""Masks with a table of their own, 32 KiB each."""

_route, _note_routes = direct(k.route), direct(k.note_routes)
_next_eligible, _group_rows = direct(k.next_eligible), direct(k.group_rows)
_keep_waiting = direct(k.keep_waiting)


class Router:
    """Owners of keys, for one ledger with routes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buckets = np.zeros((BUCKETS, len(BucketWord)), np.int64)
        ledger.words[HeadWord.BUCKETS] = int(self._buckets.ctypes.data)
        self._job = np.zeros(len(RouteWord), np.int64)
        self._words = self._job.data
        self._allowance = np.zeros(0, np.int64)
        self._slots = np.zeros(0, np.uint16)
        self._consumers: list[Consumer] = []
        self._ring: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._filters: list[tuple[str, ...]] = []
        """Sets of filters, by the bit of a mask."""
        self._is_filtered = False
        self._masks: dict[int, int] = {}
        """Mask -> which table of owners."""
        self._tables: list[NDArray[np.uint16]] = []
        self._addresses = np.zeros(0, np.int64)
        self._keys: dict[bytes | None, int] = {}
        """Key -> which table, as far as it is known."""
        self._starved: list[Consumer] = []
        self._must_walk = False
        self._at = 0
        self._columns: tuple[Any, Any] = (None, None)
        self._skipped: Rows | None = None
        self.skipped_count = 0
        """Messages whose key no consumer took."""

    def restart(self) -> None:
        """Begin anew with the ledger: no consumer has anything."""
        self._buckets[:] = 0

    @property
    def is_unblocked(self) -> bool:
        """A key is free again for which messages wait."""
        return bool(self._ledger.words[HeadWord.UNBLOCKED])

    @property
    def is_full(self) -> bool:
        """Too many messages wait to look at fresh ones."""
        return self._ledger.waiting >= AHEAD_MAX

    # ------------------------------------------------------------ owners

    def set_consumers(self, consumers: Sequence[Consumer]) -> bool:
        """Other consumers. True if there were ever filters: tables have other numbers now, so what waits
        must be looked at again."""
        self._consumers = list(consumers)
        self._must_walk = True
        self._starved = []
        slots = max((consumer.slot for consumer in consumers), default=-1) + 1
        self._allowance = np.zeros(max(1, slots), np.int64)
        self._words[RouteWord.ALLOWANCE] = int(self._allowance.ctypes.data)
        if consumers:
            self._filters = sorted({consumer.filters for consumer in consumers})
            self._is_filtered = self._is_filtered or self._filters != [()]
        self._make_ring()
        self._forget_masks()
        return bool(consumers) and self._is_filtered

    def _make_ring(self) -> None:
        points: list[tuple[int, int]] = []
        seen: dict[str, int] = {}
        for place, consumer in enumerate(self._consumers):
            twin = seen[consumer.name] = seen.get(consumer.name, -1) + 1
            for number in range(POINTS):
                text = f"{consumer.name}\n{twin}\n{number}"
                points.append((xxhash.xxh64_intdigest(text.encode()), place))
        points.sort()
        self._ring = None
        if points:
            hashes, places = zip(*points, strict=True)
            self._ring = np.array(hashes, np.uint64), np.array(places, np.int64)

    def _forget_masks(self) -> None:
        self._masks.clear()
        self._tables.clear()
        self._keys.clear()
        self._table_of((1 << len(self._filters)) - 1)

    def _table_of(self, mask: int) -> int:
        """Which table has the owners for keys that these sets of filters take."""
        if mask not in self._masks and len(self._tables) >= TABLES_MAX:
            mask &= -mask  # the first of the sets that take it: there are few of those
        number = self._masks.get(mask)
        if number is None:
            number = self._masks[mask] = len(self._tables)
            self._tables.append(self._owners(mask))
            self._addresses = np.array([table.ctypes.data for table in self._tables], np.int64)
            self._words[RouteWord.OWNERS] = int(self._addresses.ctypes.data)
            self._words[RouteWord.TABLES] = len(self._tables)
        return number

    def _owners(self, mask: int) -> NDArray[np.uint16]:
        """Slot by bucket: that of the first point at or behind the bucket whose consumer takes it."""
        table = np.full(BUCKETS, NO_SLOT, np.uint16)
        takers = {filters for bit, filters in enumerate(self._filters) if mask >> bit & 1}
        if self._ring is None:
            return table
        hashes, places = self._ring
        wanted = np.array([consumer.filters in takers for consumer in self._consumers])
        mine = wanted[places]
        if not mine.any():
            return table
        hashes, places = hashes[mine], places[mine]
        starts = np.arange(BUCKETS, dtype=np.uint64) * np.uint64((1 << 64) // BUCKETS)
        found = np.searchsorted(hashes, starts) % len(hashes)
        slots = np.array([consumer.slot for consumer in self._consumers], np.uint16)
        table[:] = slots[places[found]]
        return table

    def _masks_of(self, view: FrameView) -> NDArray[np.uint16] | None:
        """Which table each message of a frame belongs to; None: all take every key."""
        if self._filters == [()]:
            return None
        if len(self._keys) > KEYS_KEPT_MAX:
            self._keys.clear()
        known = self._keys
        keys = view.keys() or [None] * view.message_count
        for key in set(keys).difference(known):
            text = "" if key is None else key.decode("utf-8", "surrogateescape")
            mask = 0
            for bit, filters in enumerate(self._filters):
                if not filters or any(fnmatchcase(text, glob) for glob in filters):
                    mask |= 1 << bit
            known[key] = self._table_of(mask)
        return np.array([known[key] for key in keys], np.uint16)

    # ------------------------------------------------------------ passes

    def begin_pass(self, consumers: Sequence[Consumer]) -> None:
        """Begin a dispatch: note how many messages each consumer may take."""
        words = self._ledger.words
        if words[HeadWord.UNBLOCKED] or any(c.flow.willing for c in self._starved):
            words[HeadWord.UNBLOCKED] = 0
            self._must_walk = True
        for consumer in consumers:
            flow = consumer.flow
            self._allowance[consumer.slot] = flow.message_credit if flow.willing else 0
        self._starved = [consumer for consumer in consumers if not consumer.flow.willing]
        self._words[RouteWord.PASS] += 1
        self._at = self._ledger.cursor

    def woken(self) -> bool:
        """Messages wait again. True if they must be looked at again: their routes may name tables that
        are gone."""
        self._must_walk = True
        return self._is_filtered

    def next_waiting(self) -> int | None:
        """The next message that waits and can be handed out; None: there is no other in this pass."""
        if not self._must_walk:
            return None
        offset = _next_eligible(self._ledger.address, int(self._job.ctypes.data), self._at)
        if offset < 0:
            self._must_walk = False
            return None
        self._at = int(offset)
        return self._at

    def route(self, stored: Stored, rows: Rows, *, waiting: bool) -> list[tuple[Consumer, Rows]]:
        """Consumers and what they get of `rows` of a frame; the rest waits. `waiting`: it did before."""
        self._prepare(stored, rows, waiting=waiting)
        low, high = stored.base_offset + int(rows[0]), stored.base_offset + int(rows[-1]) + 1
        self._ledger.call(_route, low, high, int(self._job.ctypes.data))
        self._at = max(self._at, high)
        grouped, ends = np.empty_like(rows), np.zeros(len(self._allowance), np.int64)
        job = int(self._job.ctypes.data)
        _group_rows(job, address_of(ends), len(ends), address_of(grouped))
        bounds = [0, *ends.tolist()]
        parts: list[tuple[Consumer, Rows]] = []
        for consumer in self._consumers:
            start, end = bounds[consumer.slot : consumer.slot + 2]
            if start < end:
                parts.append((consumer, grouped[start:end]))
            if self._allowance[consumer.slot] <= 0:
                self._starve(consumer)
        is_all = bounds[-1] == len(rows)
        skipped = rows[:0] if is_all else rows[self._slots[: len(rows)] == NO_SLOT]
        self._skipped = skipped if len(skipped) else None
        return parts

    def keep_waiting(self, consumer: Consumer, base: int, rows: Rows) -> None:
        """Let these messages wait: their consumer has no credit for them."""
        _keep_waiting(self._ledger.address, base, address_of(rows), len(rows))
        self._starve(consumer)

    def _starve(self, consumer: Consumer) -> None:
        """The consumer has no credit any more: all else of its keys waits."""
        self._allowance[consumer.slot] = 0
        if consumer not in self._starved:
            self._starved.append(consumer)

    def _prepare(self, stored: Stored, rows: Rows, *, waiting: bool) -> None:
        """Tell the kernels of some messages of a frame."""
        words = self._words
        hashes = masks = None
        if not waiting:
            with contextlib.suppress(DataLoss):  # compressed garbage: its consumer will say so
                view = view_of(stored)
                hashes, masks = view.key_hashes(), self._masks_of(view)
                if stored.is_sparse:
                    hashes = None if hashes is None else by_row(stored, view, hashes)
                    masks = None if masks is None else by_row(stored, view, masks)
        if len(self._slots) < len(rows):
            self._slots = np.zeros(2 * len(rows), np.uint16)
        words[RouteWord.BASE] = stored.base_offset
        words[RouteWord.ROWS], words[RouteWord.COUNT] = address_of(rows), len(rows)
        words[RouteWord.HASHES] = 0 if hashes is None else int(hashes.ctypes.data)
        words[RouteWord.MASKS] = 0 if masks is None else int(masks.ctypes.data)
        words[RouteWord.SLOTS] = int(self._slots.ctypes.data)
        words[RouteWord.IS_WAITING] = waiting
        self._columns = hashes, masks  # kernels know only where they lie

    def note(self, stored: Stored, rows: Rows) -> None:
        """Note the keys of messages that are put aside; where they go is decided when they wait."""
        self._prepare(stored, rows, waiting=False)
        low, high = stored.base_offset + int(rows[0]), stored.base_offset + int(rows[-1]) + 1
        self._ledger.call(_note_routes, low, high, int(self._job.ctypes.data))

    def take_skipped(self, base: int) -> list[tuple[int, int]]:
        """Ranges of the last frame whose keys no consumer takes."""
        skipped, self._skipped = self._skipped, None
        if skipped is None:
            return []
        self.skipped_count += len(skipped)
        return runs_of(skipped, base)
