"""Peek, tail, purge, skip; gaps that consumers are told; the age of what is not acked."""

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # a tail of 64 KiB: most of what is looked for stands in the log
    with Server(
        tmp_path_factory.mktemp("purge") / "data", workers=2, tail_bytes_max=65_536
    ) as running:
        yield running


def publish(client: Any, topic: str, count: int, *, size: int = 0, **options: Any) -> None:
    with client.producer(topic, **options) as producer:
        for number in range(count):
            producer.send(b"%d" % number + os.urandom(size), key=b"%d" % number)
            if number % 100 == 99:
                producer.flush(timeout=WAIT_SECONDS)


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


# ---------------------------------------------------------------- peek and tail


@pytest.mark.parametrize("partitions", [0, 3])
def test_peek_and_tail_move_nothing(server: Server, partitions: int) -> None:
    topic = f"/default/peeked-{partitions}"
    with server.client() as client:
        admin = client.admin
        publish(client, topic, 500, size=500, partitions=partitions)
        with client.producer(topic) as producer:
            for number in range(500, 505):
                producer.publish(b"last %d" % number)
        assert len(admin.peek(topic)) == 10
        first = admin.peek(topic, 3)
        if not partitions:
            assert [m.offset for m in first] == [0, 1, 2]
            assert [m.offset for m in admin.peek(topic, 2, 321)] == [321, 322]
        assert [m.payload for m in admin.tail(topic, 5)] == [
            b"last %d" % n for n in range(500, 505)
        ]
        assert len(admin.peek(topic, 10_000)) == 505
        assert len(admin.tail(topic, 10_000)) == 505
        assert admin.list_subscriptions(topic) == []
        wait_until("readers leave", lambda: not admin.topic_stats(topic)["readers"], WAIT_SECONDS)
        with pytest.raises(danube_fast.InvalidArgument):
            admin.peek(topic, 0)
        with pytest.raises(danube_fast.NotFound, match="topics create"):
            admin.peek("/default/missing")


def test_the_last_messages_as_a_position(server: Server) -> None:
    with server.client() as client:
        publish(client, "/default/lasts", 50)
        with client.consumer(
            "/default/lasts", subscription="s", initial_position={"last": 7}
        ) as consumer:
            assert [m.offset for m in receive(consumer, 7)] == list(range(43, 50))
        assert [m.offset for m in client.reader("/default/lasts", start={"last": 100})] == [
            *range(50)
        ]
        with pytest.raises(danube_fast.InvalidArgument, match="last"):
            client.reader("/default/lasts", start={"last": -1})


# ---------------------------------------------------------------- purge


@pytest.mark.parametrize("durability", ["fsync", "memory"])
@pytest.mark.parametrize("kind", ["exclusive", "shared", "key_shared"])
def test_purge_is_for_everybody(server: Server, durability: str, kind: str) -> None:
    topic = f"/default/purged-{durability}-{kind}"
    with server.client() as client:
        client.producer(topic, durability=durability).close()
        client.consumer(topic, subscription="away", type=kind).close()
        consumer = client.consumer(topic, subscription="reads", type=kind)
        told: list[Any] = []
        consumer.on_gap = told.append
        publish(client, topic, 300, size=1000)
        held = receive(consumer, 50, ack=False)
        consumer.ack(held[0])
        consumer.flush_acks()
        reader = client.reader(topic, stop=None)
        answer = client.admin.purge_topic(topic)
        assert answer["purged"] == 300
        assert answer["first_offsets"] == {topic: 300}
        for sub in client.admin.list_subscriptions(topic):
            assert (sub["lag_messages"], sub["unacked"]) == (0, 0), sub
            assert sub["cursors"] == {topic: 300}
            assert sub["gaps"] == 1
            assert sub["last_gap"]["end"] == 300
            assert "purged" in sub["last_gap"]["reason"]
        assert list(client.reader(topic)) == []
        publish(client, topic, 5)
        new = [m for m in _until_offset(consumer, 304) if m.offset >= 300]
        assert [m.offset for m in new] == [300, 301, 302, 303, 304]
        wait_until("the gap is told", lambda: told, WAIT_SECONDS)
        assert (told[0].first, told[0].last) == (1, 299)
        assert list(consumer.gaps) == told
        consumer.ack(held)  # what is gone may be acked, without a word
        consumer.flush_acks()
        read: list[int] = []
        while not read or read[-1] < 304:
            batch = reader.receive_batch(timeout=WAIT_SECONDS)
            assert batch, read[-5:]
            read += [m.offset for m in batch]
        missing = set(range(300)) - set(read)
        covered = {n for gap in reader.gaps for n in range(gap.first, gap.last + 1)}
        assert missing <= covered, "a reader is told what it does not get"
        with client.consumer(topic, subscription="away", type=kind) as away:
            assert [m.offset for m in receive(away, 5)] == [300, 301, 302, 303, 304]
        for thing in (reader, consumer):
            thing.close()


