"""Key compaction and the pinned log: what is written again at the tail, and what can go then."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker.layout import ProducerWord
from tests.workers.shard_rig import RawClient, Rig
from tests.workers.test_policies import Shifted, later, stats, subscription

KEYS = 40
SEGMENT_BYTES = 256 * 1024


class Topic:
    """A compacted topic, what was published to it, and what must be left of it."""

    def __init__(self, rig: Rig, partition_id: int = 1, **policy: Any) -> None:
        self.rig = rig
        self.partition_id = partition_id
        self.draw = random.Random(partition_id)
        self.sequence = 0
        self.published: dict[int, tuple[bytes | None, bytes | None]] = {}
        rig.assign(partition_id, durability="os", policy={"compaction": True, **policy})
        self.connect(rig)

    def connect(self, rig: Rig) -> None:
        self.rig = rig
        self.client = rig.client()
        self.opened = self.client.open_producer(self.partition_id)

    def publish(
        self, keys: list[bytes | None], payloads: list[bytes | None], **columns: Any
    ) -> None:
        frame = self.client.frame(self.opened, self.sequence, payloads, keys=keys, **columns)
        assert self.client.publish((self.partition_id, frame)) == [0, self.sequence]
        for key, payload in zip(keys, payloads, strict=True):
            self.published[self.sequence] = (key, payload)
            self.sequence += 1

    def publish_some(self, frames: int, *, count: int = 50, **columns: Any) -> None:
        """Frames of some keys, about 5 KiB each."""
        for _ in range(frames):
            keys: list[bytes | None] = [b"k%d" % self.draw.randrange(KEYS) for _ in range(count)]
            self.publish(keys, [b"%100d" % self.draw.randrange(10**9) for _ in keys], **columns)

    @property
    def left(self) -> dict[int, tuple[bytes | None, bytes | None]]:
        """By offset: the newest message of every key, and what has no key."""
        newest = {key: offset for offset, (key, _) in self.published.items()}
        return {
            offset: message
            for offset, message in self.published.items()
            if message[0] is None or newest[message[0]] == offset
        }

    @property
    def clean_until(self) -> int:
        return int(self.rig.worker.catalog.by_id[self.partition_id].compacted.until)

    def compact(self) -> None:
        """Wait for a pass over all but the newest segment."""
        before = self.clean_until
        rewrites = self.rig.worker.retention.rewrites
        self.rig.turn(lambda: self.clean_until > before, "a pass")
        self.rig.turn(lambda: not rewrites.is_busy, "the end of the pass")

    def read(self, client: RawClient | None = None, name: str = "r") -> dict[int, Any]:
        """Everything that a new subscription gets, by offset."""
        client = client or self.client
        consumer_id = self.draw.randrange(1000, 1 << 30)
        client.subscribe(self.partition_id, f"{name}{consumer_id}", consumer_id=consumer_id)
        client.send(21, 1, 1 << 30, 1 << 30)
        got: dict[int, Any] = {}
        last = self.sequence - 1

        def all_there() -> bool:
            client.pump()
            taken, client.delivered = client.delivered, []
            for _, view in taken:
                keys = view.keys() or [None] * view.message_count
                for offset, key, payload in zip(
                    view.offsets().tolist(), keys, view.payloads(), strict=True
                ):
                    assert not got or offset > max(got), "in order, and once"
                    got[offset] = (key, payload)
            return last in got

        self.rig.turn(all_there, "the newest message")
        client.ask(25, consumer_id)
        return got

    def check(self, got: dict[int, Any]) -> None:
        """Everything that must be there is, as it was; below the clean part nothing else is."""
        left = self.left
        for offset, message in left.items():
            assert got.get(offset) == message, f"offset {offset}"
        newest: dict[Any, int] = {}
        for offset, (key, _) in self.published.items():
            if offset < self.clean_until:
                newest[key] = offset
        for offset, message in got.items():
            assert self.published[offset] == message
            if offset < self.clean_until and message[0] is not None:
                assert newest[message[0]] == offset, f"offset {offset} was replaced"


@pytest.fixture
def start(rigs: Callable[..., Rig]) -> Callable[..., Rig]:
    def made(**settings: Any) -> Rig:
        rig = rigs(
            **{
                "segment_bytes": SEGMENT_BYTES, "session_timeout_ms": 3_600_000,
                "tail_bytes_max": 0, "retention_seconds_min": 1, **settings,
            }
        )  # fmt: skip
        rig.worker.clock = rig.boot.clock = Shifted(rig.boot.clock)
        return rig

    return made


# ---------------------------------------------------------------- compaction


def test_only_the_newest_of_a_key_stays_and_space_comes_back(start):
    topic = Topic(start())
    log = topic.rig.worker.logs[0]
    for _ in range(6):
        topic.publish_some(60)
        topic.compact()
        topic.check(topic.read())
    for _ in range(5):
        later(topic.rig, 2)
    assert topic.sequence == 6 * 60 * 50
    assert len(topic.read()) < topic.sequence // 3
    assert log.oldest_position > 0
    assert log.written_position - log.oldest_position < 5 * SEGMENT_BYTES
    topic.check(topic.read())


def test_it_holds_after_a_restart_and_producers_go_on(start):
    topic = Topic(start())
    topic.publish_some(100)
    topic.compact()
    worker = topic.rig.worker
    window = worker.tables.window(worker.tables.find_producer(1, topic.opened["producer_id"]))
    for _ in range(3):
        topic.rig.crash()
        topic.connect(start())
        tables = topic.rig.worker.tables
        slot = tables.find_producer(1, topic.opened["producer_id"])
        assert tables.producers[slot, ProducerWord.NEXT_SEQUENCE] == topic.sequence
        assert tables.window(slot) == window
        topic.check(topic.read())
    topic.publish_some(100)
    topic.compact()
    topic.check(topic.read())
    topic.rig.stop()
    topic.connect(start())
    topic.check(topic.read())
