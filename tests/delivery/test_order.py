"""Order over a real broker: what was given back goes first, and delays turn round nothing but themselves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server

WAIT_SECONDS = 120.0
MIB = 1 << 20
PAYLOAD = b"x" * 4096
HELD = 4000
"""Of PAYLOAD: four times what a worker reads of its log in one turn."""
BATCH = 17
DELAYED_EACH = 50
DELAY_NS = 700_000_000
MOVES = 8
BEFORE_A_MOVE = 300
BACKLOG = 1500


def receive(consumer: Any, count: int) -> list[danube_fast.Message]:
    """So many messages."""
    got: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(got) < count:
        got += list(consumer.receive_batch(1000, timeout=1))
        assert time.monotonic() < deadline, f"{len(got)} of {count} came within {WAIT_SECONDS} s"
    return got


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["exclusive", "failover"])
def test_nothing_fresh_goes_before_what_a_gone_consumer_held(tmp_path: Path, kind: str) -> None:
    """Most of it lies in the log, what is fresh in memory."""
    topic, fresh = "/default/held", 50
    options: dict[str, Any] = {
        "subscription": "s", "type": kind, "permits_bytes": 256 * MIB, "permits_messages": 100_000,
    }  # fmt: skip
    with (
        Server(tmp_path / "data", workers=1, tail_bytes_max=MIB) as server,
        server.client() as client,
        client.producer(topic, durability="os") as producer,
    ):
        with client.consumer(topic, **options) as first:
            producer.send_many([PAYLOAD] * HELD)
            producer.flush(timeout=WAIT_SECONDS)
            assert [each.offset for each in receive(first, HELD)] == list(range(HELD))
        producer.send_many([b"fresh"] * fresh)
        producer.flush(timeout=WAIT_SECONDS)
        with client.consumer(topic, **options) as second:
            came = receive(second, HELD + fresh)
        assert [each.offset for each in came] == list(range(HELD + fresh))
        assert [each.redelivery_count for each in came] == [1] * HELD + [0] * fresh


class Receiving(threading.Thread):
    """Takes and acks; remembers the offsets, and what came before it was due."""

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self.consumer = consumer
        self.stopped = threading.Event()
        self.undelayed: list[int] = []
        self.delayed: list[int] = []
        self.early: list[int] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                batch = self.consumer.receive_batch(50, timeout=0.1)
                for message in batch:
                    if not message.payload:
                        self.undelayed.append(message.offset)
                        continue
                    self.delayed.append(message.offset)
                    if time.time_ns() < int(message.payload):
                        self.early.append(message.offset)
                self.consumer.ack(batch)
        except Exception as error:
            self.error = error


class Publishing(threading.Thread):
    """Sends batches, every 50th message for later, until it is told to stop; never more than BACKLOG ahead of
    who receives."""

    def __init__(self, client: Any, topic: str, name: str, taker: Receiving) -> None:
        super().__init__(name=name)
        self.client, self.topic, self.taker = client, topic, taker
        self.stopped = threading.Event()
        self.sent = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self.client.producer(self.topic, name=self.name, timeout=60) as producer:
                while not self.stopped.is_set():
                    numbers = range(self.sent, self.sent + BATCH)
                    due = time.time_ns() + DELAY_NS
                    producer.send_many(
                        [b"%d" % due if n % DELAYED_EACH == 0 else b"" for n in numbers],
                        deliver_at=[due if n % DELAYED_EACH == 0 else None for n in numbers],
                    )
                    self.sent += BATCH
                    while self.sent > len(self.taker.undelayed) + BACKLOG:
                        if self.stopped.wait(0.005):
                            break
                producer.flush(timeout=WAIT_SECONDS)
        except Exception as error:
            self.error = error


def wait_for(what: str, condition: Callable[[], bool], *threads: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        for thread in threads:
            assert thread.error is None, thread.error
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_SECONDS} s"
        time.sleep(0.01)


def disturb(server: Server, client: Any, topic: str, how: str, number: int) -> None:
    """The partition goes to the other worker, or its worker dies."""
    (place,) = client.admin.describe_topic(topic)["placement"]
    if how == "moves" or number % 2:
        client.admin.move_topic(topic, 1 - place["worker"])
    else:
        server.kill("worker", 1 + place["worker"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["moves", "kills"])
@pytest.mark.parametrize("kind", ["exclusive", "failover"])
def test_what_is_not_delayed_keeps_its_order_behind_moves_and_restarts(
    tmp_path: Path, kind: str, how: str
) -> None:
    """Two publishers, delayed messages in between, one consumer that stays."""
    topic = "/default/mixed"
    with (
        Server(tmp_path / "data", workers=2) as server,
        server.client() as client,
    ):
        client.admin.create_topic(topic)
        consumer = client.consumer(
            topic, subscription="s", type=kind, permits_messages=200, timeout=60
        )
        taker = Receiving(consumer)
        makers = [Publishing(client, topic, f"maker-{number}", taker) for number in range(2)]
        threads = [taker, *makers]
        for thread in threads:
            thread.start()
        try:
            for number in range(MOVES):
                before = len(taker.undelayed)
                wait_for(
                    f"{BEFORE_A_MOVE} more messages",
                    lambda before=before: len(taker.undelayed) > before + BEFORE_A_MOVE,  # type: ignore[misc]
                    *threads,
                )
                disturb(server, client, topic, how, number)
            for maker in makers:
                maker.stopped.set()
                maker.join(WAIT_SECONDS)
            sent = sum(maker.sent for maker in makers)
            wait_for(
                "all that was sent",
                lambda: len({*taker.undelayed, *taker.delayed}) >= sent,
                *threads,
            )
        finally:
            for thread in threads:
                thread.stopped.set()
            for thread in threads:
                thread.join(WAIT_SECONDS)
        first = list(dict.fromkeys(taker.undelayed))
        newest = itertools.accumulate(first, max)
        late = [at for at, top in zip(first, newest, strict=True) if at < top]
        assert not late, f"{len(late)} of {len(first)} came for the first time behind later ones"
        assert sorted({*first, *taker.delayed}) == list(range(sent))
        assert taker.early == []
