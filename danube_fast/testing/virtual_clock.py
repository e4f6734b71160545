"""Time in a simulation: a clock that jumps to the next thing that happens, and what happens next.

Nothing waits: an event is called at its time, and between two events no time goes by. Two events of
the same instant come in the order in which they were scheduled.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable

from danube_fast.clock import MICROSECOND_NS, MILLISECOND_NS, SECOND_NS

__all__ = ["MICROSECOND_NS", "MILLISECOND_NS", "SECOND_NS", "Schedule", "Trace", "VirtualClock"]

START_NS = 1_000 * SECOND_NS
WALL_AT_ZERO_NS = 1_800_000_000 * SECOND_NS
LINES_KEPT = 400


class VirtualClock:
    """The clock of everything in a simulation."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.wall_at_zero_ns = WALL_AT_ZERO_NS
        """Set it to make the wall clock jump."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary start."""
        return self.now_ns

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return self.wall_at_zero_ns + self.now_ns


class Trace:
    """The events of a run as a hash; the last lines are kept to be read."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.count = 0
        self.is_verbose = False
        """Print every line."""
        self.hidden = ""
        """A text that is another one in each run, such as the folder's name."""

    def note(self, text: str, data: bytes = b"") -> None:
        """Something happened; `data` goes into the hash only."""
        if self.hidden and self.hidden in text:
            text = text.replace(self.hidden, "FOLDER")
            data = data.replace(self.hidden.encode(), b"FOLDER")
        line = f"{self._clock.now_ns - START_NS:>14,} {text}"
        self.count += 1
        self._hash.update(line.encode())
        if data:
            self._hash.update(data)
        self.lines.append(line)
        if self.is_verbose:
            print(line)

    def digest(self) -> str:
        """The hash of all that happened so far."""
        return self._hash.hexdigest()


class Schedule:
    """Events to come, by time."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.event_count = 0

    def call(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Call `action` so much later."""
        due_ns = self.clock.now_ns + max(0, delay_ns)
        heapq.heappush(self._heap, (due_ns, next(self._numbers), action))

    def run(self, duration_ns: int, until: Callable[[], bool] | None = None) -> bool:
        """Let so much time go by, or less: as soon as `until()`, asked now and then, is true (then
        True)."""
        end_ns = self.clock.now_ns + duration_ns
        asks_ns = self.clock.now_ns
        while self._heap and self._heap[0][0] <= end_ns:
            due_ns, _, action = heapq.heappop(self._heap)
            self.clock.now_ns = max(due_ns, self.clock.now_ns)
            self.event_count += 1
            action()
            if until is not None and due_ns >= asks_ns:
                if until():
                    return True
                asks_ns = due_ns + 100 * MILLISECOND_NS
        self.clock.now_ns = end_ns
        return until is not None and until()
