"""`client.subscribe` and `message.processing` on a real broker."""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import danube_fast
from danube_fast.client.handle.turns import Turns
from danube_fast.testing import Broker

WAIT_SECONDS = 60.0
QUICK = {"ack_timeout_ms": 1500, "base_redelivery_delay_ms": 1, "max_redelivery_delay_ms": 1}
"""A failure policy under which a message that is late comes again at once."""
THREE_TIMEOUTS = 4.5
EARLIEST: dict[str, Any] = {"initial_position": "earliest"}


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_SECONDS} s"
        time.sleep(0.01)
    return value


def fill(client: danube_fast.Client, topic: str, count: int, keys: int = 0) -> None:
    with client.producer(topic, durability="os") as producer:
        names = [b"%d" % (n % keys) for n in range(count)] if keys else None
        producer.send_many([b"%d" % n for n in range(count)], keys=names)


def described(client: danube_fast.Client, topic: str, name: str = "s") -> dict[str, Any]:
    return client.admin.describe_subscription(topic, name)


def test_handlers_run_beside_each_other(real: Broker, topic: str) -> None:
    together = threading.Barrier(8)
    with real.client() as client:
        fill(client, topic, 8)
        with client.subscribe(
            topic, "s", lambda _: together.wait(WAIT_SECONDS), **EARLIEST
        ) as handle:
            until("all acks", lambda: described(client, topic)["lag_messages"] == 0)
            assert handle.consumer.type == "shared"


@pytest.mark.parametrize("type_name", ["exclusive", "failover"])
def test_one_at_a_time_where_the_order_of_all_counts(
    real: Broker, topic: str, type_name: str
) -> None:
    seen: list[int] = []
    with real.client() as client:
        fill(client, topic, 500)
        with pytest.raises(danube_fast.InvalidArgument, match="key_shared"):
            client.subscribe(topic, "s", print, type=type_name, concurrency=2)
        for concurrency in (0, 1025):
            with pytest.raises(danube_fast.InvalidArgument, match="1 to 1024"):
                client.subscribe(topic, "s", print, concurrency=concurrency)
        with client.subscribe(
            topic, "s", lambda m: seen.append(m.offset), type=type_name, **EARLIEST
        ):
            until("all messages", lambda: len(seen) == 500)
    assert seen == list(range(500))


def test_key_shared_keeps_the_order_of_each_key(real: Broker, topic: str) -> None:
    by_key: dict[bytes, list[int]] = collections.defaultdict(list)
    busy: collections.Counter[bytes | None] = collections.Counter()
    at_once = faults = 0
    draw = random.Random(5)

    def handler(message: danube_fast.Message) -> None:
        nonlocal at_once, faults
        assert message.key is not None
        busy[message.key] += 1
        faults += busy[message.key] > 1
        at_once = max(at_once, sum(busy.values()))
        threading.Event().wait(draw.random() / 2000)  # others overtake, if they can
        by_key[message.key].append(message.offset)
        busy[message.key] -= 1

    with real.client() as client:
        fill(client, topic, 2000, keys=20)
        with client.subscribe(topic, "s", handler, type="key_shared", concurrency=8, **EARLIEST):
            until("all messages", lambda: sum(map(len, by_key.values())) == 2000)
    assert not faults and at_once > 1
    assert all(offsets == sorted(offsets) for offsets in by_key.values()) and len(by_key) == 20


def test_turns() -> None:
    turns = Turns(by_key=True, room=4)
    messages = [danube_fast.Message(b"", key=key, offset=n) for n, key in enumerate("aab")]
    messages.append(danube_fast.Message(b"", offset=3))
    for message in messages:
        assert not turns.is_full
        turns.add(message)
    assert turns.is_full
    first = turns.take()
    assert first is messages[0] and turns.take() is messages[2] and turns.take() is messages[3]
    assert turns.take() is None  # the other of key a has to wait
    turns.done(messages[2])
    turns.done(first)
    assert turns.take() is messages[1] and turns.take() is None
    turns.add(messages[0])
    assert turns.take() is None
    turns.done(messages[1])
    assert turns.clear() == [messages[0]] and turns.take() is None and not turns.is_full