def _until_offset(consumer: Any, last: int) -> list[danube_fast.Message]:
    got: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while not got or got[-1].offset < last:
        got += list(consumer.receive_batch(timeout=1))
        assert time.monotonic() < deadline, f"{len(got)} messages and not {last}"
    return got


@pytest.mark.parametrize("partitions", [0, 3])
def test_what_was_purged_stays_away_after_a_kill(tmp_path: Path, partitions: int) -> None:
    topic = "/default/gone"
    server = Server(tmp_path / "data", workers=2)
    with server:
        with server.client() as client:
            publish(client, topic, 3000, size=1000, partitions=partitions)
            client.consumer(topic, subscription="s", initial_position="earliest").close()
            assert client.admin.purge_topic(topic)["purged"] == 3000
            publish(client, topic, 20)
        for how in ("all", "worker"):
            if how == "all":
                server.kill("all")
                server.start()
            else:
                server.kill("worker")
            with server.client() as client:
                assert len(list(client.reader(topic))) == 20
                assert len(client.admin.peek(topic, 100)) == 20
                (sub,) = client.admin.list_subscriptions(topic)
                assert sub["lag_messages"] == 20
                with client.consumer(
                    topic, subscription=f"new-{how}", initial_position="earliest"
                ) as new:
                    assert len(receive(new, 20)) == 20
                    assert new.receive(timeout=0.2) is None
                with client.consumer(topic, subscription="s") as consumer:
                    consumer.seek("earliest")
                    assert len(receive(consumer, 20, ack=False)) == 20
                client.admin.delete_subscription(topic, f"new-{how}")


def test_acks_behind_a_purge_hold_after_a_kill(tmp_path: Path) -> None:
    topic = "/default/acked"
    server = Server(tmp_path / "data", workers=1)
    with server:
        with server.client() as client:
            publish(client, topic, 100)
            with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
                client.admin.purge_topic(topic)
                publish(client, topic, 50)
                got = [m for m in _until_offset(consumer, 149) if m.offset >= 100]
                consumer.ack(got[:30])
                consumer.flush_acks()
        server.kill("all")
        server.start()
        for _ in range(2):
            with server.client() as client:
                (sub,) = client.admin.list_subscriptions(topic)
                assert (sub["lag_messages"], sub["cursors"]) == (20, {topic: 130})
            server.kill("all")
            server.start()


def test_the_space_of_a_purge_comes_back(tmp_path: Path) -> None:
    with Server(tmp_path / "data", workers=1) as server, server.client() as client:
        publish(client, "/default/kept", 10, size=100)
        publish(client, "/default/big", 12_000, size=1000)
        client.consumer("/default/big", subscription="s", initial_position="earliest").close()

        def log_bytes() -> int:
            return int(server.status()["counters"]["log_bytes"])

        # counters are told once in a while, so the last of it may show later
        wait_until("it takes space", lambda: log_bytes() > 12_000 * 1000, WAIT_SECONDS)
        client.admin.purge_topic("/default/big")
        # what another topic has in the oldest segment stays, and keeps that segment
        client.admin.purge_topic("/default/kept")
        publish(client, "/default/kept", 10, size=100)
        # the newest segment, the one before it if what `kept` has now begins there, and the spares
        left = (2 + server.changes["spare_segments"]) * server.changes["segment_bytes"]
        wait_until("space comes back", lambda: log_bytes() <= left, WAIT_SECONDS)
        assert len(list(client.reader("/default/kept"))) == 10


