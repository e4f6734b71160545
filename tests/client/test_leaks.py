"""Nothing of a client is left once it is closed: programs connect and leave for as long as they live."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import danube_fast
from danube_fast.testing import Broker

WAIT_SECONDS = 60.0


def assert_gone(left: list[weakref.ref[Any]]) -> None:
    """A thread may be on its way out still, and holds what its frames hold."""
    deadline = time.monotonic() + WAIT_SECONDS
    while any(ref() is not None for ref in left):
        assert time.monotonic() < deadline, f"left: {[ref() for ref in left]}"
        time.sleep(0.05)
        gc.collect()


def publish(client: danube_fast.Client, topic: str) -> None:
    with client.producer(topic, durability="os") as producer:
        producer.send_many([b"x"] * 10)


def receive_one_of_many(client: danube_fast.Client, topic: str) -> None:
    consumer = client.consumer(topic, subscription="s", initial_position="earliest")
    message = consumer.receive(timeout=WAIT_SECONDS)  # nine are left in hand
    assert message is not None
    consumer.ack(message)


def receive_some(client: danube_fast.Client, topic: str) -> None:
    with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
        assert len(consumer.receive_batch(3, timeout=WAIT_SECONDS)) == 3
        for message in consumer:
            consumer.ack(message)
            break


def read(client: danube_fast.Client, topic: str) -> None:
    for message in client.reader(topic):
        assert message.payload == b"x"
        break


def handle(client: danube_fast.Client, topic: str) -> None:
    handled = threading.Semaphore(0)

    def handler(message: danube_fast.Message) -> None:
        with message.processing():
            handled.release()

    handle = client.subscribe(topic, "s", handler, initial_position="earliest")
    for _ in range(10):
        assert handled.acquire(timeout=WAIT_SECONDS)
    handle.close()


def request(client: danube_fast.Client, topic: str) -> None:
    with client.subscribe(topic, "s", lambda message: b"reply"):
        assert client.request(topic, b"x", WAIT_SECONDS).payload == b"reply"


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("use", [publish, receive_one_of_many, receive_some, read, handle, request])
def test_a_closed_client_is_forgotten(
    real: Broker, topic: str, use: Callable[..., None], transport: str
) -> None:
    with real.client() as other:
        publish(other, topic)
    client = real.client(transport=transport)
    use(client, topic)
    client.close()
    left = [weakref.ref(x) for x in (client, client._core, client._core.pump)]
    del client
    assert_gone(left)


def test_an_asynchronous_client_is_forgotten(real: Broker, topic: str) -> None:
    with real.client() as other:
        publish(other, topic)
    left: list[weakref.ref[Any]] = []

    async def main() -> None:
        handled = asyncio.Semaphore(0)

        async def handler(message: danube_fast.Message) -> bytes:
            handled.release()
            return b"reply"

        async with await real.async_client() as client:
            consumer = await client.consumer(topic, subscription="c", initial_position="earliest")
            assert await consumer.receive(timeout=WAIT_SECONDS)
            async with await client.subscribe(topic, "s", handler, initial_position="earliest"):
                for _ in range(10):
                    await handled.acquire()
                assert (await client.request(topic, b"x", WAIT_SECONDS)).payload == b"reply"
            left.extend(weakref.ref(x) for x in (client, client._core, client._core.pump))

    asyncio.run(main())
    assert len(left) == 3
    assert_gone(left)


def test_a_message_outlives_its_client(real: Broker, topic: str) -> None:
    with real.client() as client:
        publish(client, topic)
        consumer = client.consumer(topic, subscription="s", initial_position="earliest")
        message = consumer.receive(timeout=WAIT_SECONDS)
    assert message is not None
    assert (message.payload, message.topic, message.key) == (b"x", topic, None)
