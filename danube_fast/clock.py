"""The only clock. Everything else takes a `Clock` and never asks the operating system for the time.

Wall time stamps messages; monotonic time measures waits. A simulation passes a clock of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = [
    "MICROSECOND_NS",
    "MILLISECOND_NS",
    "NEVER_NS",
    "SECOND_NS",
    "Clock",
    "SystemClock",
    "spin",
]

MICROSECOND_NS = 1_000
MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
NEVER_NS = 1 << 62
"""A time that never comes."""

T = TypeVar("T")


class Clock(Protocol):
    """Two readings of time, both in nanoseconds."""

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, UTC; may jump."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The clock of this machine."""

    # read several times for every message: no Python function stands between
    wall_ns = staticmethod(time.time_ns)
    """Nanoseconds since the Unix epoch, UTC."""
    monotonic_ns = staticmethod(time.monotonic_ns)
    """CLOCK_MONOTONIC, nanoseconds."""


def spin(clock: Clock, duration_ns: int, look: Callable[[], T]) -> T | None:
    """Call `look` until it finds something, for so long at most, without giving up the core; its last result."""
    found: T | None = None
    if duration_ns:
        end_ns = clock.monotonic_ns() + duration_ns
        while not found and clock.monotonic_ns() < end_ns:
            found = look()
    return found