# ---------------------------------------------------------------- skip


@pytest.mark.parametrize("kind", ["exclusive", "shared", "failover", "key_shared"])
def test_skip_counts_messages_as_acked(server: Server, kind: str) -> None:
    topic = f"/default/skipped-{kind}"
    with server.client() as client:
        admin = client.admin
        publish(client, topic, 200, size=500)
        with client.consumer(
            topic, subscription="s", type=kind, initial_position="earliest"
        ) as consumer:
            got = receive(consumer, 20, ack=False)
            consumer.ack([m for m in got if 5 <= m.offset < 10])
            consumer.flush_acks()
            answer = admin.skip_messages(topic, "s", 10)
            assert answer["skipped"] == 10, "those that were acked before do not count"
            assert answer["cursors"] == {topic: 15}
        with client.consumer(topic, subscription="s", type=kind) as consumer:
            offsets = sorted(m.offset for m in receive(consumer, 185, ack=False))
            assert offsets == list(range(15, 200))
            assert admin.skip_messages(topic, "s")["skipped"] == 185
            assert admin.describe_subscription(topic, "s")["lag_messages"] == 0
            assert admin.skip_messages(topic, "s")["skipped"] == 0
            publish(client, topic, 3)
            assert [m.offset for m in _until_offset(consumer, 202)][-3:] == [200, 201, 202]
        with pytest.raises(danube_fast.NotFound, match="no subscription"):
            admin.skip_messages(topic, "nobody")
        with pytest.raises(danube_fast.InvalidArgument, match="1 or more"):
            admin.skip_messages(topic, "s", 0)


def test_skip_leads_past_a_blocked_message(server: Server) -> None:
    topic = "/default/poisoned"
    with server.client() as client:
        publish(client, topic, 3)
        with client.consumer(
            topic, subscription="s", initial_position="earliest",
            failure_policy={"max_redelivery_count": 0, "poison_policy": "block"},
        ) as consumer:  # fmt: skip
            first, second, third = receive(consumer, 3, ack=False)
            consumer.nack(first, delay=0)
            consumer.ack([second, third])
            consumer.flush_acks()

            def described() -> dict[str, Any]:
                return client.admin.describe_subscription(topic, "s")

            wait_until("it is blocked", lambda: described()["blocked"] == 1, WAIT_SECONDS)
            assert described()["state"].startswith("blocked")
            assert client.admin.skip_messages(topic, "s", 1)["skipped"] == 1
            assert (described()["lag_messages"], described()["state"]) == (0, "caught up")


def test_skips_are_per_partition_and_hold_after_a_kill(tmp_path: Path) -> None:
    topic = "/default/parts"
    server = Server(tmp_path / "data", workers=2)
    with server:
        with server.client() as client:
            publish(client, topic, 300, partitions=3)
            client.consumer(topic, subscription="s", initial_position="earliest").close()
            answer = client.admin.skip_messages(topic, "s", 20)
            assert answer["skipped"] == 60
            assert set(answer["skipped_by_partition"].values()) == {20}
        server.kill("all")
        server.start()
        with server.client() as client:
            (sub,) = client.admin.list_subscriptions(topic)
            assert sub["lag_messages"] == 240
            assert set(sub["cursors"].values()) == {20}


# ---------------------------------------------------------------- what describe tells


