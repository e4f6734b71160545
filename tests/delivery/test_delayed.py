"""Delayed delivery over a real broker: on time, across a kill, for every way to publish."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import danube_fast
from danube_fast.errors import InvalidArgument
from tests.crash.rig import Server

WAIT_SECONDS = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data", workers=2) as running:
        yield running


def test_messages_come_when_they_are_due_and_not_before(server: Server) -> None:
    topic = "/default/later"
    with (
        danube_fast.connect(server.url) as client,
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", type="shared") as consumer,
    ):
        start = time.time()
        producer.publish(b"second", deliver_after=3.0)
        producer.publish(b"now")
        first_ns = int(start * 1e9) + 1_500_000_000
        producer.send_many([b"first", b"also now"], deliver_at=[first_ns, None])
        producer.flush()
        came = []
        while len(came) < 4:
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None, f"only {came} came within {WAIT_SECONDS} s"
            came.append((message.payload, time.time() - start))
            consumer.ack(message)
        assert [payload for payload, _ in came] == [b"now", b"also now", b"first", b"second"]
        assert came[2][1] >= 1.5
        assert came[3][1] >= 3.0
        consumer.flush_acks()
        assert consumer.receive(timeout=0.3) is None


def test_a_kill_of_the_worker_delays_again_what_was_not_due(server: Server) -> None:
    topic = "/default/across"
    with (
        danube_fast.connect(server.url) as client,
        client.producer(topic) as producer,
        client.consumer(topic, subscription="s", type="shared") as consumer,
    ):
        due = time.time_ns() + 8_000_000_000
        producer.send_many(
            [b"%d" % i for i in range(100)],
            deliver_at=[due if i % 2 else None for i in range(100)],
        )
        producer.flush()
        early = set()
        while len(early) < 50:
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None
            early.add(int(message.payload))
            consumer.ack(message)
        consumer.flush_acks()
        owner = client.admin.describe_topic(topic)["placement"][0]["worker"]
        server.kill("worker", 1 + owner)
        late = set()
        while len(late) < 50:
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None, f"{len(late)} of 50 came within {WAIT_SECONDS} s"
            assert time.time_ns() >= due, f"{message.payload!r} came early"
            late.add(int(message.payload))
            consumer.ack(message)
        assert early == set(range(0, 100, 2))
        assert late == set(range(1, 100, 2))


def test_a_topic_that_keeps_nothing_cannot_delay(server: Server) -> None:
    with (
        danube_fast.connect(server.url) as client,
        client.producer("/default/ticks", dispatch="non_reliable") as producer,
        pytest.raises(InvalidArgument, match="reliable"),
    ):
        producer.publish(b"x", deliver_after=1.0)