def test_a_failing_handler_gives_its_reason(real: Broker, topic: str) -> None:
    policy = {
        **QUICK, "max_redelivery_count": 1, "poison_policy": "dead_letter",
        "dead_letter_topic": f"{topic}-dead",
    }  # fmt: skip
    seen: list[int] = []

    def handler(message: danube_fast.Message) -> None:
        if message.offset == 1:
            raise ValueError(f"number {message.payload!r} is bad")
        if message.offset == 2:
            raise SystemExit  # it does not end the thread either
        seen.append(message.offset)

    with real.client() as client:
        fill(client, topic, 20)
        with (
            client.subscribe(topic, "s", handler, concurrency=2, failure_policy=policy, **EARLIEST),
            client.consumer(
                f"{topic}-dead", subscription="s", timeout=WAIT_SECONDS, **EARLIEST
            ) as dead,
        ):
            letters = [dead.receive(timeout=WAIT_SECONDS) for _ in range(2)]
            until("all others", lambda: len(seen) == 18)
            until("all acks", lambda: described(client, topic)["lag_messages"] == 0)
    reasons = {
        letter.payload: letter.attributes["x-failure-reason"] for letter in letters if letter
    }
    assert reasons == {b"1": "ValueError: number b'1' is bad", b"2": "SystemExit: "}


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_message_stays_while_its_handler_runs(real: Broker, topic: str, transport: str) -> None:
    counts: collections.Counter[int] = collections.Counter()

    def handler(message: danube_fast.Message) -> None:
        counts[message.offset] += 1
        if message.offset < 2:
            threading.Event().wait(THREE_TIMEOUTS)

    with real.client(transport=transport) as client:
        fill(client, topic, 200)
        with client.subscribe(topic, "s", handler, concurrency=2, failure_policy=QUICK, **EARLIEST):
            until("all acks", lambda: described(client, topic)["lag_messages"] == 0)
        assert set(counts.values()) == {1} and len(counts) == 200
        assert described(client, topic)["redelivered"] == 0


def test_a_handler_that_runs_survives_a_shorter_timeout(real: Broker, topic: str) -> None:
    counts: collections.Counter[int] = collections.Counter()
    begun = threading.Event()

    def handler(message: danube_fast.Message) -> None:
        counts[message.offset] += 1
        begun.set()
        threading.Event().wait(5)

    with real.client() as client:
        fill(client, topic, 1)
        with client.subscribe(topic, "s", handler, **EARLIEST):
            assert begun.wait(WAIT_SECONDS)
            threading.Event().wait(1.5)  # it has been extended once
            client.admin.set_failure_policy(topic, "s", QUICK)
            until("the ack", lambda: described(client, topic)["lag_messages"] == 0)
    assert counts == {0: 1}


def test_what_ends_a_subscription_reaches_the_user(real: Broker, topic: str) -> None:
    with real.client() as client:
        for told in ("wait", "close", "with"):
            client.admin.create_topic(topic)
            handle = client.subscribe(topic, "s", print)
            assert handle.wait(timeout=0) is False
            client.admin.delete_topic(topic)
            if told == "wait":
                with pytest.raises(danube_fast.TopicDeleted):
                    handle.wait(WAIT_SECONDS)
                assert isinstance(handle.error, danube_fast.TopicDeleted)
                handle.close()
            elif told == "close":
                until("the end", lambda: handle.error)  # noqa: B023
                with pytest.raises(danube_fast.TopicDeleted):
                    handle.close()
                handle.close()
            else:
                with pytest.raises(danube_fast.TopicDeleted), handle:
                    until("the end", lambda: handle.error)  # noqa: B023
        client.admin.create_topic(topic)
        handle = client.subscribe(topic, "s", print)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(handle.wait)
            handle.close()
            assert waiting.result(WAIT_SECONDS) is True


def test_closing_acks_what_was_done_and_gives_the_rest_back(real: Broker, topic: str) -> None:
    begun, done = threading.Semaphore(0), threading.Event()
    first: list[int] = []

    def handler(message: danube_fast.Message) -> None:
        begun.release()
        assert done.wait(WAIT_SECONDS)
        first.append(message.offset)

    with real.client() as client:
        fill(client, topic, 300)
        handle = client.subscribe(topic, "s", handler, concurrency=3, **EARLIEST)
        for _ in range(3):
            assert begun.acquire(timeout=WAIT_SECONDS)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(handle.close, WAIT_SECONDS)
            until("the request to stop", lambda: handle._stopping)
            done.set()
            closing.result(WAIT_SECONDS)
        assert len(first) == 3
        with client.consumer(topic, subscription="s", type="shared") as consumer:
            rest: list[int] = []
            while len(rest) < 297:
                batch = consumer.receive_batch(timeout=WAIT_SECONDS)
                assert batch, f"{len(rest)} of 297 came"
                rest += batch.offsets.tolist()
                consumer.ack(batch)
            assert sorted(first + rest) == list(range(300))


