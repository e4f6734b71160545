"""What an application sees of a client's objects: what is its own, and nothing of what is inside."""

from __future__ import annotations

import asyncio
from typing import Any

import danube_fast

TOPIC = "/default/t"
CONSUMER = {
    "ack", "ack_cumulative", "close", "extend", "flush_acks", "gaps", "lag", "nack", "name", "on_gap",
    "receive", "receive_batch", "seek", "state", "subscription", "topics", "type",
}  # fmt: skip
PRODUCER = {"close", "flush", "name", "publish", "send", "send_many", "topic"}
SUBSCRIBER = {"close", "consumer", "error", "wait"}


def names(thing: Any) -> set[str]:
    """What Tab completes."""
    return {name for name in dir(thing) if not name.startswith("_")}


def test_names_of_the_synchronous_client(broker: Any, client: danube_fast.Client) -> None:
    with (
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, subscription="s") as consumer,
        client.subscribe(TOPIC, "h", lambda message: None) as subscriber,
    ):
        assert names(producer) == PRODUCER
        assert names(consumer) == CONSUMER
        assert names(subscriber) == SUBSCRIBER


def test_names_of_the_asynchronous_client(broker: Any, client: danube_fast.Client) -> None:
    async def look() -> None:
        async with (
            danube_fast.connect_async(broker.url) as other,
            other.producer(TOPIC) as producer,
            other.consumer(TOPIC, subscription="s") as consumer,
            other.subscribe(TOPIC, "h", lambda message: None) as subscriber,
        ):
            assert names(producer) == PRODUCER
            assert names(consumer) == CONSUMER
            assert names(subscriber) == SUBSCRIBER

    asyncio.run(look())
