"""Applications of the shipped client: what they are told is compared with what the broker did.

A publisher sends, publishes and flushes; every message must be reported once, with its place, in order. A
receiver takes batches and messages, acks, gives back, extends and flushes; the broker must never hear an
ack that the application did not give.
"""

from __future__ import annotations

from typing import Any

from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consumer import Consumer
from danube_fast.client.core import Core
from danube_fast.client.link.steps import Steps, deadline_after
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.values.message import MessageId
from danube_fast.client.values.options import ConsumerOptions
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    Internal,
    ProducerFenced,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.testing.model import Model
from danube_fast.testing.producer import KEYS
from danube_fast.testing.publishing_model import Violation, due_of
from danube_fast.testing.shipped import Application, ShippedClient

__all__ = ["publisher", "receiver"]

PATIENCE_SECONDS = 600.0
"""Far more than a run lasts."""
SIZES = (0, 0, 30, 2000)
"""Bytes of messages beside their text."""
EXPECTED = (Unavailable, DeadlineExceeded, ResourceExhausted, Internal)
"""What an application may be told while things fail."""


class _Reports:
    """The answers that a publisher got for each message."""

    def __init__(self, model: Model, expected: tuple[type[DanubeError], ...]) -> None:
        self._model = model
        self._expected = expected
        self.waiting: dict[bytes, int] = {}
        """Payloads that were not reported yet."""
        self._last: dict[str, int] = {}

    def told(self, payload: bytes, message_id: MessageId | None, error: Any) -> None:
        """A message was reported. Raises Violation."""
        if self.waiting.pop(payload, None) is None:
            raise Violation(f"{payload[:40]!r} was reported twice")
        if message_id is None:
            if not isinstance(error, self._expected):
                raise Violation(f"{payload[:40]!r} failed: {type(error).__name__}: {error}")
            return
        partition = self._model.partition_of(message_id.topic)
        stands = partition.by_offset.get(message_id.offset)
        if stands is None or (stands[0] != payload and partition.durability == "fsync"):
            raise Violation(f"{payload[:40]!r} was reported at {message_id}, where {stands} is")


def publisher(
    model: Model,
    topic: str,
    messages_max: int,
    delays_ms: int,
    *,
    moves: bool,
    sizes: tuple[int, ...] = SIZES,
) -> Application:
    """An application that publishes to one topic; some messages are due later, by `delays_ms` at most.
    Where partitions move (`moves`), its own late request to the worker before may fence it: then it opens
    another producer."""
    expected = (*EXPECTED, ProducerFenced) if moves else EXPECTED

    def application(client: ShippedClient, core: Core) -> Steps[None]:
        reports = _Reports(model, expected)
        client.is_done = False
        while True:
            try:
                yield from core.open_steps(PATIENCE_SECONDS)
                producer = yield from core.producers.open_steps(
                    topic, name=client.name, timeout=PATIENCE_SECONDS
                )
                yield from _publish(client, producer, reports, messages_max, delays_ms, sizes)
            except expected as error:
                client.errors.append(str(error))
                if not client.is_alive:  # it was closed in the middle of something
                    return
                yield from client.sleep_steps(200 * MILLISECOND_NS)

    return application


def _publish(
    client: ShippedClient,
    producer: Publisher,
    reports: _Reports,
    messages_max: int,
    delays_ms: int,
    sizes: tuple[int, ...],
) -> Steps[None]:
    draw = client.draw
    made = 0
    while made < messages_max and not client.is_calm:
        for _ in range(draw.randrange(1, 5)):
            made += 1
            payload = b"%s:%d" % (client.name.encode(), client.host.next_number())
            if delays_ms and draw.random() < 0.4:
                due_ns = client.host.clock.wall_ns() + draw.randrange(delays_ms) * MILLISECOND_NS
                payload += b"@%d:" % due_ns
            payload += bytes(draw.choice(sizes))
            key = draw.choice(KEYS)
            reports.waiting[payload] = made
            if draw.random() < 0.1:
                yield from _publish_one(producer, payload, key, reports)
                continue

            def told(message_id: Any, error: Any, payload: bytes = payload) -> None:
                reports.told(payload, message_id, error)

            fields = producer.checked(payload, key, None, None, due_of(payload) or None, None)
            try:
                yield from producer.send_steps(fields, told)
            except DanubeError:
                reports.waiting.pop(payload, None)  # it was not taken
                raise
        if draw.random() < 0.05:
            yield from producer.flush_steps(PATIENCE_SECONDS)
        yield from client.sleep_steps(draw.randrange(1 * MILLISECOND_NS, 60 * MILLISECOND_NS))
    yield from producer.flush_steps(PATIENCE_SECONDS)
    if reports.waiting:
        raise Violation(f"{client.name}: flushed, and {len(reports.waiting)} were not reported")
    client.is_done = True
    while True:
        yield from client.sleep_steps(1000 * MILLISECOND_NS)


