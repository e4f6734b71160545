"""What an application sees of a client and of what it opens: these names, and nothing of the internals."""

from __future__ import annotations

import asyncio
from typing import Any

from danube_fast.testing import Broker

PRODUCER = {
    "acked_messages", "close", "flush", "name", "next_sequence", "publish", "send", "send_many",
    "topic",
}  # fmt: skip
CONSUMER = {
    "ack", "ack_cumulative", "close", "extend", "flush_acks", "gaps", "lag", "nack", "name", "on_gap",
    "receive", "receive_batch", "seek", "state", "subscription", "topics", "type",
}  # fmt: skip
READER = {
    "batches", "close", "gaps", "is_finished", "on_gap", "receive_batch", "to_arrow", "to_pandas",
}  # fmt: skip
SUBSCRIBER = {"close", "consumer", "error", "wait"}
CLIENT = {
    "admin", "close", "consumer", "name", "producer", "publish", "reader", "reply", "request",
    "subscribe",
}  # fmt: skip


def shown(thing: object) -> set[str]:
    """What completion offers."""
    return {name for name in dir(thing) if not name.startswith("_")}


def test_the_names_of_what_a_client_opens(real: Broker, topic: str) -> None:
    with (
        real.client() as client,
        client.producer(topic, name="p") as producer,
        client.consumer(topic, subscription="s", name="c") as consumer,
        client.reader(topic) as reader,
        client.subscribe(topic, "handled", lambda message: None) as subscriber,
    ):
        assert shown(client) == CLIENT
        assert shown(producer) == PRODUCER
        assert shown(consumer) == CONSUMER
        assert shown(reader) == READER
        assert shown(subscriber) == SUBSCRIBER
        judge(producer, consumer, topic)


def test_the_names_of_their_asynchronous_twins(real: Broker, topic: str) -> None:
    async def main() -> None:
        async with (
            real.async_client() as client,
            client.producer(topic, name="p") as producer,
            client.consumer(topic, subscription="s", name="c") as consumer,
            client.reader(topic) as reader,
            client.subscribe(topic, "handled", lambda message: None) as subscriber,
        ):
            assert shown(client) == CLIENT | {"open"}
            assert shown(producer) == PRODUCER
            assert shown(consumer) == CONSUMER
            assert shown(reader) == READER
            assert shown(subscriber) == SUBSCRIBER
            judge(producer, consumer, topic)

    asyncio.run(main())


def judge(producer: Any, consumer: Any, topic: str) -> None:
    """What they tell of themselves."""
    assert (producer.name, producer.topic, producer.acked_messages) == ("p", topic, 0)
    assert (consumer.name, consumer.subscription, consumer.type) == ("c", "s", "exclusive")
    assert (consumer.topics, consumer.state) == ((topic,), "connected")
    kinds = type(producer).__name__, type(consumer).__name__
    assert repr(producer) == f"<{kinds[0]} 'p' on {topic}, 0 bytes unacked>"
    assert repr(consumer) == f"<{kinds[1]} 's' (exclusive) on {topic}: connected>"


def test_on_gap_can_be_set(real: Broker, topic: str) -> None:
    with (
        real.client() as client,
        client.producer(topic),
        client.consumer(topic, subscription="s") as consumer,
        client.reader(topic) as reader,
    ):
        for each in (consumer, reader):
            assert each.on_gap is None
            each.on_gap = print
            assert each.on_gap is print and not each.gaps
