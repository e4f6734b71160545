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
from danube_fast.client.limits import ACK_DELAY_NS, ACK_RANGES_MAX, FOREVER_NS
from danube_fast.client.message import Batch, Message, MessageId, Received
from danube_fast.client.pump import Pump
from danube_fast.errors import InvalidArgument
from danube_fast.net.protocol import Ack, Nack

__all__ = ["AckQueue"]

_NOT_DUE = FOREVER_NS


class AckQueue:
    """Ranges that wait to be sent. Under the pump's lock."""

    def __init__(self, pump: Pump, attachments: list[Attachment]) -> None:
        self._pump = pump
        self._attachments = attachments
        self.due_ns = _NOT_DUE

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

    def _soon(self, attachment: Attachment) -> None:
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
                continue  # whatever waits there is void by the time the session is back
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

    def give_back(self, what: Any, delay_ms: int, reason: str) -> None:
        """Nack messages at once."""
        for attachment, ranges in self.ranges_of(what):
            if attachment.connection.is_open:
                entry = [(attachment.consumer_id, ranges)]
                attachment.connection.send(Nack(entry, delay_ms, reason))

    def close(self) -> None:
        """No timer any more."""
        self._pump.disarm(self)