def _publish_one(
    producer: Publisher, payload: bytes, key: bytes | None, reports: _Reports
) -> Steps[None]:
    try:
        message_id = yield from producer.publish_steps(
            payload, key=key, deliver_at=due_of(payload) or None
        )
    except DanubeError as error:
        reports.told(payload, None, error)
        raise
    reports.told(payload, message_id, None)


def receiver(
    model: Model,
    topic: str,
    subscription: str,
    kind: str,
    options: dict[str, Any],
    permits: int,
    permits_bytes: int,
) -> Application:
    """An application that receives from one subscription."""

    def application(client: ShippedClient, core: Core) -> Steps[None]:
        client.is_done = True
        model.application_acks.setdefault(client.name, set())
        wanted = ConsumerOptions(
            subscription, kind, "earliest", client.name, permits_bytes, permits, options
        ).checked()
        while True:
            try:
                yield from core.open_steps(PATIENCE_SECONDS)
                inbox = yield from core.consumers.open_steps([topic], wanted, PATIENCE_SECONDS)
                yield from _receive(client, Consumer(inbox), inbox, model)
            except DanubeError as error:
                client.errors.append(f"{type(error).__name__}: {error}")
                if not client.is_alive:
                    return
                yield from client.sleep_steps(300 * MILLISECOND_NS)

    return application


def _receive(client: ShippedClient, consumer: Consumer, inbox: Inbox, model: Model) -> Steps[None]:
    draw = client.draw
    kept: list[Any] = []
    while True:
        if draw.random() < 0.3:
            one = yield from inbox.receive_steps(deadline_after(inbox.pump.clock, 0.05))
            messages = [one] if one is not None else []
        else:
            batch = yield from inbox.receive_batch_steps(draw.randrange(1, 30), 0.05)
            messages = list(batch)
        for message in messages:
            stands = model.partition_of(message.topic).by_offset.get(message.offset)
            if stands != (message.payload, message.key):
                raise Violation(f"{client.name} received {message!r}, where {stands} is")
        kept += messages
        drawn = [client.is_calm or draw.random() < 0.7 for _ in kept]
        acked = [each for each, is_drawn in zip(kept, drawn, strict=True) if is_drawn]
        if acked:
            # not by value: the same message may be there twice, from before and after a crash
            kept = [each for each, is_drawn in zip(kept, drawn, strict=True) if not is_drawn]
            if not client.is_calm and draw.random() < 0.1:
                consumer.nack(acked, delay=draw.choice((None, 0, 0.2)), reason="the script")
            else:
                _ack(client, consumer, acked, model)
        if kept and draw.random() < 0.1:
            consumer.extend(kept[0], 0.5)
        if draw.random() < 0.1:
            try:
                yield from inbox.flush_acks_steps(2.0)
            except EXPECTED as error:
                client.errors.append(str(error))
                if not client.is_alive:
                    return
        if draw.random() < 0.5:
            yield from client.sleep_steps(draw.randrange(1 * MILLISECOND_NS, 80 * MILLISECOND_NS))


def _ack(client: ShippedClient, consumer: Consumer, messages: list[Any], model: Model) -> None:
    book = model.application_acks[client.name]
    for message in messages:
        book.add((model.partition_of(message.topic).partition_id, message.offset))
    if client.draw.random() < 0.5:
        consumer.ack(messages)
    else:
        for message in messages:
            consumer.ack(message)
