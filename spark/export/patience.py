"""Patience of an export that follows its topic: what is away is tried again, for a while.

    success --> failure: said once --> pause --> try --> pause, twice as long --> try ... --> success, or the end

Broker, store and catalogue restart, and a connection is lost now and then; a run without an end outlives that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from danube_fast.clock import SECOND_NS, Clock, SystemClock
from danube_fast.errors import DeadlineExceeded, Unavailable

__all__ = ["AWAY_SECONDS", "Patience", "Trouble"]

AWAY_SECONDS = 3600.0
"""So long all tries may fail, as those of a replay."""
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 10.0
"""A broker that is back is found soon, and one that is away is not asked all the time."""
Trouble = Unavailable | DeadlineExceeded


class Patience:
    """Counts how long nothing has succeeded."""

    def __init__(
        self, on_trouble: Callable[[Trouble], None], clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """`on_trouble` is told the first failure behind a success."""
        self._on_trouble = on_trouble
        self._clock, self._sleep = clock or SystemClock(), sleep
        self._since_ns: int | None = None
        self._pause = PAUSE_SECONDS_MIN

    def end(self) -> None:
        """Note a success."""
        self._since_ns = None
        self._pause = PAUSE_SECONDS_MIN

    def wait(self, error: Trouble) -> None:
        """Pause before the next try. Raises an error of the same kind if all tries have failed for AWAY_SECONDS."""
        now_ns = self._clock.monotonic_ns()
        if self._since_ns is None:
            self._since_ns = now_ns
            self._on_trouble(error)
        left = AWAY_SECONDS - (now_ns - self._since_ns) / SECOND_NS
        if left <= 0:
            raise type(error)(f"{error}; all tries have failed for {AWAY_SECONDS:g} s") from error
        self._sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
