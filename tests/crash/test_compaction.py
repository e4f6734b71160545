"""kill -9 while passes of compaction, and messages that are moved out of the way, are under way.

    load: a compacted topic whose keys are published again and again, deleted now and then; a plain one
          of which a few messages are never acked, in a log that is at its limit
    round: everything is killed, or one worker, at a drawn moment
    end:   of every key the newest value is there, what was deleted is not; nothing unacked is lost

DANUBE_CRASH_ROUNDS=n makes it n rounds, DANUBE_CRASH_SEED another order and other moments.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash.rig import Server, rounds
from tests.workers.broker import wait_until

ROUNDS = rounds(6)
SEED = int(os.environ.get("DANUBE_CRASH_SEED", "1"))
COMPACTED, PLAIN = "/default/state", "/default/events"
KEYS = 200
ALIVE_SECONDS_MAX = 1.5
CLEAN_SECONDS = 60.0


class Publisher(threading.Thread):
    """Sets keys of the compacted topic to values that rise; remembers what was acked."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        super().__init__()
        self.server, self.draw = server, draw
        self.acked: dict[str, int] = {}
        """Key -> number of the newest value that was acked; negative: it was deleted then."""
        self.sent: dict[str, int] = {}
        self.number = 0
        self.stopped = threading.Event()
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            with (
                self.server.client() as client,
                client.producer(COMPACTED, durability="os", name="p") as producer,
            ):
                self._publish(producer)
        except BaseException as fault:
            self.fault = fault

    def _publish(self, producer: Any) -> None:
        while not self.stopped.is_set():
            batch: list[tuple[str, int]] = []
            for _ in range(50):
                self.number += 1
                key = f"k{self.draw.randrange(KEYS)}"
                batch.append((key, self.number if self.draw.random() < 0.9 else -self.number))
            self.sent.update(batch)
            payloads = [None if value < 0 else b"%0200d" % value for _, value in batch]
            producer.send_many(payloads, keys=[key for key, _ in batch])
            producer.flush(timeout=60)
            self.acked.update(batch)
            self.stopped.wait(0.01)  # as fast as passes are made on a busy machine


def fill(server: Server, count: int, kept: list[bytes], start: int) -> int:
    """Publish to the plain topic and ack all but one in 300; the next number."""
    with (
        server.client() as client,
        client.producer(PLAIN, durability="os") as producer,
        client.consumer(PLAIN, subscription="s", type="shared") as consumer,
    ):
        sent = {b"%06d" % number + b"x" * 1000 for number in range(start, start + count)}
        producer.send_many(sorted(sent))
        producer.flush(timeout=60)
        seen = 0
        deadline = time.monotonic() + CLEAN_SECONDS
        while seen < count:
            assert time.monotonic() < deadline, f"{seen} of {count} messages arrived"
            for message in consumer.receive_batch(timeout=0.5):
                if message.payload in sent:
                    seen += 1
                    number = int(message.payload[:6])
                    if number % 300 == 7:
                        kept.append(message.payload)
                    else:
                        consumer.ack(message)
    return start + count


def newest_values(server: Server) -> tuple[dict[str, int | None], int]:
    """What a reader of the whole compacted topic has in the end, and from how many messages."""
    values: dict[str, int | None] = {}
    count = 0
    with server.client() as client, client.reader(COMPACTED) as reader:
        for message in reader:
            values[message.key.decode()] = int(message.payload) if message.payload else None
            count += 1
    return values, count


@pytest.mark.timeout(600)
def test_compaction_and_a_pinned_log_survive_kills(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    server = Server(
        tmp_path / "data", workers=1, segment_bytes=1 << 18, wal_bytes_max=4 << 20,
        tail_bytes_max=0, compaction_tombstone_seconds=0, retention_seconds_min=1,
    )  # fmt: skip
    kept: list[bytes] = []
    with server:
        with server.client() as client:
            client.admin.create_topic(COMPACTED, durability="os")
            client.admin.set_topic_policy(COMPACTED, {"compaction": True})
            client.admin.create_topic(PLAIN, durability="os")
        publisher = Publisher(server, draw)
        publisher.start()
        number = 0
        try:
            for _ in range(ROUNDS):
                for _ in range(4):
                    number = fill(server, 150, kept, number)
                time.sleep(draw.random() * ALIVE_SECONDS_MAX)  # the moment of the kill
                if draw.random() < 0.5:
                    server.kill("worker")
                else:
                    server.kill("all")
                    server.start()
        finally:
            publisher.stopped.set()
            publisher.join(120)
        assert publisher.fault is None and not publisher.is_alive()
        wait_until(
            "a pass", lambda: newest_values(server)[1] < publisher.number // 2, CLEAN_SECONDS
        )
        values, _ = newest_values(server)
        for key, value in publisher.acked.items():
            sent = publisher.sent[key]
            wanted = {None if each < 0 else each for each in (value, sent)}
            assert values.get(key) in wanted, key
        left: set[bytes] = set()
        with (
            server.client() as client,
            client.consumer(PLAIN, subscription="s", type="shared") as consumer,
        ):

            def all_there() -> bool:
                left.update(message.payload for message in consumer.receive_batch(timeout=0.2))
                return left >= set(kept)

            wait_until("what was not acked", all_there, CLEAN_SECONDS)
        wait_until("space given back", lambda: list(server.data_dir.rglob("*.trim")))
