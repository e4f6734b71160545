"""The pace of a replay: rows go out when they did, so many times as fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from danube_fast.clock import MICROSECOND_NS, SECOND_NS, Clock
from danube_fast.spark.replay.rows import NO_TIME

__all__ = ["Pace"]

WAIT_NS = SECOND_NS
"""A wait is cut into such pieces: the caller looks after other things meanwhile."""


class Pace:
    """When rows are due: the first one now, each other one as long behind it as its time says."""

    def __init__(self, speed: float, clock: Clock, sleep: Callable[[float], None]) -> None:
        """`speed`: 2 is twice as fast. `sleep`: takes seconds."""
        self._speed, self._clock, self._sleep = speed, clock, sleep
        self._first_us = NO_TIME
        self._begun_ns = 0

    def due(self, times: Any, start: int, stop: int) -> int:
        """Index behind the last row of `start` to `stop` that is due; `times`: microseconds, never falling."""
        if self._first_us == NO_TIME:
            known = start + int(np.searchsorted(times[start:stop], NO_TIME, side="right"))
            if known == stop:
                return stop
            self._first_us, self._begun_ns = int(times[known]), self._clock.monotonic_ns()
        gone_us = (self._clock.monotonic_ns() - self._begun_ns) / MICROSECOND_NS * self._speed
        until = self._first_us + int(gone_us)
        return start + int(np.searchsorted(times[start:stop], until, side="right"))

    def wait(self, time_us: int) -> None:
        """Wait until a row with this time is due, a second at most."""
        due_ns = self._begun_ns + (time_us - self._first_us) * MICROSECOND_NS / self._speed
        left_ns = due_ns - self._clock.monotonic_ns()
        if left_ns > 0:
            self._sleep(min(left_ns + MICROSECOND_NS, WAIT_NS) / SECOND_NS)
