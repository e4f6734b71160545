"""Jobs: what a worker does by the clock, a slice at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Job"]


class Job(ABC):
    """Work that a worker does in slices, so that clients never wait for the whole of it."""

    @property
    def is_busy(self) -> bool:
        """Whether the worker must not sleep for long, because there is more to do."""
        return False

    @abstractmethod
    def do_work(self, now_ns: int) -> None:
        """Do a slice of what is due. `now_ns`: when the turn began, monotonic, ns."""
