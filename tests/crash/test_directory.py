"""One data directory under another number of workers, and without its indexes."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.crash.history import History
from tests.crash.payloads import ident_of, partition_of, payload_of
from tests.crash.resender import Resender
from tests.crash.rig import Server, rounds
from tests.workers.broker import wait_until

SEED = int(os.environ.get("DANUBE_CRASH_SEED", "4"))
CUT_RECOVERIES = rounds(2)
LONG = rounds(0) > 0
PER_STEP = 2000
TOPICS: dict[str, dict[str, Any]] = {
    "/default/f8": {"dispatch": "reliable", "durability": "fsync", "partitions": 8},
    "/default/o1": {"dispatch": "reliable", "durability": "os"},
}
SINCE_THE_START = {
    "messages_in",
    "bytes_in",
    "redelivered",
    "waiting_redelivery",
    "gaps",
    "last_gap",
    "lag_seconds",
}
"""Figures that begin anew with each process."""
Place = tuple[int, int]


class Journey:
    """What was published, acked and resent, from one start of the broker to the next."""

    def __init__(self, server: Server, stack: ExitStack, about: str) -> None:
        self.server = server
        self.history = History(about)
        self.sent = 0
        self.acked: dict[str, set[Place]] = {topic: set() for topic in TOPICS}
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.term)
        self.resenders = [
            Resender(context, server.url, self.history, topic=f"/default/r{durability}",
                     name=f"resend-{durability}", index=index, durability=durability)
            for index, durability in ((10, "fsync"), (11, "os"))
        ]  # fmt: skip
        for resender in self.resenders:
            stack.callback(resender.close)

    def publish(self, client: Any) -> None:
        """A step's messages, by producers of the same names every time."""
        first, self.sent = self.sent, self.sent + PER_STEP
        for producer_index, (topic, options) in enumerate(TOPICS.items(), 1):
            with client.producer(topic, name=f"p{producer_index}", **options) as producer:
                told: list[tuple[int, Any]] = []
                for number in range(first, self.sent):
                    producer.send(
                        payload_of(producer_index, number),
                        key=f"k{number % 64}",
                        on_delivery=lambda place, _, n=number, told=told: told.append((n, place)),
                    )
                producer.flush(timeout=60)
            assert len(told) == PER_STEP
            for number, place in told:
                self.history.note_ack(
                    topic, partition_of(place.topic), place.offset, producer_index << 48 | number,
                    f"the ack of p{producer_index}",
                )  # fmt: skip

    def resend(self) -> None:
        """The producers in the protocol's own words: duplicates keep their offsets; then some more."""
        for resender in self.resenders:
            resender.resend()
            resender.publish_batches(70)

    def consume(self, client: Any, count: int) -> None:
        """Receive what is left of a subscription, ack all but every seventh of the first `count`."""
        for topic in TOPICS:
            history = self.history
            history.settle(topic, client.reader(topic))
            left = history.content[topic].keys() - self.acked[topic]
            with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
                came: set[Place] = set()
                while len(came) < len(left):
                    batch = list(consumer.receive_batch(timeout=60))
                    if not batch:
                        missing = sorted(left - came)[:5]
                        raise history.fail(f"{topic}: {missing} are unacked and did not come")
                    for message in batch:
                        place = partition_of(message.topic), message.offset
                        history.note(topic, *place, ident_of(message.payload), "the consumer")
                        if place in self.acked[topic]:
                            raise history.fail(f"{topic}: {place} came again although acked")
                        came.add(place)
                    mine = [m for m in batch if m.offset % 7 and len(came) <= count]
                    consumer.ack(mine)
                    self.acked[topic] |= {(partition_of(m.topic), m.offset) for m in mine}
                consumer.flush_acks()
                assert consumer.receive(timeout=0.01) is None

    def step(self, count: int) -> None:
        """Read all, resend, publish, consume."""
        with self.server.client() as client:
            if self.sent:
                for topic in TOPICS:
                    self.history.settle(topic, client.reader(topic))
            self.resend()
            self.publish(client)
            self.consume(client, count)
            for index, topic in enumerate(TOPICS, 1):
                self.history.complete(topic, index, self.sent)
            for resender in self.resenders:
                self.history.settle(resender.topic, client.reader(resender.topic))
                self.history.complete(resender.topic, resender.index, resender.next_sequence)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_four_workers_two_workers_four_workers(tmp_path: Path, stack: ExitStack) -> None:
    """Everything readable and publishable at every step, cursors and dedup kept; after an orderly
    stop and after kill -9."""
    server = Server(tmp_path / "data", workers=4)
    journey = Journey(server, stack, "4 workers")
    with server:
        journey.step(1500)
        for workers, end in ((2, "stop"), (4, "kill")):
            if end == "stop":
                server.stop()
            else:
                server.kill("all")
            server.workers = workers
            journey.history.about = f"{workers} workers now, after a {end}"
            server.start()
            logs = server.status()["logs"]
            assert len(logs) == 4
            assert {log["worker"] for log in logs} == set(range(workers))
            journey.step(1500)