def test_closing_with_handlers_that_run_on(real: Broker, topic: str) -> None:
    begun, done = threading.Event(), threading.Event()

    def handler(message: danube_fast.Message) -> None:
        begun.set()
        assert done.wait(WAIT_SECONDS)

    with real.client() as client:
        fill(client, topic, 1)
        handle = client.subscribe(topic, "s", handler, **EARLIEST)
        assert begun.wait(WAIT_SECONDS)
        with pytest.raises(danube_fast.FailedPrecondition, match=f"1 handlers.*{topic}@0"):
            handle.close(timeout=0.5)
        done.set()
        assert handle.wait(WAIT_SECONDS)
        with client.consumer(topic, subscription="s", type="shared") as consumer:
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None and message.offset == 0


def test_a_handler_may_end_its_subscription(real: Broker, topic: str) -> None:
    holder: list[danube_fast.Subscriber] = []
    made = threading.Event()

    def handler(message: danube_fast.Message) -> None:
        assert made.wait(WAIT_SECONDS)
        with pytest.raises(danube_fast.FailedPrecondition, match="its own end"):
            holder[0].wait()
        holder[0].close()

    with real.client() as client:
        fill(client, topic, 3)
        handle = client.subscribe(topic, "s", handler, concurrency=1, **EARLIEST)
        holder.append(handle)
        made.set()
        assert handle.wait(WAIT_SECONDS)
        until("one ack", lambda: described(client, topic)["lag_messages"] == 2)
        assert handle.consumer.state == "closed"


def test_closing_the_client_closes_its_subscriptions_first(real: Broker, topic: str) -> None:
    begun, done = threading.Event(), threading.Event()

    def handler(message: danube_fast.Message) -> None:
        begun.set()
        assert done.wait(WAIT_SECONDS)

    with real.client() as other:
        fill(other, topic, 1)
        client = real.client()
        handle = client.subscribe(topic, "s", handler, **EARLIEST)
        assert begun.wait(WAIT_SECONDS)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(client.close)
            until("the request to stop", lambda: handle._stopping)
            done.set()
            closing.result(WAIT_SECONDS)
        assert described(other, topic)["lag_messages"] == 0


def test_a_subscription_goes_on_when_workers_are_killed(topic: str) -> None:
    seen: set[int] = set()
    with Broker(workers=2) as broker, broker.client() as client:
        fill(client, topic, 1000)
        with client.subscribe(topic, "s", lambda m: seen.add(m.offset), **EARLIEST) as handle:
            until("some", lambda: seen)
            for index in range(2):
                broker.kill_worker(index)
            fill(client, topic, 1000)
            until("all messages", lambda: len(seen) == 2000)
            until("all acks", lambda: described(client, topic)["lag_messages"] == 0)
            assert handle.error is None


def test_coroutines_need_a_loop(real: Broker, topic: str) -> None:
    async def handler(message: danube_fast.Message) -> None: ...

    class Handler:
        async def __call__(self, message: danube_fast.Message) -> None: ...

    with real.client() as client:
        for wrong in (handler, Handler()):
            with pytest.raises(danube_fast.InvalidArgument, match="connect_async"):
                client.subscribe(topic, "s", wrong)


# ---------------------------------------------------------------- processing


def test_processing_keeps_a_message(real: Broker, topic: str) -> None:
    with real.client() as client:
        fill(client, topic, 50)
        with client.consumer(
            topic, subscription="s", type="shared", failure_policy=QUICK, **EARLIEST
        ) as consumer:
            first = consumer.receive(timeout=WAIT_SECONDS)
            assert first is not None
            with first.processing() as message, first.processing():
                assert message is first
                threading.Event().wait(THREE_TIMEOUTS)
            consumer.ack(first)
            for offset in range(1, 50):
                message = consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None and message.offset == offset
                consumer.ack(message)
            consumer.flush_acks()
            assert described(client, topic)["redelivered"] == 0
            assert not consumer._inbox.in_progress


