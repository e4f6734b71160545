r"""Ack timeouts, seen from the client: what waits in the inbox is not failing, so it is extended.

    DELIVER -> queue -> the application -> ack        the broker's timeout runs from DELIVER on
               \ EXTEND, three times in a timeout     from here on it is the application's

Once the application has a message, the broker waits two thirds of the timeout for its ack at least.

An application that takes nothing for a whole timeout, though something waits, and does not say meanwhile that it
works on a message (`holds.py`), is no use to its group: then the consumer rests, which gives all that it holds to
the others without counting as a failure, and joins again when the application comes for more.

All methods are called under the pump's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.client.consume.ranges import merged
from danube_fast.client.limits import MILLISECOND_NS
from danube_fast.net.protocol import Extend

if TYPE_CHECKING:
    from danube_fast.client.consume.attachment import Attachment
    from danube_fast.client.consume.inbox import Inbox
    from danube_fast.client.link.connection import Connection

__all__ = ["Leases"]

EXTENSIONS_PER_TIMEOUT = 3
GROUPS = ("shared", "key_shared")
"""Subscriptions whose other consumers can take what waits here."""


class Leases:
    """Extends what waits in one inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._timeout_ns = 0
        self._place: object = None
        """Where the application was in what has arrived."""
        self._since_ns = 0
        """Since when it is there."""

    @property
    def timeout_ns(self) -> int:
        """The ack timeout that the broker told, the shortest of all partitions; 0: there is none."""
        return self._timeout_ns

    def subscribed(self, ack_timeout_ms: int) -> None:
        """The broker told an ack timeout (0: there is none)."""
        timeout_ns = ack_timeout_ms * MILLISECOND_NS
        if timeout_ns and (not self._timeout_ns or timeout_ns < self._timeout_ns):
            self._timeout_ns = timeout_ns
            self._arm()

    def _arm(self) -> None:
        pump = self._inbox.pump
        pump.arm(self, pump.clock.monotonic_ns() + self._timeout_ns // EXTENSIONS_PER_TIMEOUT)

    def on_time(self, now_ns: int) -> None:
        """Keeper: a third of the timeout went by."""
        place = self._inbox.place
        is_waiting = self._inbox.hand.here is not None or bool(self._inbox.queued)
        if place != self._place or not is_waiting or self._inbox.holds:
            # when the work on a message ends, the application is about to take more: the wait begins anew
            self._place, self._since_ns = place, now_ns
        elif now_ns - self._since_ns >= self._timeout_ns and self._inbox.type in GROUPS:
            self._inbox.rest()
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
        in_hand = self._inbox.hand.here
        if in_hand is not None:
            delivery, index = in_hand
            first = delivery.offset_list(index, index + 1)[0]
            found[delivery.attachment] = [first, delivery.end_offset]
        for delivery in self._inbox.queued:
            if delivery.generation == delivery.attachment.generation:
                pairs = found.setdefault(delivery.attachment, [])
                pairs += (delivery.base_offset, delivery.end_offset)
        return found

    def extend(self, attachment: Attachment, pairs: list[int], milliseconds: int) -> None:
        """The application wants to keep messages for longer."""
        if attachment.connection.is_open:
            attachment.connection.send(Extend([(attachment.consumer_id, pairs)], milliseconds))

    def close(self) -> None:
        """No timer any more."""
        self._timeout_ns = 0
        self._inbox.pump.disarm(self)
