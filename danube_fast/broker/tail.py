"""The messages of a partition that are visible: their bounds, their counts, and recent frames in memory. IO-free.

first_offset ... | frames in the log or gone | tail (in memory) | visible
^ _head            ^ the end of _tail
"""

from __future__ import annotations

from bisect import bisect_right

from danube_fast.broker.subscription.consumer import Gap, Stored

__all__ = ["Tail"]

_COMPACT_AT = 256


class Tail:
    """Base of `Partition`: what is visible of it."""

    __slots__ = (
        "__weakref__", "_head", "_tail", "_tail_bases", "byte_count", "first_offset", "logged", "message_count",
        "tail_bytes", "visible",
    )  # fmt: skip

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.visible = first_offset
        """The end of what consumers may see."""
        self.logged = False
        """Messages are written to the log; else the tail is all there is."""
        self.tail_bytes = 0
        self.message_count = 0
        self.byte_count = 0
        self._tail: list[Stored] = []
        self._tail_bases: list[int] = []
        self._head = 0

    def append(self, stored: Stored) -> None:
        """Make a frame visible and keep it in memory."""
        self._tail.append(stored)
        self._tail_bases.append(stored.base_offset)
        self.tail_bytes += stored.frame_bytes
        self.visible = stored.end_offset
        self.message_count += stored.message_count
        self.byte_count += stored.frame_bytes

    def evict(self) -> int:
        """Drop the oldest frame of the tail; returns its bytes."""
        stored = self._tail[self._head]
        self._tail[self._head] = None  # type: ignore[call-overload]
        self._head += 1
        self.tail_bytes -= stored.frame_bytes
        if not self.logged:
            self.first_offset = max(self.first_offset, stored.end_offset)
        if self._head >= _COMPACT_AT and 2 * self._head >= len(self._tail):
            del self._tail[: self._head]
            del self._tail_bases[: self._head]
            self._head = 0
        return stored.frame_bytes

    @property
    def tail_count(self) -> int:
        """Frames in the tail."""
        return len(self._tail) - self._head

    def tail_frames(self) -> list[Stored]:
        """Frames in the tail, oldest first."""
        return self._tail[self._head :]

    def oldest_in_tail(self) -> Stored | None:
        """The frame that `evict` would drop."""
        return self._tail[self._head] if self._head < len(self._tail) else None

    def find_in_tail(self, offset: int) -> Stored | Gap | None:
        """The frame of the tail that holds `offset`, a gap before one, or None: older or newer."""
        tail = self._tail
        if self._head >= len(tail):
            return None
        place = bisect_right(self._tail_bases, offset, self._head) - 1
        if place < self._head:
            return None
        stored = tail[place]
        if offset < stored.end_offset:
            return stored
        if place + 1 < len(tail):
            return Gap(tail[place + 1].base_offset, "offsets were never used")
        return None

    def begin_at(self, first_offset: int) -> None:
        """Set the first message that there is."""
        self.first_offset = first_offset

    def trim(self, first_offset: int) -> None:
        """Note that the messages below are gone."""
        self.first_offset = max(self.first_offset, first_offset)

    def show_until(self, next_offset: int) -> None:
        """Make all messages below visible: they are there already."""
        self.visible = next_offset

    def restore_counts(self, message_count: int, byte_count: int) -> None:
        """Set what was published to it on the worker that it came from."""
        self.message_count, self.byte_count = message_count, byte_count