def test_without_processing_a_message_comes_again(real: Broker, topic: str) -> None:
    with real.client() as client:
        fill(client, topic, 1)
        with client.consumer(
            topic, subscription="s", type="shared", failure_policy=QUICK, **EARLIEST
        ) as consumer:
            first = consumer.receive(timeout=WAIT_SECONDS)
            assert first is not None
            with first.processing():
                threading.Event().wait(THREE_TIMEOUTS)
                assert consumer.receive(timeout=0) is None
            again = consumer.receive(timeout=WAIT_SECONDS)  # it was not acked
            assert again is not None and again.redelivery_count == 1


def test_what_cannot_be_processed(real: Broker, topic: str) -> None:
    with pytest.raises(danube_fast.FailedPrecondition, match="constructed"):
        danube_fast.Message(b"").processing()
    with real.client() as client:
        fill(client, topic, 1)
        for message in client.reader(topic):
            with pytest.raises(danube_fast.FailedPrecondition, match="reader"):
                message.processing()


# ---------------------------------------------------------------- the event loop


def test_asynchronous_subscriptions(real: Broker, topic: str) -> None:
    by_key: dict[bytes | None, list[int]] = collections.defaultdict(list)
    failed: set[int] = set()
    draw = random.Random(3)

    async def handler(message: danube_fast.Message) -> None:
        if message.offset == 7 and not failed:
            failed.add(7)
            raise ValueError("not now")
        await asyncio.sleep(draw.random() / 1000)
        by_key[message.key].append(message.offset)

    def plain(message: danube_fast.Message) -> None:
        by_key[message.key].append(message.offset)

    async def main() -> None:
        async with await real.async_client() as client:
            async with await client.producer(topic, durability="os") as producer:
                await producer.send_many(
                    [b"%d" % n for n in range(400)], keys=[b"%d" % (n % 8) for n in range(400)]
                )
            for function, type_name in ((handler, "key_shared"), (plain, "shared")):
                by_key.clear()
                async with await client.subscribe(
                    topic, type_name, function, type=type_name, failure_policy=QUICK, **EARLIEST
                ) as handle:
                    assert await handle.wait(timeout=0) is False
                    async with asyncio.timeout(WAIT_SECONDS):
                        while sum(map(len, by_key.values())) < 400:  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                found = await client.admin.describe_subscription(topic, type_name)
                assert found["lag_messages"] == 0
                if type_name == "key_shared":
                    assert all(v == sorted(v) for k, v in by_key.items() if k != b"7") and failed

    asyncio.run(main())


def test_asynchronous_ends(real: Broker, topic: str) -> None:
    begun = asyncio.Event()

    async def handler(message: danube_fast.Message) -> None:
        begun.set()
        async with message.processing():
            await asyncio.sleep(60)

    async def main() -> None:
        async with await real.async_client() as client:
            await client.admin.create_topic(topic)
            handle = await client.subscribe(topic, "s", handler)
            await client.publish(topic, b"x")
            await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
            with pytest.raises(danube_fast.FailedPrecondition, match=f"1 handlers.*{topic}@0"):
                await handle.close(timeout=0.3)
            assert await handle.wait(WAIT_SECONDS)
            consumer = await client.consumer(topic, subscription="s", type="shared")
            message = await consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None and message.offset == 0
            await consumer.ack(message)
            await consumer.close()
            handle = await client.subscribe(topic, "s", handler)
            waiting = asyncio.ensure_future(handle.wait())
            await client.admin.delete_topic(topic)
            with pytest.raises(danube_fast.TopicDeleted):
                await asyncio.wait_for(waiting, WAIT_SECONDS)
            await handle.close()

            async def ends(message: danube_fast.Message) -> None:
                await handles[0].close()

            await client.admin.create_topic(topic)
            with pytest.raises(danube_fast.TopicDeleted, match="create it again"):
                await client.publish(topic, b"x")  # its producer was one of the topic before
            await client.publish(topic, b"x")
            handles = [await client.subscribe(topic, "s", ends, **EARLIEST)]
            assert await handles[0].wait(WAIT_SECONDS)
            async with asyncio.timeout(WAIT_SECONDS):
                while handles[0].consumer.state != "closed":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            found = await client.admin.describe_subscription(topic, "s")
            assert found["lag_messages"] == 0

    asyncio.run(main())
