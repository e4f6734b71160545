"""The only clock. Everything else takes a `Clock` and never asks the operating system for the time.

Wall time stamps messages; monotonic time measures waits. A simulation passes a clock of its own.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


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
