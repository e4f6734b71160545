"""One consumer over all topics of a pattern, those to come included; lists of topics; fair turns."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server
from tests.workers.broker import wait_until

WAIT_SECONDS = 60.0
MANY = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("patterns") / "data", workers=2, session_timeout_ms=30_000
    ) as running:
        yield running


def receive(consumer: Any, count: int, *, ack: bool = True) -> list[danube_fast.Message]:
    got: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(got) < count:
        batch = consumer.receive_batch(max_messages=count - len(got), timeout=1)
        got += list(batch)
        if ack:
            consumer.ack(batch)
        assert time.monotonic() < deadline, f"{len(got)} of {count} messages"
    return got


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_topics_come_and_go(server: Server, transport: str) -> None:
    space = f"iot-{transport}"
    pattern = f"/{space}/dev-*"
    with server.client(transport=transport) as client, server.client() as other:
        client.admin.create_namespace(space)
        other.publish(f"/{space}/zzz", b"does not match")
        with client.consumer(pattern=pattern, subscription="s") as consumer:
            assert consumer.topics == ()
            assert consumer.receive(timeout=0.2) is None, (
                "nothing matches yet, and that is no error"
            )
            assert consumer.state == "connected"
            for number in range(5):
                other.publish(f"/{space}/dev-{number}", b"%d" % number)
            other.publish(f"/{space}/zzz", b"does not match")
            got = receive(consumer, 5)
            assert {m.topic: m.payload for m in got} == {
                f"/{space}/dev-{number}": b"%d" % number for number in range(5)
            }
            for topic in (f"/{space}/dev-1", f"/{space}/dev-3"):
                other.admin.delete_topic(topic)
            wait_until(
                "both leave", lambda: len(consumer.topics) == 3 or consumer.receive(timeout=0.05)
            )
            assert consumer.receive(timeout=0.2) is None, "topics leave without a word"
            assert consumer.state == "connected"
            # made again under its name it is another topic, and joins from its first message
            with other.producer(f"/{space}/dev-1", partitions=3) as producer:
                for number in range(6):
                    producer.publish(b"again %d" % number)
            assert {m.payload for m in receive(consumer, 6)} == {b"again %d" % n for n in range(6)}
            other.admin.set_topic(f"/{space}/dev-1", partitions=5)
            with other.producer(f"/{space}/dev-1") as producer:
                for number in range(10):
                    producer.publish(b"grown %d" % number)
            assert {m.payload for m in receive(consumer, 10)} == {
                b"grown %d" % n for n in range(10)
            }
            consumer.flush_acks()
            assert consumer.lag() == 0
        with client.consumer(pattern=pattern, subscription="s") as consumer:
            assert consumer.receive(timeout=0.3) is None, "all was acked, each to its own topic"


def test_acks_go_to_the_topic_of_the_message(server: Server) -> None:
    with server.client() as client:
        for name in ("a", "b", "c"):
            for number in range(10):
                client.publish(f"/default/ack-{name}", b"%s%d" % (name.encode(), number))
        with client.consumer(
            pattern="/default/ack-?", subscription="s", initial_position="earliest"
        ) as consumer:
            got = receive(consumer, 30, ack=False)
            for message in got:
                if message.topic.endswith("b") or message.offset < 5:
                    consumer.ack(message)
            consumer.nack([m for m in got if m.topic.endswith("c") and m.offset == 7], delay=0)
            again = receive(consumer, 1)
            assert (again[0].payload, again[0].redelivery_count) == (b"c7", 1)
            consumer.flush_acks()
        lags = {
            name: client.admin.describe_subscription(f"/default/ack-{name}", "s")["lag_messages"]
            for name in ("a", "b", "c")
        }
        assert lags == {"a": 5, "b": 0, "c": 4}


def test_initial_position_is_for_topics_that_are_there(server: Server) -> None:
    with server.client() as client:
        for number in range(3):
            client.publish(f"/default/init-{number}", b"old")
        consumer = client.consumer(
            pattern="/default/init-*", subscription="s", initial_position="latest"
        )
        client.publish("/default/init-new", b"first of a new topic")
        client.publish("/default/init-1", b"new of an old one")
        assert {m.payload for m in receive(consumer, 2)} == {
            b"first of a new topic", b"new of an old one",
        }  # fmt: skip
        consumer.close()


def test_two_patterns_and_a_list_in_one_client(server: Server) -> None:
    with server.client() as client:
        one = client.consumer(pattern="/default/x1-*", subscription="s")
        two = client.consumer(pattern="/default/x?-a", subscription="t")
        client.publish("/default/x1-a", b"both")
        client.publish("/default/x1-b", b"one")
        client.publish("/default/x2-a", b"two")
        assert {m.payload for m in receive(one, 2)} == {b"both", b"one"}
        assert {m.payload for m in receive(two, 2)} == {b"both", b"two"}
        one.close()
        client.publish("/default/x3-a", b"still")
        assert receive(two, 1)[0].payload == b"still"
        names = ["/default/x1-a", "/default/x1-b"]
        with client.consumer(names, subscription="u", initial_position="earliest") as listed:
            assert {m.payload for m in receive(listed, 2)} == {b"both", b"one"}
        assert {m.payload for m in client.reader(names)} == {b"both", b"one"}
        two.close()


def test_shared_by_two_consumers(server: Server) -> None:
    with server.client() as first, server.client() as second:
        consumers = [
            client.consumer(pattern="/default/sh-*", subscription="s", type="shared")
            for client in (first, second)
        ]
        for number in range(4):
            first.admin.create_topic(f"/default/sh-{number}")
        for consumer in consumers:  # a client hears of topics while it waits
            wait_until(
                "four topics",
                lambda consumer=consumer: (
                    consumer.receive(timeout=0.05) or len(consumer.topics) == 4
                ),
            )
        for number in range(40):
            first.publish(f"/default/sh-{number % 4}", b"%d" % number)
        got: dict[bytes | None, int] = {}
        deadline = time.monotonic() + WAIT_SECONDS
        while len(got) < 40:
            for index, consumer in enumerate(consumers):
                for message in consumer.receive_batch(timeout=0.05):
                    assert got.setdefault(message.payload, index) == index, "delivered to both"
                    consumer.ack(message)
            assert time.monotonic() < deadline, f"{len(got)} of 40"
        assert set(got.values()) == {0, 1}


def test_a_thousand_topics_join_in_time_and_share_the_credit(server: Server) -> None:
    with server.client() as client:
        client.admin.create_namespace("many")
        for number in range(MANY):
            client.admin.create_topic(f"/many/t-{number}", durability="memory")
        window = 1 << 18
        with server.client() as reading:
            consumer = reading.consumer(pattern="/many/*", subscription="s", permits_bytes=window)
            assert len(consumer.topics) == MANY
            for number in range(MANY):
                client.publish(f"/many/t-{number}", os.urandom(4000))
            stats = [client.admin.topic_stats(f"/many/t-{number}") for number in range(MANY)]
            held = sum(entry["subscriptions"][0]["unacked"] for entry in stats)
            assert 0 < held * 4000 < 3 * window, f"{held} messages of 4,000 bytes were sent ahead"
            got = receive(consumer, MANY)
            assert len({message.topic for message in got}) == MANY
            consumer.flush_acks()


def test_a_backlog_of_one_topic_does_not_hide_the_others(tmp_path: Path) -> None:
    """Small topics come while the large one is being read, not behind it."""
    with Server(tmp_path / "data", workers=1) as server, server.client() as client:
        with client.producer("/default/f-large", durability="os") as producer:
            for _ in range(200):
                producer.send_many([os.urandom(1000)] * 200)
        for number in range(20):
            client.publish(f"/default/f-small-{number}", b"small")
        with client.consumer(
            pattern="/default/f-*", subscription="s", initial_position="earliest",
            permits_bytes=2 << 20,
        ) as consumer:  # fmt: skip
            large = small = 0
            deadline = time.monotonic() + WAIT_SECONDS
            while small < 20:
                batch = consumer.receive_batch(timeout=1)
                small += sum(1 for message in batch if message.payload == b"small")
                large += len(batch)
                consumer.ack(batch)
                assert time.monotonic() < deadline, f"{small} of 20 small topics"
            assert large < 20_000, f"{large} of 40,020 messages came before the last small topic"


def test_a_new_coordinator_tells_of_new_topics(tmp_path: Path) -> None:
    with Server(tmp_path / "data", workers=1) as server, server.client() as client:
        consumer = client.consumer(pattern="/default/c-*", subscription="s")
        client.publish("/default/c-1", b"before")
        assert receive(consumer, 1)[0].payload == b"before"
        client.publish("/default/c-2", b"goes")
        assert receive(consumer, 1)[0].payload == b"goes"
        old = server.pid_of(0)
        server.kill("coordinator")
        wait_until("a new coordinator", lambda: _is_new(server, old), WAIT_SECONDS)
        with server.client() as other:  # the consumer's own client says nothing
            other.admin.delete_topic("/default/c-2")
            other.publish("/default/c-3", b"after")
            other.publish("/default/c-1", b"still")
        assert {m.payload for m in receive(consumer, 2)} == {b"after", b"still"}
        wait_until("c-2 leaves", lambda: _topics_after_a_look(consumer), WAIT_SECONDS)
        consumer.close()


def _is_new(server: Server, old: int) -> bool:
    try:
        return server.pid_of(0) != old
    except Exception:
        return False


def _topics_after_a_look(consumer: Any) -> bool:
    assert consumer.receive(timeout=0.1) is None
    return set(consumer.topics) == {"/default/c-1", "/default/c-3"}


def test_async(server: Server) -> None:
    async def run() -> None:
        async with await danube_fast.connect_async(server.url) as client:
            consumer = await client.consumer(pattern="/default/as-*", subscription="s")
            with server.client() as other:
                for number in range(3):
                    await asyncio.to_thread(other.publish, f"/default/as-{number}", b"%d" % number)
            got = set()
            deadline = time.monotonic() + WAIT_SECONDS
            while len(got) < 3:
                message = await consumer.receive(timeout=1)
                if message is not None:
                    got.add(message.payload)
                    await consumer.ack(message)
                assert time.monotonic() < deadline, got
            await consumer.flush_acks()
            found = await client.admin.peek("/default/as-1")
            assert [message.payload for message in found] == [b"1"]

    asyncio.run(run())


def test_a_reader_of_a_pattern(server: Server) -> None:
    with server.client() as client:
        for number in range(4):
            client.publish(f"/default/rd-{number}", b"%d" % number)
        assert {m.payload for m in client.reader(pattern="/default/rd-*")} == {
            b"0", b"1", b"2", b"3",
        }  # fmt: skip
        assert list(client.reader(pattern="/default/none-*")) == []
        follows = client.reader(pattern="/default/rd-*", stop=None)
        ends = client.reader(pattern="/default/rd-*")
        client.publish("/default/rd-new", b"new")
        client.admin.delete_topic("/default/rd-3")
        got: set[bytes | None] = set()
        deadline = time.monotonic() + WAIT_SECONDS
        while not got >= {b"0", b"1", b"2", b"new"}:
            got |= {m.payload for m in follows.receive_batch(timeout=0.5)}
            assert time.monotonic() < deadline, got
        assert {m.payload for m in ends} - {b"3"} == {b"0", b"1", b"2"}, "it ends all the same"
        with pytest.raises(danube_fast.InvalidArgument, match="not both"):
            client.reader("/default/rd-1", pattern="/default/rd-*")
        with pytest.raises(danube_fast.InvalidArgument, match="name a topic"):
            client.reader()
        follows.close()
