"""Acks of one consumer: gathered as ranges, sent together, at the latest after 10 ms.

    ack(message | batch | list) -> attachment.pending -> one ACK per connection
                                                         many pending, a receive that waits, the keeper

Acks of messages from before a reconnect or a seek are quiet no-ops: the broker has given them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from danube_fast.client.attachment import Attachment
from danube_fast.client.calls import Call
from danube_fast.client.connection import Connection
from danube_fast.client.limits import ACK_DELAY_NS, ACK_RANGES_MAX, FOREVER_NS
from danube_fast.client.message import Batch, Message, MessageId, Received
from danube_fast.client.pump import Pump
from danube_fast.errors import InvalidArgument, Unavailable
from danube_fast.net.protocol import Ack, Nack

__all__ = ["AckQueue"]

_NOT_DUE = FOREVER_NS
ACKS_LOST = (
    "the connection was lost before all acks were durable; messages whose acks did not arrive are "
    "delivered again, so go on receiving"
)


class AckQueue:
    """Ranges that wait to be sent. Under the pump's lock."""

    def __init__(self, pump: Pump, attachments: list[Attachment]) -> None:
        self._pump = pump
        self._attachments = attachments
        self.due_ns = _NOT_DUE
        self.lost = False
        """Acks since the last flush were void when their session was lost."""
        self._unconfirmed: set[Attachment] = set()
        """Attachments with acks that no flush has confirmed yet."""

    def add_one(self, message: Received) -> None:
        """One message: the hot path of per-message consumers."""
        source: Any = message._source
        attachment = source.attachment
        if source.generation == attachment.generation:
            offset = message.offset
            pending = attachment.pending
            if pending and pending[-1] == offset:
                pending[-1] = offset + 1
                return
            pending.append(offset)
            pending.append(offset + 1)
            self._soon(attachment)

    def add(self, what: Any) -> None:
        """Anything that names messages."""
        for attachment, ranges in self.ranges_of(what):
            pending = attachment.pending
            if pending and pending[-1] == ranges[0]:
                pending[-1] = ranges[1]
                pending += ranges[2:]
            else:
                pending += ranges
            self._soon(attachment)

    def add_up_to(self, message: Message) -> None:
        """Everything of the message's partition up to and with it."""
        for attachment, ranges in self.ranges_of(message):
            attachment.pending[:] = [0, ranges[-1]]
            self._soon(attachment)

    def ranges_of(self, what: Any) -> Iterator[tuple[Attachment, list[int]]]:
        """Attachment and flat ranges of everything that still counts. Raises InvalidArgument."""
        if isinstance(what, Batch):
            for delivery, start, stop in what._pieces:
                if delivery.generation == delivery.attachment.generation:
                    yield delivery.attachment, delivery.ranges(start, stop)
        elif isinstance(what, Received):
            source: Any = what._source
            if source.generation == source.attachment.generation:
                yield source.attachment, [what.offset, what.offset + 1]
        elif isinstance(what, Message):
            yield from self.ranges_of(what.message_id)
        elif isinstance(what, MessageId):
            for attachment in self._attachments:
                if attachment.topic == what.topic:
                    yield attachment, [what.offset, what.offset + 1]
        elif isinstance(what, Iterable) and not isinstance(what, str | bytes):
            for item in what:
                yield from self.ranges_of(item)
        else:
            raise InvalidArgument(
                f"{type(what).__name__} names no message; give a Message, a Batch or a list of messages"
            )

    def restarted(self, attachment: Attachment) -> None:
        """A new subscription or a seek: what waits, and what was not confirmed, is void."""
        attachment.pending.clear()
        if attachment in self._unconfirmed:
            self._unconfirmed.discard(attachment)
            self.lost = True

    def _soon(self, attachment: Attachment) -> None:
        self._unconfirmed.add(attachment)
        if len(attachment.pending) > 2 * ACK_RANGES_MAX:
            self.send()
        elif self.due_ns == _NOT_DUE:
            self.due_ns = self._pump.clock.monotonic_ns() + ACK_DELAY_NS
            self._pump.arm(self, self.due_ns)

    def on_time(self, now_ns: int) -> None:
        """Keeper: acks have waited long enough."""
        self.send()

    def send(self, *, durable: bool = False) -> list[Call]:
        """Send what is queued; with `durable` the calls that tell when all of it is on disk."""
        calls: list[Call] = []
        if self.due_ns == _NOT_DUE and not durable:
            return calls
        self.due_ns = _NOT_DUE
        self._pump.disarm(self)
        connections = dict.fromkeys(attachment.connection for attachment in self._attachments)
        for connection in connections:
            if not connection.is_open:
                if durable:
                    self._give_up_on(connection)
                continue  # `restarted` clears it when the session is back
            entries = [
                (attachment.consumer_id, attachment.take_pending())
                for attachment in self._attachments
                if attachment.connection is connection and attachment.pending
            ]
            if durable:
                command = Ack(connection.next_request(), entries)
                calls.append(connection.call(Call(command)))
            elif entries:
                connection.send(Ack(0, entries))
        return calls

    def _give_up_on(self, connection: Connection) -> None:
        """Acks for a worker that cannot be reached are as good as lost."""
        for attachment in [a for a in self._unconfirmed if a.connection is connection]:
            self.restarted(attachment)

    def confirm(self) -> None:
        """All calls of a flush have succeeded. Raises Unavailable if acks were void before that."""
        lost, self.lost = self.lost, False
        self._unconfirmed = {a for a in self._unconfirmed if a.pending}
        if lost:
            raise Unavailable(ACKS_LOST)

    def tell_lost(self) -> None:
        """The application hears just now that its acks are lost: once is enough."""
        self.lost = False
        self._unconfirmed.clear()

    def give_back(self, what: Any, delay_ms: int, reason: str) -> None:
        """Nack messages at once."""
        for attachment, ranges in self.ranges_of(what):
            if attachment.connection.is_open:
                entry = [(attachment.consumer_id, ranges)]
                attachment.connection.send(Nack(entry, delay_ms, reason))

    def close(self) -> None:
        """No timer any more."""
        self._pump.disarm(self)
