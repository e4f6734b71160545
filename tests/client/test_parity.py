"""Every synchronous method has an asynchronous twin with the same parameters; cancelling loses nothing."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest

import danube_fast
from danube_fast.broker.admin import OPERATIONS
from danube_fast.client.admin_client import AdminClient, AsyncAdmin
from danube_fast.testing import Broker

WAIT_SECONDS = 60.0
PAIRS = [
    (danube_fast.Client, danube_fast.AsyncClient),
    (danube_fast.Producer, danube_fast.AsyncProducer),
    (danube_fast.Consumer, danube_fast.AsyncConsumer),
    (danube_fast.Reader, danube_fast.AsyncReader),
    (danube_fast.Subscriber, danube_fast.AsyncSubscriber),
]
SPECIAL = {"__iter__": "__aiter__", "__enter__": "__aenter__", "__exit__": "__aexit__"}


def public(kind: type) -> dict[str, Any]:
    found = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return found | {name: getattr(kind, name) for name in SPECIAL if hasattr(kind, name)}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [
        (p.name, p.kind, p.default) for p in found if p.name not in ("kind", "error", "trace", "_")
    ]


def waits(method: Any) -> bool:
    """Whether a method is to be awaited, or what it wraps."""
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return True
    return hasattr(method, "__wrapped__") and waits(method.__wrapped__)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_every_method_has_its_twin(pair: tuple[type, type]) -> None:
    sync, twin = map(public, pair)
    for name, member in sync.items():
        other = getattr(pair[1], SPECIAL.get(name, name), None)
        assert other is not None, f"{pair[1].__name__} has no {SPECIAL.get(name, name)}"
        if not callable(member) or member is other:
            assert callable(member) == callable(other), name
            continue
        assert parameters(member) == parameters(other), f"{pair[1].__name__}.{name}"
        assert waits(other), f"{pair[1].__name__}.{name} is not to be awaited"
    others = set(twin) - set(sync) - {"__aiter__"}
    assert others <= {"open"}, f"only {pair[1].__name__} has {others}"


def test_connect_has_its_twin() -> None:
    assert parameters(danube_fast.connect) == parameters(danube_fast.connect_async)


def test_every_operation_has_its_twin() -> None:
    mine, twins = public(AdminClient), public(AsyncAdmin)
    assert mine.keys() == twins.keys()
    for name, member in mine.items():
        assert parameters(member) == parameters(twins[name]), name
        assert waits(twins[name]), name


def test_every_operation_of_the_broker_is_a_method_with_its_arguments() -> None:
    for name, operation in OPERATIONS.items():
        method = getattr(AdminClient, name)
        fields = set(operation.arguments.__struct_fields__) - {"after", "limit"}  # pages
        declared = {word for word, _, _ in parameters(method)} - {"self", "timeout", "limit"}
        assert declared == fields, name


def test_a_message_serves_both() -> None:
    """`reply` can be awaited, `processing` entered, in both ways."""
    from danube_fast.client.link.steps import Finished
    from danube_fast.client.values.message import Processing

    async def main() -> int:
        return await Finished(5)

    assert asyncio.run(main()) == 5
    assert {"__enter__", "__exit__", "__aenter__", "__aexit__"} <= set(dir(Processing))


def run(broker: Broker, body: Callable[[danube_fast.AsyncClient], Any], **options: Any) -> None:
    async def main() -> None:
        async with await broker.async_client(**options) as client:
            async with asyncio.timeout(2 * WAIT_SECONDS):
                await body(client)

    asyncio.run(main())


async def cancel_soon(task: asyncio.Task[Any], draw: random.Random) -> bool:
    """Let it go on for a few turns of the loop, then cancel it; whether that came in time."""
    for _ in range(draw.randrange(4)):
        await asyncio.sleep(0)
    if draw.random() < 0.5:
        await asyncio.sleep(draw.random() / 500)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_cancelling_a_receive_loses_nothing(real: Broker, topic: str, transport: str) -> None:
    draw = random.Random(11)

    async def body(client: danube_fast.AsyncClient) -> None:
        producer = await client.producer(topic, durability="os")
        consumer = await client.consumer(topic, subscription="s")
        got: list[int] = []
        cancelled = sent = 0
        while sent < 2000 or len(got) < 2000:
            if sent < 2000:
                for _ in range(10):
                    await producer.send(b"%d" % sent)
                    sent += 1
            one = draw.random() < 0.5
            receive = consumer.receive() if one else consumer.receive_batch(7)
            task: asyncio.Task[Any] = asyncio.ensure_future(receive)
            if await cancel_soon(task, draw):
                cancelled += 1
                continue
            messages = [task.result()] if one else list(task.result())
            got += [int(message.payload) for message in messages]
            for message in messages:
                await consumer.ack(message)
        assert got == list(range(2000)) and cancelled > 20
        flush = asyncio.ensure_future(consumer.flush_acks())
        await cancel_soon(flush, draw)
        await consumer.flush_acks()
        assert await consumer.lag() == 0

    run(real, body, transport=transport)


def test_cancelling_a_publish_leaves_it_on_its_way_once(real: Broker, topic: str) -> None:
    draw = random.Random(12)

    async def body(client: danube_fast.AsyncClient) -> None:
        producer = await client.producer(topic)
        cancelled = 0
        for number in range(300):
            payload = b"%d" % number
            publish: Any = (
                producer.publish(payload) if number % 3 else producer.send_many([payload])
            )
            cancelled += await cancel_soon(asyncio.ensure_future(publish), draw)
        flush = asyncio.ensure_future(producer.flush())
        await cancel_soon(flush, draw)
        await producer.flush()
        found = [int(m.payload or b"") async for m in await client.reader(topic)]
        assert cancelled > 20 and len(set(found)) == len(found) and found == sorted(found)
        # what was cancelled before its first step never began; everything else is there
        missing = set(range(300)) - set(found)
        assert len(missing) <= cancelled

    run(real, body)


def test_cancelling_what_opens_and_moves(real: Broker, topic: str) -> None:
    draw = random.Random(13)

    async def body(client: danube_fast.AsyncClient) -> None:
        await client.admin.create_topic(topic)
        for _ in range(30):
            await cancel_soon(asyncio.ensure_future(client.producer(topic, name="p")), draw)
            opening: Any = client.consumer(topic, subscription="s", initial_position="earliest")
            await cancel_soon(asyncio.ensure_future(opening), draw)
            for user in list(client._core.routes.users):
                await client._driver.run(user.close_steps())
        async with (
            await client.producer(topic, name="p") as producer,
            await client.consumer(topic, subscription="s", initial_position="earliest") as consumer,
        ):
            for number in range(10):
                await producer.publish(b"%d" % number)
            for _ in range(20):
                await cancel_soon(asyncio.ensure_future(consumer.seek("earliest")), draw)
            await consumer.seek(4)
            batch = await consumer.receive_batch(timeout=WAIT_SECONDS)
            assert batch.offsets[0] == 4
            closing = asyncio.ensure_future(consumer.close())
            await cancel_soon(closing, draw)
            await cancel_soon(asyncio.ensure_future(client.admin.topic_stats(topic)), draw)
        stats = await client.admin.topic_stats(topic)
        assert not stats["subscriptions"][0]["consumers"]

    run(real, body)


def test_cancelling_what_reads_by_itself(real: Broker, topic: str) -> None:
    draw = random.Random(15)

    async def body(client: danube_fast.AsyncClient) -> None:
        policy = {
            "max_redelivery_count": 0, "poison_policy": "dead_letter",
            "dead_letter_topic": f"{topic}-dead",
        }  # fmt: skip
        for number in range(30):
            await client.publish(topic, b"%d" % number)
        consumer = await client.consumer(
            topic, subscription="s", initial_position="earliest", failure_policy=policy
        )
        for _ in range(30):
            message = await consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None
            await consumer.nack(message)
        while await consumer.lag():  # noqa: ASYNC110 - bounded by `run`
            await asyncio.sleep(0.01)
        await consumer.close()
        cancelled = 0
        for _ in range(20):
            cancelled += await cancel_soon(asyncio.ensure_future(client.admin.peek(topic)), draw)
            cancelled += await cancel_soon(
                asyncio.ensure_future(client.admin.redrive(topic, "s")), draw
            )
        assert cancelled > 20
        await client.admin.redrive(topic, "s")
        again = [int(m.payload or b"") for m in await client.admin.tail(topic, 60)]
        assert set(again[30:]) == set(range(30)), "a letter was acked and not published"
        assert await client.admin.redrive(topic, "s") == 0
        assert len(client._core.routes.users) == 1, "only what client.publish keeps is open"

    run(real, body)


def test_cancelling_around_a_subscription(real: Broker, topic: str) -> None:
    draw = random.Random(14)
    done: list[int] = []

    async def handler(message: danube_fast.Message) -> None:
        await asyncio.sleep(0)
        done.append(int(message.payload or b""))

    async def body(client: danube_fast.AsyncClient) -> None:
        producer = await client.producer(topic, durability="os")
        handle = await client.subscribe(topic, "s", handler)
        for number in range(200):
            await producer.send(b"%d" % number)
            await cancel_soon(asyncio.ensure_future(handle.wait()), draw)
        closing = asyncio.ensure_future(handle.close())
        await cancel_soon(closing, draw)
        await handle.close()
        again = await client.subscribe(topic, "s", handler)
        while len(set(done)) < 200:  # noqa: ASYNC110 - bounded by `run`
            await asyncio.sleep(0.01)
        await again.close()
        found = await client.admin.describe_subscription(topic, "s")
        assert found["lag_messages"] == 0

    run(real, body)
