"""`topics move` on real processes: while everybody is at work, and what is left afterwards."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import FailedPrecondition, NotFound
from tests.crash.rig import Server
from tests.workers.broker import ROOT, wait_until

WAIT_SECONDS = 60.0
MOVES = 12
BATCH = 50
PAUSE_MS_MAX = 5 * 1000
"""Five times what is promised: the machine may be busy."""
KINDS = ("exclusive", "shared", "failover", "key_shared")
TOPICS: dict[str, dict[str, Any]] = {
    "/default/fsync": {"durability": "fsync"},
    "/default/os": {"durability": "os"},
    "/default/memory": {"durability": "memory"},
    "/default/quick": {"dispatch": "non_reliable"},
}
KEYS = [b"k%d" % number for number in range(8)]
_NUMBER = struct.Struct("<Q")


class Producing(threading.Thread):
    """Numbers its messages, in batches, until told to stop."""

    def __init__(self, client: Any, topic: str) -> None:
        super().__init__()
        self.client, self.topic = client, topic
        self.stopped = threading.Event()
        self.sent = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self.client.producer(self.topic, name="numbers", timeout=60) as producer:
                while not self.stopped.is_set():
                    numbers = range(self.sent, self.sent + BATCH)
                    self.sent += BATCH
                    producer.send_many(
                        [_NUMBER.pack(number).ljust(100, b".") for number in numbers],
                        keys=[KEYS[number % len(KEYS)] for number in numbers],
                    )
                    self.stopped.wait(0.002)
                producer.flush(timeout=60)
        except Exception as error:
            self.error = error


class Consuming(threading.Thread):
    """Takes and acks; remembers what came, by the subscription that it came under."""

    def __init__(self, client: Any, topic: str, kind: str) -> None:
        super().__init__()
        self.consumer = client.consumer(
            topic, subscription=kind, type=kind, initial_position="earliest"
        )
        self.stopped = threading.Event()
        self.seen: list[tuple[int, int, int, int]] = []
        """(generation, offset, number, redeliveries), in the order in which they came."""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                batch = list(self.consumer.receive_batch(2000, timeout=0.1))
                for message in batch:
                    (number,) = _NUMBER.unpack_from(message.payload)
                    source: Any = message._source
                    self.seen.append(
                        (source.generation, message.offset, number, message.redelivery_count)
                    )
                self.consumer.ack(batch)
        except Exception as error:
            self.error = error


def move_on(client: Any, topic: str, workers: int) -> dict[str, Any]:
    """To the next worker; what the broker says of it."""
    (place,) = client.admin.describe_topic(topic)["placement"]
    target = (place["worker"] + 1) % workers
    (moved,) = client.admin.move_topic(topic, target)["moved"]
    (place,) = client.admin.describe_topic(topic)["placement"]
    assert (place["worker"], place["moving_to"]) == (target, None)
    return dict(moved)


def check(topic: str, sent: int, takers: list[Consuming]) -> None:
    """Everything came, each offset with one number, in order in each subscription of one consumer."""
    for kind in KINDS:
        mine = [taker for taker in takers if taker.consumer.subscription == kind]
        numbers: dict[int, int] = {}
        for taker in mine:
            last: dict[tuple[int, int], int] = {}
            for generation, offset, number, redeliveries in taker.seen:
                assert numbers.setdefault(offset, number) == number, f"{topic}@{offset} twice"
                lane = generation, number % len(KEYS) if kind == "key_shared" else 0
                if kind in ("exclusive", "failover", "key_shared") and not redeliveries:
                    assert last.get(lane, -1) < offset, f"{topic} {kind}: {offset} out of order"
                    last[lane] = offset
        assert sorted(numbers) == list(range(sent)), f"{topic} {kind}: {len(numbers)} of {sent}"
        assert [numbers[offset] for offset in range(sent)] == list(range(sent)), "not in order"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_moves_under_load_lose_nothing_and_turn_nothing_round(
    tmp_path: Path, transport: str
) -> None:
    with (
        Server(tmp_path / "data", workers=2, retention_seconds_min=1) as server,
        server.client() as admin,
        server.client(transport=transport) as client,
    ):
        for topic, options in TOPICS.items():
            admin.admin.create_topic(topic, **options)
        reliable = [topic for topic in TOPICS if topic != "/default/quick"]
        takers = {
            topic: [
                Consuming(client, topic, kind)
                for kind in (*KINDS, "shared", "failover", "key_shared")
            ]
            for topic in TOPICS
        }
        producers = {topic: Producing(client, topic) for topic in TOPICS}
        everybody = [*producers.values(), *(taker for some in takers.values() for taker in some)]
        for thread in everybody:
            thread.start()
        try:
            for number in range(MOVES):
                topic = list(TOPICS)[number % len(TOPICS)]
                before = producers[topic].sent
                wait_until("publishing", lambda t=topic, b=before: producers[t].sent > b + 200)
                moved = move_on(admin, topic, 2)
                assert moved["paused_ms"] <= PAUSE_MS_MAX, moved
            for producer in producers.values():
                producer.stopped.set()
                producer.join(WAIT_SECONDS)
                assert producer.error is None, producer.error
            for topic in reliable:
                for kind in KINDS:
                    wait_until(
                        f"{topic} {kind} caught up",
                        lambda t=topic, k=kind: (
                            not admin.admin.describe_subscription(t, k)["lag_messages"]
                        ),
                    )
            time.sleep(0.2)
        finally:
            for thread in everybody:
                thread.stopped.set()
            for thread in everybody:
                thread.join(WAIT_SECONDS)
        for topic in reliable:
            assert [taker.error for taker in takers[topic] if taker.error] == []
            stats = admin.admin.topic_stats(topic)["partition_stats"][0]
            assert stats["end_offset"] == producers[topic].sent, "a duplicate, or a loss"
            check(topic, producers[topic].sent, takers[topic])
        quick = producers["/default/quick"].sent
        for taker in takers["/default/quick"]:
            offsets = [offset for _, offset, _, _ in taker.seen]
            assert len(set(offsets)) == len(offsets), "non_reliable messages never come twice"
        alone = takers["/default/quick"][0]
        assert len(alone.seen) > 0.8 * quick


def fill(client: Any, topic: str, count: int, **options: Any) -> None:
    with client.producer(topic, name="filler", **options) as producer:
        producer.send_many([_NUMBER.pack(n).ljust(1000, b"x") for n in range(count)])
        producer.flush(timeout=WAIT_SECONDS)


def numbers(client: Any, topic: str) -> list[int]:
    return [_NUMBER.unpack_from(message.payload)[0] for message in client.reader(topic)]


def test_moved_topics_outlive_restarts_with_any_number_of_workers(tmp_path: Path) -> None:
    topics = [f"/default/t{number}" for number in range(8)]
    count = 300
    server = Server(tmp_path / "data", workers=4)
    with server:
        with server.client() as client:
            for topic in topics:
                fill(client, topic, count, durability="fsync")
                with client.consumer(topic, subscription="s", initial_position="earliest") as taker:
                    batch = taker.receive_batch(100, timeout=WAIT_SECONDS)
                    taker.ack(batch)
                    taker.flush_acks()
                    acked = len(batch)
                assert acked
                move_on(client, topic, 4)
        for round_number, workers in enumerate((2, 4, 1, 4)):
            server.stop()
            server.workers = workers
            server.start()
            with server.client() as client:
                for topic in topics:
                    size = count + round_number
                    assert numbers(client, topic) == list(range(size))
                    with client.producer(topic, name="filler") as producer:
                        message_id = producer.publish(_NUMBER.pack(size).ljust(1000, b"x"))
                    assert message_id.offset == size, "an offset was skipped or used twice"
                    lag = client.admin.describe_subscription(topic, "s")["lag_messages"]
                    assert 0 < lag < size + 1
                    if workers > 1:
                        move_on(client, topic, workers)


def kept_bytes(server: Server) -> list[int]:
    """What is between the ends of each log."""
    logs = server.status()["logs"]
    return [log.get("written_position", 0) - log.get("oldest_position", 0) for log in logs]


def log_bytes(server: Server) -> int:
    return int(server.status()["counters"]["log_bytes"])


def test_a_moved_topic_that_is_deleted_gives_its_space_back_in_both_logs(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data", workers=2, retention_seconds_min=0, spare_segments=1) as server,
        server.client() as client,
    ):
        topic = "/default/large"
        client.admin.create_topic(topic)
        client.consumer(topic, subscription="pin", initial_position="earliest").close()
        fill(client, topic, 20_000)
        (place,) = client.admin.describe_topic(topic)["placement"]
        move_on(client, topic, 2)
        assert numbers(client, topic) == list(range(20_000))
        wait_until(
            "the old log is trimmed", lambda: kept_bytes(server)[place["log_id"]] < 4 << 20, 90
        )
        assert numbers(client, topic) == list(range(20_000))
        client.admin.delete_topic(topic)
        wait_until("both logs are small", lambda: sum(kept_bytes(server)) < 8 << 20, 90)
        wait_until("their files are gone", lambda: log_bytes(server) < 16 << 20, 90)


def test_the_command_says_what_it_did_and_why_not(tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "danube_fast.cli.main", *words, "--url", server.url]
        return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=60)

    with Server(tmp_path / "data", workers=2) as server, server.client() as client:
        topic = "/default/parts"
        client.admin.create_topic(topic, partitions=4)
        outcome = command("topics", "move", topic, "--worker", "1", "--output", "json")
        assert outcome.returncode == 0, outcome.stderr
        moved = json.loads(outcome.stdout)
        assert {entry["to_worker"] for entry in moved["moved"]} == {1}
        assert len(moved["moved"]) == 2, "two of four were there already"
        placement = client.admin.describe_topic(topic)["placement"]
        assert {place["worker"] for place in placement} == {1}
        for words, code, text in (
            (("--worker", "1"), 4, "on worker 1 already"),
            (("--worker", "7"), 3, "there is no worker 7"),
            (("--worker", "0", "--partition", "9"), 3, "has no partition 9"),
        ):
            outcome = command("topics", "move", topic, *words)
            assert (outcome.returncode, text in outcome.stderr) == (code, True), outcome
        with pytest.raises(FailedPrecondition, match="already"):
            client.admin.move_topic(topic, 1, partition=0)
        with pytest.raises(NotFound):
            client.admin.move_topic("/default/none", 1)


@pytest.mark.timeout(600)
def test_a_busy_worker_sheds_partitions_while_everybody_goes_on(tmp_path: Path) -> None:
    """All the topics in use are on one worker; within a bound they are on both, and nothing is lost."""
    settings: dict[str, Any] = {
        "rebalance": "aggressive", "rebalance_seconds": 2, "rebalance_moves_per_hour": 20,
    }  # fmt: skip
    with (
        Server(tmp_path / "data", workers=2, **settings) as server,
        server.client() as client,
        danube_fast.connect(server.url, timeout=60) as other,
    ):
        topics = [f"/default/hot{number}" for number in range(4)]
        for topic in topics:
            client.admin.create_topic(topic, durability="os")
        for topic in topics:
            (place,) = client.admin.describe_topic(topic)["placement"]
            if place["worker"] != 0:
                client.admin.move_topic(topic, 0)
        takers = [Consuming(other, topic, "exclusive") for topic in topics]
        producers = [Producing(client, topic) for topic in topics]
        for producer in producers:
            producer.stopped.wait = lambda seconds: False  # type: ignore[method-assign]
        for thread in (*takers, *producers):
            thread.start()

        def places() -> list[int]:
            found = [client.admin.describe_topic(topic)["placement"][0] for topic in topics]
            return sorted(place["worker"] for place in found)

        try:
            wait_until("both workers have some of the topics", lambda: 0 < sum(places()) < 4, 90)
        finally:
            for producer in producers:
                producer.stopped.set()
                producer.join(WAIT_SECONDS)
        status = client.admin.cluster_status()["rebalance"]
        assert status["moves"] >= 1
        assert status["strategy"] == "aggressive"
        for topic in topics:
            wait_until(
                f"{topic} caught up",
                lambda t=topic: (
                    not client.admin.describe_subscription(t, "exclusive")["lag_messages"]
                ),
            )
        for taker in takers:
            taker.stopped.set()
            taker.join(WAIT_SECONDS)
        for producer, taker in zip(producers, takers, strict=True):
            assert (producer.error, taker.error) == (None, None)
            found = {offset: number for _, offset, number, _ in taker.seen}
            assert found == {number: number for number in range(producer.sent)}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_acks_just_before_a_move_count(tmp_path: Path, kind: str) -> None:
    """Whatever was acked when `move_topic` is called does not come again."""
    topic = f"/default/acked-{kind}"
    with Server(tmp_path, workers=2) as server, danube_fast.connect(server.url) as client:
        client.admin.create_topic(topic)
        with client.producer(topic) as producer:
            producer.send_many([b"%d" % number for number in range(100)])
        options: Any = {"subscription": "s", "type": kind, "initial_position": "earliest"}
        with client.consumer(topic, **options) as consumer:
            acked: set[int] = set()
            for _ in range(6):
                for _ in range(10):
                    message = consumer.receive(timeout=WAIT_SECONDS)
                    assert message is not None, f"nothing came within {WAIT_SECONDS} s"
                    assert message.offset not in acked, "it was acked before the move"
                    consumer.ack(message)
                    acked.add(message.offset)
                move_on(client, topic, 2)
            consumer.flush_acks()
        described = client.admin.describe_subscription(topic, "s")
        assert described["lag_messages"] == 100 - len(acked)
