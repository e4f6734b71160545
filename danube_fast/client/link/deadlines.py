"""Deadlines of one client: what is armed, and when the first of it is due.

The timer thread (`timers.py`) sleeps until then, and is woken for one that comes earlier.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from danube_fast.client.link.parts import Timed
from danube_fast.client.values.limits import FOREVER_NS

__all__ = ["Deadlines", "nothing"]


def nothing() -> None:
    """Do nothing, where no listener is set."""


class Deadlines:
    """Deadlines, and the timer thread that waits for the first of them. Under the lock of the pump."""

    def __init__(self) -> None:
        self.armed: dict[Timed, int] = {}
        self._deadlines: list[tuple[int, int, Timed]] = []
        """A heap; an entry counts only as long as `armed` says the same."""
        self._order = itertools.count()
        self._wake_timers: Callable[[], None] = nothing
        self._timers_due_ns = 0

    def arm(self, timed: Timed, deadline_ns: int) -> None:
        """Call `timed.on_time` at that monotonic time."""
        self.armed[timed] = deadline_ns
        heapq.heappush(self._deadlines, (deadline_ns, next(self._order), timed))
        if deadline_ns < self._timers_due_ns:
            self._timers_due_ns = 0
            self._wake_timers()

    def disarm(self, timed: Timed) -> None:
        """Do not call any more."""
        self.armed.pop(timed, None)

    def take_due(self, now_ns: int) -> list[tuple[Timed, int]]:
        """Return what is due, with its deadline; `armed` still has it."""
        due: list[tuple[Timed, int]] = []
        while self.next_deadline_ns() <= now_ns:
            deadline_ns, _, timed = heapq.heappop(self._deadlines)
            due.append((timed, deadline_ns))
        return due

    def next_deadline_ns(self) -> int:
        """Return when the next one is due."""
        heap = self._deadlines
        while heap and self.armed.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else FOREVER_NS

    def attach_timers(self, wake: Callable[[], None]) -> None:
        """Call `wake` when a deadline is armed that is earlier than all others."""
        self._wake_timers = wake

    def timers_sleep_until(self, monotonic_ns: int) -> None:
        """Wake the timer thread for a deadline before that time; 0 = do not disturb."""
        self._timers_due_ns = monotonic_ns
