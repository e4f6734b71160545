"""Jobs: work of a worker by the clock, a slice at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Job", "PeriodicJob"]


class Job(ABC):
    """Do work in slices, so that clients never wait for the whole of it."""

    @property
    def is_busy(self) -> bool:
        """Whether the worker must not sleep for long, because there is more to do."""
        return False

    @abstractmethod
    def do_work(self, now_ns: int) -> None:
        """Do a slice of what is due. `now_ns`: when the turn began, monotonic, ns."""


class PeriodicJob(Job):
    """Run once in each interval."""

    interval_ns: int
    _next_ns = 0

    def do_work(self, now_ns: int) -> None:
        """Run if the interval is over."""
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + self.interval_ns
            self.run(now_ns)

    @abstractmethod
    def run(self, now_ns: int) -> None:
        """Do what is due. May set `_next_ns`, to run again earlier or later."""
