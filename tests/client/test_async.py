"""The asynchronous face: parity with the synchronous one, cancellation, many at once."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import danube_fast
from danube_fast.client.admin_client import AdminClient, AsyncAdmin
from danube_fast.client.async_client import AsyncClient
from danube_fast.client.link.loop import COMPLETED_MAX
from danube_fast.client.link.pump import Pump
from danube_fast.client.produce.lane import Lane
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument

TOPIC = "/default/t"
PUBLISHES = 5_000
WAIT_SECONDS = 60


def run(broker: Any, body: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with await danube_fast.connect_async(broker.url, timeout=60) as client:
            await asyncio.wait_for(body(client), 120)

    asyncio.run(main())


async def until(ready: Callable[[], bool]) -> None:
    """Bounded by the limit of `run`."""
    while not ready():  # noqa: ASYNC110 - the broker lives in a thread and sets no events
        await asyncio.sleep(0.002)


def test_admin_twin_has_every_operation(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        assert await client.admin.create_topic(TOPIC) == {"topic": TOPIC}
        assert await client.admin.list_topics() == [{"topic": TOPIC}]
        assert await client.admin.call("list_topics") == [{"topic": TOPIC}]
        for name in vars(AdminClient):
            if not name.startswith("_") and name not in ("steps", "call"):
                assert callable(getattr(client.admin, name))
        with pytest.raises(AttributeError):
            client.admin.make_coffee
        with pytest.raises(danube_fast.NotFound):
            await client.admin.cluster_status()

    run(broker, body)
    assert AsyncAdmin.__doc__


def test_what_opens_is_entered_or_awaited(broker: Any) -> None:
    async def main() -> None:
        async with (
            danube_fast.connect_async(broker.url, timeout=60) as client,
            client.producer(TOPIC) as producer,
            client.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer,
        ):
            sent = await producer.publish(b"0")
            found = await consumer.receive(timeout=60)
            assert found is not None and found.message_id == sent
            async with client.reader(TOPIC) as reader:
                assert [message.payload async for message in reader] == [b"0"]
            async with client.subscribe(TOPIC, "handled", lambda message: None) as handle:
                assert handle.error is None
            task = asyncio.create_task(client.producer(TOPIC, name="by a task"))
            await (await asyncio.wait_for(task, 60)).close()
        with pytest.raises(danube_fast.FailedPrecondition, match="closed"):
            await client.producer(TOPIC)
        with pytest.raises(danube_fast.InvalidArgument, match="unknown"):
            async with danube_fast.connect_async(broker.url, transport="carrier pigeon"):
                pass
        refused = danube_fast.connect_async(broker.url)
        refused.close()  # given up before it began: no warning, nothing is left open

    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_journey(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        async with await client.producer(TOPIC) as producer:
            assert (await producer.publish(b"0", key="k")).offset == 0
            await producer.send(b"1")
            await producer.send_many([b"2", b"3"])
            last = await producer.flush(timeout=60)
            assert last is not None and last.offset == 3
        assert (await client.publish(TOPIC, b"4")).offset == 4
        consumer = await client.consumer(TOPIC, subscription="s", initial_position="earliest")
        first = await consumer.receive(timeout=60)
        assert first is not None and (first.payload, first.key) == (b"0", b"k")
        await consumer.ack(first)
        batch = await consumer.receive_batch(max_messages=2, timeout=60)
        await consumer.ack(batch)
        got = []
        async for message in consumer:
            got.append(message.payload)
            await consumer.ack(message)
            if len(got) == 5 - 1 - len(batch):
                break
        assert got[-1] == b"4"
        assert await consumer.receive(timeout=0.01) is None
        await consumer.flush_acks(timeout=60)
        assert broker.acked(TOPIC, "s") == {0, 1, 2, 3, 4}
        await consumer.seek("earliest")
        again = await consumer.receive(timeout=60)
        assert again is not None and again.offset == 0
        await consumer.close()
        assert [m.offset async for m in await client.reader(TOPIC)] == [0, 1, 2, 3, 4]
        assert (await (await client.reader(TOPIC)).to_arrow()).num_rows == 5

    run(broker, body)


def test_a_thousand_publishes_at_once(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC)
        broker.hold_acks = True
        together = asyncio.gather(*(producer.publish(b"%d" % i) for i in range(1000)))
        await until(lambda: len(broker.held) >= 1)
        broker.release_acks()
        ids = await together
        assert [m.offset for m in ids] == list(range(1000))
        assert len(broker.publish_sizes) < 10, "publishes that wait together travel together"

    run(broker, body)


def test_tasks_have_their_turns_while_many_publishes_are_completed(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC)
        turns: list[int] = []
        done: list[int] = []

        async def publish(number: int) -> None:
            await producer.publish(b"%d" % number)
            done.append(number)

        async def take_turns() -> None:
            while len(done) < PUBLISHES:
                turns.append(len(done))
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(publish(number)) for number in range(PUBLISHES)]
        await asyncio.gather(take_turns(), *tasks)
        assert sorted(done) == list(range(PUBLISHES))
        steps = [now - before for before, now in itertools.pairwise([*turns, PUBLISHES])]
        assert max(steps) <= COMPLETED_MAX, f"{max(steps)} publishes ended in one turn"

    run(broker, body)


def test_a_client_that_is_closed_ends_publishes_that_wait(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC)
        broker.hold_acks = True
        task = asyncio.ensure_future(producer.publish(b"held"))
        await until(lambda: len(broker.held) >= 1)
        with pytest.raises(DanubeError):
            await producer.close(timeout=0.1)
        broker.release_acks()
        done, _ = await asyncio.wait([task], timeout=WAIT_SECONDS)
        assert done, "a publish waits for ever behind the end of its producer"
        with pytest.raises(FailedPrecondition, match="may have been stored"):
            await task

    run(broker, body)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, broker: Any) -> None:
    """No heartbeat is due in the test: it would tell an event loop of what it was not told."""
    limits = sys.modules[type(broker).__module__].LIMITS
    for name in ("heartbeat_ms", "heartbeat_idle_ms"):
        monkeypatch.setitem(limits, name, 600_000)


@pytest.mark.usefixtures("quiet")
def test_a_message_that_cannot_be_packed_is_told_at_once(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise InvalidArgument("too large with its attributes")

    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC)
        monkeypatch.setattr(Lane, "pack", refuse)
        with pytest.raises(InvalidArgument, match="too large"):
            await asyncio.wait_for(producer.publish(b"x", attributes={"a": "x"}), 20)

    run(broker, body)


def test_an_event_loop_hears_of_callbacks_that_it_is_to_call() -> None:
    pump, heard = Pump(SystemClock()), list[int]()
    pump.on_progress = lambda: heard.append(len(pump.callbacks))
    pump.call_later(lambda: None)
    with pump.lock:
        pump.run_callbacks()  # as the timer thread does
    assert heard == [1]
    pump.close()


def test_cancelled_receives_lose_nothing(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC)
        consumer = await client.consumer(TOPIC, subscription="s", initial_position="earliest")
        got: list[int] = []

        async def publish() -> None:
            for i in range(100):
                await producer.publish(b"%d" % i)

        task = asyncio.ensure_future(publish())
        while len(got) < 100:
            try:
                message = await asyncio.wait_for(consumer.receive(), 0.0005)
            except TimeoutError:
                continue
            assert message is not None
            got.append(message.offset)
        await task
        assert got == list(range(100))

    run(broker, body)


def test_cancelled_publish_leaves_the_producer_usable(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC)
        broker.hold_acks = True
        task = asyncio.ensure_future(producer.publish(b"x"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        broker.release_acks()
        assert (await producer.publish(b"y")).offset == 1

    run(broker, body)


def test_the_loop_stays_free_while_the_window_is_full(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        producer = await client.producer(TOPIC, batch_bytes_max=4096, window_bytes_max=8192)
        broker.hold_acks = True
        task = asyncio.ensure_future(producer.send_many([bytes(1000)] * 40))
        ticks = 0
        while not broker.held or ticks < 20:
            await asyncio.sleep(0.002)
            ticks += 1
        assert not task.done()
        broker.release_acks()
        await task
        await producer.flush(timeout=60)

    run(broker, body)


def test_reconnects_and_callbacks_in_the_loop(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        producer = await client.producer(TOPIC)
        told: asyncio.Queue[Any] = asyncio.Queue()

        def on_delivery(message_id: Any, error: Any) -> None:
            assert asyncio.get_running_loop() is loop
            told.put_nowait((message_id.offset, error))

        for i in range(20):
            await producer.send(b"%d" % i, on_delivery=on_delivery)
            if i == 10:
                broker.forget_sessions()
        outcomes = [await asyncio.wait_for(told.get(), 60) for _ in range(20)]
        assert outcomes == [(i, None) for i in range(20)]

    run(broker, body)


def test_subscriber(broker: Any) -> None:
    async def body(client: AsyncClient) -> None:
        await (await client.producer(TOPIC)).send_many([b"%d" % i for i in range(20)])
        failed: set[int] = set()
        done: set[int] = set()

        async def handler(message: danube_fast.Message) -> None:
            await asyncio.sleep(0)
            if message.offset == 7 and not failed:
                failed.add(7)
                raise ValueError("not now")
            done.add(message.offset)

        options: dict[str, Any] = {"type": "shared", "initial_position": "earliest"}
        async with await client.subscribe(TOPIC, "s", handler, concurrency=4, **options):
            await until(lambda: len(done) == 20)
        assert broker.acked(TOPIC, "s") == set(range(20)) and failed == {7}

    run(broker, body)


def test_nobody_there() -> None:
    async def main() -> None:
        with pytest.raises(danube_fast.Unavailable):
            await danube_fast.connect_async("danube://127.0.0.1:9", timeout=0.2)

    asyncio.run(main())
