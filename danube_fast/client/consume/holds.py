r"""What the application works on: kept at the broker for as long as that takes.

    add(message) -> EXTEND ... EXTEND, one each tick -> remove(message)

A tick is a third of the ack timeout, a second at most: the timeout may become shorter at any time, and what
is extended has a deadline of its own, which a change leaves alone. Who works on something keeps its
subscription, too (`leases.py` would leave it when nothing is taken for long).

All methods of `Holds` are called under the pump's lock.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from danube_fast.client.consume.ranges import merged
from danube_fast.client.limits import MILLISECOND_NS, SECOND_NS
from danube_fast.net.protocol import Extend

if TYPE_CHECKING:
    from danube_fast.client.consume.attachment import Attachment
    from danube_fast.client.consume.inbox import Inbox
    from danube_fast.client.message import Message

__all__ = ["Holds", "Processing"]

TICK_NS_MAX = 1 * SECOND_NS
TICKS_PER_TIMEOUT = 3
PATIENCE_NS = 30 * SECOND_NS
"""How far a deadline is moved where the subscription has no ack timeout: it may get one meanwhile."""


class Holds:
    """Messages of one consumer that are being worked on."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._held: dict[Attachment, collections.Counter[tuple[int, int]]] = {}
        """(generation, offset), and how often it is held."""
        self._is_armed = False

    def __bool__(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def add(self, attachment: Attachment, generation: int, offset: int) -> None:
        """Somebody begins to work on a message."""
        if not attachment.tracks:
            return
        held = self._held.get(attachment)
        if held is None:
            held = self._held[attachment] = collections.Counter()
        held[generation, offset] += 1
        if not self._is_armed:
            self._is_armed = True
            pump = self._inbox.pump
            pump.arm(self, pump.clock.monotonic_ns() + self._tick_ns)

    def remove(self, attachment: Attachment, generation: int, offset: int) -> None:
        """Somebody is done with it."""
        held = self._held.get(attachment)
        if held is None:
            return
        held[generation, offset] -= 1
        if held[generation, offset] <= 0:
            del held[generation, offset]
            if not held:
                del self._held[attachment]

    @property
    def _timeout_ns(self) -> int:
        return self._inbox.leases.timeout_ns or PATIENCE_NS

    @property
    def _tick_ns(self) -> int:
        return min(self._timeout_ns // TICKS_PER_TIMEOUT, TICK_NS_MAX)

    def extend(self, attachment: Attachment, offsets: list[int]) -> None:
        """Move the deadline of these messages now."""
        if offsets and attachment.tracks and attachment.connection.is_open:
            pairs = merged([bound for offset in offsets for bound in (offset, offset + 1)])
            milliseconds = max(1, self._timeout_ns // MILLISECOND_NS)
            attachment.connection.send(Extend([(attachment.consumer_id, pairs)], milliseconds))

    def on_time(self, now_ns: int) -> None:
        """Keeper: a tick."""
        self._is_armed = bool(self._held)
        for attachment, held in self._held.items():
            current = attachment.generation
            offsets = [offset for generation, offset in held if generation == current]
            self.extend(attachment, offsets)
        if self._is_armed:
            self._inbox.pump.arm(self, now_ns + self._tick_ns)

    def close(self) -> None:
        """No timer any more."""
        self._held.clear()
        self._inbox.pump.disarm(self)


class Processing:
    """`with message.processing():`, or `async with`: the message stays with its consumer meanwhile.

    Neither waits for anything. A message whose connection is lost is delivered again all the same.
    """

    def __init__(self, inbox: Inbox, message: Message) -> None:
        inbox.check_acking()
        self._inbox = inbox
        self._message = message
        delivery = message._source
        self._place = (delivery.attachment, delivery.generation, message.offset)  # type: ignore[attr-defined]

    def __enter__(self) -> Message:
        attachment, generation, offset = self._place
        with self._inbox.pump.lock:
            self._inbox.holds.add(*self._place)
            if generation == attachment.generation:
                self._inbox.holds.extend(attachment, [offset])
        return self._message

    def __exit__(self, *_: object) -> None:
        with self._inbox.pump.lock:
            self._inbox.holds.remove(*self._place)

    async def __aenter__(self) -> Message:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