def lasting(value: Any) -> Any:
    """An answer of the broker without the figures that begin anew."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if k not in SINCE_THE_START}
    return [lasting(entry) for entry in value] if isinstance(value, list) else value


def state_of(server: Server) -> dict[str, Any]:
    """What users see of all topics."""
    with server.client() as client:
        state: dict[str, Any] = {}
        for entry in client.admin.list_topics():
            topic = entry["topic"]
            state[topic] = {
                "about": client.admin.describe_topic(topic),
                "stats": lasting(client.admin.topic_stats(topic)),
                "subscriptions": lasting(client.admin.list_subscriptions(topic)),
                "messages": sorted(
                    (m.topic, m.offset, m.payload, m.key, m.sequence, m.publish_time)
                    for m in client.reader(topic)
                ),
            }
            if entry["partitions"] == 1:
                middle = len(state[topic]["messages"]) // 2
                rest = client.reader(topic, start=middle)
                state[topic]["from the middle"] = [(m.topic, m.offset) for m in rest]
                assert len(state[topic]["from the middle"]) > PER_STEP // 4
        return state


def test_the_index_is_only_a_cache(tmp_path: Path, stack: ExitStack) -> None:
    """Without it only the start takes longer. (An index of yesterday put back is a longer variant.)"""
    server = Server(tmp_path / "data")
    journey = Journey(server, stack, "before the index is touched")
    with server:
        journey.step(1500)
        if LONG:
            server.stop()
            for index in indexes_of(server):
                shutil.copytree(index, index.with_name("index-of-yesterday"))
            server.start()
            journey.step(3000)
        before = state_of(server)
        for end, what in (("kill", "deleted"), ("stop", "of yesterday"))[: 2 if LONG else 1]:
            journey.history.about = f"index {what}, after a {end}"
            if end == "stop":
                server.stop()
            else:
                server.kill("all")
            for index in indexes_of(server):
                shutil.rmtree(index)
                if what == "of yesterday":
                    index.with_name("index-of-yesterday").rename(index)
            server.start()
            after = state_of(server)
            for topic, state in before.items():
                for name, value in state.items():
                    assert after[topic][name] == value, f"{topic}: {name} differ, index {what}"
        assert len(indexes_of(server)) == 2
        journey.step(4500)


def indexes_of(server: Server) -> list[Path]:
    """The index folder of every log, none of them empty."""
    found = sorted((server.data_dir / "logs").glob("*/index"))
    assert len(found) == server.workers
    assert all(any(index.iterdir()) for index in found)
    return found


def test_killed_again_and_again_while_it_recovers(tmp_path: Path, stack: ExitStack) -> None:
    """A recovery that is cut off anywhere leaves all for the next one."""
    draw = random.Random(SEED)
    server = Server(tmp_path / "data")
    journey = Journey(server, stack, f"seed {SEED}")
    with server:
        journey.step(1500)
        server.kill("all")
        cut, reach = 0, 1.0
        for _ in range(4 * CUT_RECOVERIES):
            seconds = server.start_seconds * reach * draw.uniform(0.5, 1.1)
            if server.start_and_kill(seconds):
                reach *= 0.7  # the start that was measured was a slow one
            else:
                cut += 1
            if cut == CUT_RECOVERIES:
                break
        assert cut, "no recovery was cut off"
        server.start()
        journey.step(3000)
        for _ in range(CUT_RECOVERIES):  # a worker, and its replacement while that starts
            pid = server.pid_of(1)
            server.kill("worker", 1)
            wait_until("a replacement", lambda pid=pid: server.pid_of(1) not in (0, pid))
            time.sleep(server.start_seconds * draw.uniform(0, 0.5))
        journey.step(4500)
