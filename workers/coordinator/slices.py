"""Long work of the coordinator, such as a list of a million topics: a slice in each turn, in the order in which it came."""

from __future__ import annotations

from collections import Counter, deque

from danube_fast.broker.admin.registry import Steps
from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.errors import ResourceExhausted

__all__ = ["Slices"]

SLICE_NS = 2 * MILLISECOND_NS
WAITING_MAX = 1000
"""Each waits with what it has found so far."""
WAITING_OF_ONE_MAX = 250
"""Of one principal."""
STEPS_BETWEEN_LOOKS = 4
"""Steps between two looks at the clock."""


class Slices:
    """Take the steps of all that is under way. Used by the coordinator's loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[str, Steps]] = deque()
        self._of_one: Counter[str] = Counter()

    def add(self, principal: str, steps: Steps) -> None:
        """Take steps for a principal from now on; all of them at once if they are few. Raises ResourceExhausted."""
        if len(self._waiting) >= WAITING_MAX or self._of_one[principal] >= WAITING_OF_ONE_MAX:
            raise ResourceExhausted("too many long lists are being made; try again in a moment")
        if not self._take(steps):
            self._waiting.append((principal, steps))
            self._of_one[principal] += 1

    def do_work(self) -> int:
        """Take a slice of the work that waits longest; the number of slices taken."""
        if not self._waiting:
            return 0
        principal, steps = self._waiting.popleft()
        if not self._take(steps):
            self._waiting.append((principal, steps))
            return 1
        self._of_one[principal] -= 1
        if not self._of_one[principal]:
            del self._of_one[principal]
        return 1

    def _take(self, steps: Steps) -> bool:
        """Take one slice; whether it was the last."""
        until_ns = self._clock.monotonic_ns() + SLICE_NS
        while self._clock.monotonic_ns() < until_ns:
            for _ in range(STEPS_BETWEEN_LOOKS):
                if next(steps, self) is self:
                    return True
        return False
