"""A heap of due times: one entry for each subscription that waits for one. IO-free."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, Protocol, TypeVar

__all__ = ["NEVER", "Timed", "Timers"]

NEVER = 1 << 62
WALL_STEP_NS = 20_000_000
"""By so much the wall clock may run ahead of the monotonic one before all owners look again at what is due."""
FORGOTTEN_MAX = 64
"""So many owners may be kept that were forgotten elsewhere: some megabytes, where a heap has thousands."""


class Timed(Protocol):
    """Something that wants to be called at a time."""

    armed_ns: int
    """When it is called, as far as `Timers` knows; NEVER: it is not."""


Owner = TypeVar("Owner", bound=Timed)


class Timers(Generic[Owner]):
    """A heap of times. An entry whose time is not that of its owner any more is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Owner]] = []
        self._numbers = itertools.count()
        self._forgotten = 0
        """Entries at most of owners that were forgotten."""
        self._wall_ahead_ns = self._reckoned_ns = 0
        """As it is, and the least that any time in the heap was reckoned with."""

    @property
    def wall_ahead_ns(self) -> int:
        """The wall clock less the monotonic one, by which everything here goes. When it is set forward, or
        the machine was suspended, all owners are called: what has a wall-clock time is due earlier."""
        return self._wall_ahead_ns

    @wall_ahead_ns.setter
    def wall_ahead_ns(self, ahead_ns: int) -> None:
        self._wall_ahead_ns = ahead_ns
        if ahead_ns < self._reckoned_ns:
            self._reckoned_ns = ahead_ns
        elif ahead_ns > self._reckoned_ns + WALL_STEP_NS:
            self._reckoned_ns = ahead_ns
            living = [owner for at, _, owner in self._heap if at == owner.armed_ns]
            self._heap = []
            for owner in living:
                owner.armed_ns = 0
                self._heap.append((0, next(self._numbers), owner))

    def arm(self, owner: Owner, due_ns: int) -> None:
        """Call `owner` at that time, unless it is called earlier anyway."""
        if due_ns < owner.armed_ns:
            owner.armed_ns = due_ns
            heapq.heappush(self._heap, (due_ns, next(self._numbers), owner))

    def forget(self, owner: Owner) -> None:
        """Call `owner` no more, and do not keep it."""
        if owner.armed_ns == NEVER:
            return
        owner.armed_ns = NEVER
        self._forgotten += 1
        if self._forgotten >= FORGOTTEN_MAX:
            self._forgotten = 0
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].armed_ns]
            heapq.heapify(self._heap)

    @property
    def next_ns(self) -> int:
        """When an owner may have to be called; NEVER if none has."""
        return self._heap[0][0] if self._heap else NEVER

    def soon(self, until_ns: int) -> list[Owner]:
        """Whose time comes before `until_ns`; in no order."""
        if self.next_ns >= until_ns:
            return []
        return [owner for at, _, owner in self._heap if at < until_ns and at == owner.armed_ns]

    def due(self, now_ns: int) -> list[Owner]:
        """Whose time has come; they are armed no more."""
        found: list[Owner] = []
        while self._heap and self._heap[0][0] <= now_ns:
            due_ns, _, owner = heapq.heappop(self._heap)
            if owner.armed_ns == due_ns:
                owner.armed_ns = NEVER
                found.append(owner)
        return found