@pytest.mark.parametrize("durability", ["fsync", "memory"])
def test_lag_in_seconds_is_the_age_of_the_oldest_unacked(server: Server, durability: str) -> None:
    topic = f"/default/aged-{durability}"
    with server.client() as client, client.producer(topic, durability=durability) as producer:
        consumer = client.consumer(topic, subscription="s")

        def described() -> dict[str, Any]:
            return client.admin.describe_subscription(topic, "s")

        assert described()["lag_seconds"] == 0
        began = time.time()
        old = producer.publish(b"old")
        producer.send_many([bytes(1000)] * 300)
        producer.flush()
        ready = time.time()
        wait_until("a second goes by", lambda: time.time() > ready + 1.2, WAIT_SECONDS)
        low, lag, high = time.time() - ready, described()["lag_seconds"], time.time() - began
        assert low - 0.1 <= lag <= high + 0.1
        born = time.time()
        producer.publish(b"young")
        assert described()["lag_seconds"] >= lag
        messages = receive(consumer, 302, ack=False)
        consumer.ack([m for m in messages if m.offset != old.offset and m.payload != b"young"])
        consumer.flush_acks()
        assert described()["lag_seconds"] >= lag
        consumer.ack(messages[:1])
        consumer.flush_acks()
        assert described()["lag_seconds"] <= time.time() - born + 0.1
        (holder,) = described()["consumers"]
        assert (holder["unacked"], described()["unacked"]) == (1, 1)
        assert described()["state"].startswith("waiting")
        consumer.ack(messages)
        consumer.flush_acks()
        assert (described()["lag_seconds"], described()["state"]) == (0, "caught up")
        consumer.close()
        producer.publish(b"x")
        assert described()["state"] == "stalled: no consumer is connected"


def test_a_reader_that_starts_where_nothing_is_left_is_told(server: Server) -> None:
    topic = "/default/before"
    with server.client() as client:
        publish(client, topic, 30)
        client.admin.purge_topic(topic)
        publish(client, topic, 3)
        with client.reader(topic, start=10) as reader:
            assert [m.offset for m in reader] == [30, 31, 32]
            (gap,) = reader.gaps
            assert (gap.topic, gap.first, gap.last, gap.lost) == (topic, 10, 29, True)


def test_gaps_of_an_unclean_end_are_told(tmp_path: Path) -> None:
    topic = "/default/memory"
    server = Server(tmp_path / "data", workers=1)
    with server, server.client() as client:
        with client.producer(topic, durability="memory") as producer:
            consumer = client.consumer(topic, subscription="s", initial_position="earliest")
            producer.publish(b"before")
            last = receive(consumer, 1, ack=False)[0].offset
            server.kill("worker")
            after = producer.publish(b"after")
            assert after.offset > last
            (message,) = receive(consumer, 1)
            assert message.offset == after.offset
        covered = {gap.last + 1 for gap in consumer.gaps}
        assert after.offset in covered, list(consumer.gaps)
        assert client.admin.describe_subscription(topic, "s")["gaps"] >= 1
        consumer.close()


def test_async_faces(server: Server) -> None:
    async def run() -> None:
        async with await danube_fast.connect_async(server.url) as client:
            await client.publish("/default/as", b"1")
            consumer = await client.consumer("/default/as", subscription="s")
            told: list[Any] = []
            consumer.on_gap = told.append
            assert [m.payload for m in await client.admin.tail("/default/as", 3)] == [b"1"]
            await client.publish("/default/as", b"2")
            assert (await client.admin.skip_messages("/default/as", "s"))["skipped"] == 1
            await client.publish("/default/as", b"3")
            assert (await client.admin.purge_topic("/default/as"))["purged"] == 3
            with pytest.raises(danube_fast.NotFound, match="no worker 9"):
                await client.admin.move_topic("/default/as", worker=9)
            deadline = time.monotonic() + WAIT_SECONDS
            while not told:
                await consumer.receive(timeout=0.1)
                assert time.monotonic() < deadline, "the gap was not told"

    asyncio.run(run())


@pytest.mark.parametrize("durability", ["fsync", "memory"])
def test_what_was_purged_stays_away_after_a_move(tmp_path: Path, durability: str) -> None:
    topic = "/default/moved"
    with Server(tmp_path / "data", workers=2) as server, server.client() as client:
        publish(client, topic, 500, size=1000, durability=durability)
        client.consumer(topic, subscription="s", initial_position="earliest").close()
        client.admin.purge_topic(topic)
        publish(client, topic, 10)
        (place,) = client.admin.describe_topic(topic)["placement"]
        client.admin.move_topic(topic, worker=1 - place["worker"])
        assert [m.offset for m in client.reader(topic)] == list(range(500, 510))
        with client.consumer(topic, subscription="s") as consumer:
            assert [m.offset for m in receive(consumer, 10)] == list(range(500, 510))
            consumer.flush_acks()
        (sub,) = client.admin.list_subscriptions(topic)
        assert sub["lag_messages"] == 0
