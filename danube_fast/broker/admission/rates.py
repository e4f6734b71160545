"""A rate limit as state machines use it; the buckets themselves lie in shared memory (ring/)."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Rate"]


class Rate(Protocol):
    """Messages and bytes a second. Times are monotonic nanoseconds."""

    def wait_ns(self, now_ns: int) -> int:
        """In how many ns something may go; 0: now."""
        ...

    def room(self, now_ns: int, message_bytes: int) -> int:
        """Messages of so many bytes that may go now, at least 1 when nothing is owed."""
        ...

    def take(self, now_ns: int, messages: int, byte_count: int) -> None:
        """Charge the bucket."""
        ...
