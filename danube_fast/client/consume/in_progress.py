r"""Messages that the application works on: kept at the broker for as long as that takes.

    add(message) -> EXTEND ... EXTEND, one each tick -> remove(message)

A tick is a third of the ack timeout, a second at most: the timeout may become shorter at any time, and what
is extended has a deadline of its own, which a change leaves alone. Work on a message keeps the subscription,
too (`leases.py` would leave it when nothing is taken for long).

All methods are called under the pump's lock.
"""

from __future__ import annotations

import collections

from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.ranges import merged
from danube_fast.client.link.pump import Pump
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.net.protocol import Extend

__all__ = ["InProgress"]

TICK_NS_MAX = 1 * SECOND_NS
TICKS_PER_TIMEOUT = 3
EXTENSION_NS = 30 * SECOND_NS
"""How far a deadline is moved where the subscription has no ack timeout: it may get one meanwhile."""


class InProgress:
    """Messages of one consumer that are being worked on."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._counts: dict[Attachment, collections.Counter[tuple[int, int]]] = {}
        """By (generation, offset): how often it was added."""
        self._is_armed = False
        self.timeout_ns = 0
        """The ack timeout; 0: there is none."""

    def __bool__(self) -> bool:
        """Whether anything is being worked on."""
        return bool(self._counts)

    def add(self, attachment: Attachment, generation: int, offset: int) -> None:
        """Extend the deadline of a message until `remove`."""
        if not attachment.tracks:
            return
        counts = self._counts.get(attachment)
        if counts is None:
            counts = self._counts[attachment] = collections.Counter()
        counts[generation, offset] += 1
        if not self._is_armed:
            self._is_armed = True
            self._pump.arm(self, self._pump.clock.monotonic_ns() + self._tick_ns)

    def remove(self, attachment: Attachment, generation: int, offset: int) -> None:
        """Extend the deadline of a message no more, once it was removed as often as it was added."""
        counts = self._counts.get(attachment)
        if counts is None:
            return
        counts[generation, offset] -= 1
        if counts[generation, offset] <= 0:
            del counts[generation, offset]
            if not counts:
                del self._counts[attachment]

    @property
    def _tick_ns(self) -> int:
        return min((self.timeout_ns or EXTENSION_NS) // TICKS_PER_TIMEOUT, TICK_NS_MAX)

    def extend(self, attachment: Attachment, offsets: list[int]) -> None:
        """Move the deadline of these messages now."""
        if offsets and attachment.tracks and attachment.connection.is_open:
            pairs = merged([bound for offset in offsets for bound in (offset, offset + 1)])
            milliseconds = max(1, (self.timeout_ns or EXTENSION_NS) // MILLISECOND_NS)
            attachment.connection.send(Extend([(attachment.consumer_id, pairs)], milliseconds))

    def on_time(self, now_ns: int) -> None:
        """Extend everything that is being worked on, and again after a tick."""
        self._is_armed = bool(self._counts)
        for attachment, counts in self._counts.items():
            current = attachment.generation
            offsets = [offset for generation, offset in counts if generation == current]
            self.extend(attachment, offsets)
        if self._is_armed:
            self._pump.arm(self, now_ns + self._tick_ns)

    def close(self) -> None:
        """Extend nothing more."""
        self._counts.clear()
        self._pump.disarm(self)
