r"""Ack timeouts, seen from the client: what waits in the queue is not failing, so it is extended.

    DELIVER -> queue -> the application -> ack        the broker's timeout runs from DELIVER on
               \ EXTEND, three times in a timeout     from here on it is the application's

Once the application has a message, the broker waits two thirds of the timeout for its ack at least.

An application that takes nothing for a whole timeout, though something waits, and does not say meanwhile that it
works on a message (`in_progress.py`), is no use to its group: then the consumer rests, which gives all that it has
to the others without counting as a failure, and joins again when the application comes for more.

All methods are called under the pump's lock.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.frames import Frames
from danube_fast.client.consume.in_progress import InProgress
from danube_fast.client.consume.ranges import merged
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.pump import Pump
from danube_fast.clock import MILLISECOND_NS
from danube_fast.net.protocol import Extend

__all__ = ["Leases"]

EXTENSIONS_PER_TIMEOUT = 3
GROUPS = ("shared", "key_shared")
"""Subscriptions whose other consumers can take what waits here."""


class Leases:
    """Extends what waits for the application of one consumer."""

    def __init__(
        self,
        type_name: str,
        pump: Pump,
        frames: Frames,
        in_progress: InProgress,
        rest: Callable[[], None],
    ) -> None:
        """`rest` leaves a subscription of that type for a while."""
        self._may_rest = type_name in GROUPS
        self._pump = pump
        self._frames = frames
        self._in_progress = in_progress
        self._rest = rest
        self._timeout_ns = 0
        self._position: object = None
        """How far the application was in what has arrived."""
        self._since_ns = 0
        """Since when it has been there."""

    def subscribed(self, ack_timeout_ms: int) -> None:
        """Keep to the ack timeout that the broker told of a partition (0: there is none), if it is the shortest."""
        timeout_ns = ack_timeout_ms * MILLISECOND_NS
        if timeout_ns and (not self._timeout_ns or timeout_ns < self._timeout_ns):
            self._timeout_ns = self._in_progress.timeout_ns = timeout_ns
            self._arm()

    def _arm(self) -> None:
        pump = self._pump
        pump.arm(self, pump.clock.monotonic_ns() + self._timeout_ns // EXTENSIONS_PER_TIMEOUT)

    def on_time(self, now_ns: int) -> None:
        """Extend what waits, or rest, when a third of the timeout went by."""
        position = self._frames.position
        is_waiting = self._frames.here is not None or bool(self._frames.queue)
        if position != self._position or not is_waiting or self._in_progress:
            # when the work on a message ends, the application is about to take more: the wait begins anew
            self._position, self._since_ns = position, now_ns
        elif now_ns - self._since_ns >= self._timeout_ns and self._may_rest:
            self._rest()
        self._extend_waiting()
        self._arm()

    def _extend_waiting(self) -> None:
        by_connection: dict[Connection, list[tuple[int, list[int]]]] = {}
        for attachment, pairs in self._waiting().items():
            if attachment.tracks and attachment.connection.is_open:
                entries = by_connection.setdefault(attachment.connection, [])
                entries.append((attachment.consumer_id, merged(pairs)))
        for connection, entries in by_connection.items():
            connection.send(Extend(entries))

    def _waiting(self) -> dict[Attachment, list[int]]:
        """Offsets that the application has not got yet, as flat [start, end) pairs, about: a range of a
        split frame may span messages of others."""
        found: dict[Attachment, list[int]] = {}
        current = self._frames.here
        if current is not None:
            delivery, index = current
            first = delivery.offset_list(index, index + 1)[0]
            found[delivery.attachment] = [first, delivery.end_offset]
        for delivery in list(self._frames.queue):
            if delivery.generation == delivery.attachment.generation:
                pairs = found.setdefault(delivery.attachment, [])
                pairs += (delivery.base_offset, delivery.end_offset)
        return found

    def extend(self, attachment: Attachment, pairs: list[int], milliseconds: int) -> None:
        """Let the application keep messages for so long."""
        if attachment.connection.is_open:
            attachment.connection.send(Extend([(attachment.consumer_id, pairs)], milliseconds))

    def close(self) -> None:
        """Extend nothing more."""
        self._timeout_ns = 0
        self._pump.disarm(self)
