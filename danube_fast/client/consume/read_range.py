"""A range of a topic that is read without a subscription and without acks.

    start ............ stop        per partition; "latest" as stop is the end when the reader opened

The range ends when every partition has reached its stop. After a lost connection reading goes on
behind the last frame that was received.
"""

from __future__ import annotations

from typing import Any

from danube_fast.checks import check_whole
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.batch import Batch, Piece
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.link.steps import Steps, deadline_after, seconds_until
from danube_fast.client.values.limits import BATCH_MESSAGES_DEFAULT, CLOSE_TIMEOUT_SECONDS
from danube_fast.errors import InvalidArgument

__all__ = ["ReadRange", "checked_stop"]

STOP_NEVER = 1 << 62
_POLL_SECONDS = 0.5
"""How often a reader that waits looks whether a gap has taken it past its stop."""


def checked_stop(stop: Any) -> int | str | None:
    """Return the stop: "latest", an offset (not included), or None for never. Raises InvalidArgument."""
    if stop is None or stop == "latest" or (type(stop) is int and stop >= 0):
        return stop  # type: ignore[no-any-return]
    raise InvalidArgument(
        f"{stop!r} is not a stop; use 'latest' (the end as of now), an offset, or None to read on"
    )


class ReadRange:
    """Where a reader is in its range, per partition. `Reader` and `AsyncReader` are faces of this."""

    def __init__(self, inbox: Inbox, stop: int | str | None) -> None:
        self._inbox = inbox
        self._stop = stop
        self._stops: dict[Attachment, int] = {}
        self._done: dict[Attachment, int] = {}
        """Next offset to be handed to the application, per partition."""
        for attachment in inbox.attachments:
            if stop is None:
                end = STOP_NEVER
            elif isinstance(stop, int):
                end = stop
            else:
                end = attachment.end_offset
            self._stops[attachment] = end
            self._done[attachment] = attachment.start_offset

    @property
    def is_finished(self) -> bool:
        """Whether every partition has reached its stop."""
        return all(self._reached(attachment) for attachment in self._stops)

    def _reached(self, attachment: Attachment) -> bool:
        if attachment.parted:
            return True
        # a gap moves next_offset without a delivery; it counts once nothing is queued before it
        done = self._done[attachment]
        with self._inbox.pump.lock:
            if not self._inbox.frames.has_waiting(attachment):
                done = max(done, attachment.next_offset)
        return done >= self._stops[attachment]

    def batch_steps(
        self, max_messages: int = BATCH_MESSAGES_DEFAULT, timeout: float | None = None
    ) -> Steps[Batch]:
        """Return the next messages of the range; an empty Batch at its end or when the time is up."""
        clock = self._inbox.pump.clock
        max_messages = check_whole(max_messages, "max_messages", 1)
        deadline_ns = None if timeout is None else deadline_after(clock, timeout)
        while not self.is_finished:
            seconds = _POLL_SECONDS
            if deadline_ns is not None:
                seconds = min(seconds, seconds_until(clock, deadline_ns))
            batch = yield from self._inbox.receive_batch_steps(max_messages, seconds)
            pieces = [piece for piece in map(self._cut, batch._pieces) if piece is not None]
            if pieces:
                return Batch(pieces)
            if deadline_ns is not None and clock.monotonic_ns() >= deadline_ns:
                break
        return Batch([])

    def _cut(self, piece: Piece) -> Piece | None:
        """Return the part of a frame that lies in the range."""
        delivery, start, stop = piece
        attachment = delivery.attachment
        if attachment not in self._stops:
            self._admit(attachment)
        low, high = self._done[attachment], self._stops[attachment]
        offsets = delivery.offset_list(0, delivery.count)
        while start < stop and offsets[start] < low:
            start += 1
        while stop > start and offsets[stop - 1] >= high:
            stop -= 1
        last = delivery.end_offset if piece[2] == delivery.count else offsets[piece[2] - 1] + 1
        self._done[attachment] = max(low, last)
        return (delivery, start, stop) if start < stop else None

    def _admit(self, attachment: Attachment) -> None:
        """Read a partition that is new: everything in it came after `latest`."""
        self._done[attachment] = 0
        if self._stop is None:
            self._stops[attachment] = STOP_NEVER
        else:
            self._stops[attachment] = self._stop if isinstance(self._stop, int) else 0

    def all_steps(self) -> Steps[Batch]:
        """Return everything up to the stop, as one Batch."""
        pieces: list[Piece] = []
        while True:
            batch = yield from self.batch_steps()
            if not batch:
                break
            pieces += batch._pieces
        yield from self.close_steps()
        return Batch(pieces)

    def must_end(self) -> None:
        """Raise InvalidArgument for a range that has no end."""
        if any(stop >= STOP_NEVER for stop in self._stops.values()):
            raise InvalidArgument("a reader with stop=None never ends; give stop='latest'")

    def close_steps(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> Steps[None]:
        """Detach."""
        yield from self._inbox.close_steps(timeout)
