"""Key compaction: what is written again at the tail, what is read then, and what can go."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.admission.layout import ProducerWord
from danube_fast.broker.topics.policy import TopicPolicy
from danube_fast.frame.view import FrameView
from danube_fast.workers.shard.keep import rewrite, rewrites
from tests.workers.move_rig import MoveRig
from tests.workers.shard_rig import RawClient, Rig
from tests.workers.small_segments import SEGMENT_BYTES
from tests.workers.test_policies import SECOND, later, stats, subscription

KEYS = 40


class Topic:
    """A compacted topic, what was published to it, and what must be left of it."""

    def __init__(
        self, rig: Rig, partition_id: int = 1, *, key_count: int = KEYS, **policy: Any
    ) -> None:
        self.rig = rig
        self.key_count = key_count
        self.clean_at_first = 0
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
            keys: list[bytes | None] = [
                b"k%d" % self.draw.randrange(self.key_count) for _ in range(count)
            ]
            self.publish(keys, [self.draw.randbytes(50).hex().encode() for _ in keys], **columns)

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
        return int(self.rig.worker.state.catalog.by_id[self.partition_id].compacted.until)

    def compact(self) -> None:
        """Wait until a pass was made and no other is due."""
        rewrites = self.rig.worker.rewrites

        def is_done() -> bool:
            self.rig.worker.state.clock.ahead_ns += SECOND // 1000
            if not self.draw.randrange(100):
                self.client.send(2, 0)  # PING: the time flies
            due = rewrites.is_busy or rewrites.compaction.next_partition() is not None
            return self.clean_until > 0 and not due

        self.rig.turn(is_done, "a pass")

    def read(self, client: RawClient | None = None, name: str = "r") -> dict[int, Any]:
        """Everything that a new subscription gets, by offset."""
        self.clean_at_first = self.clean_until
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
        """Everything that must be there is, as it was; nothing else of what was clean at first."""
        left = self.left
        for offset, message in left.items():
            assert got.get(offset) == message, f"offset {offset}"
        newest: dict[Any, int] = {}
        for offset, (key, _) in self.published.items():
            if offset < self.clean_at_first:
                newest[key] = offset
        for offset, message in got.items():
            assert self.published[offset] == message
            if offset < self.clean_at_first and message[0] is not None:
                assert newest[message[0]] == offset, f"offset {offset} was replaced"


def test_only_the_newest_of_a_key_stays_and_space_comes_back(start):
    topic = Topic(start())
    log = topic.rig.worker.state.logs[0]
    for _ in range(6):
        topic.publish_some(60)
        topic.compact()
        topic.check(topic.read())

    def is_small() -> bool:
        later(topic.rig, 0.01)
        return 0 < log.written_position - 5 * SEGMENT_BYTES < log.oldest_position

    topic.rig.turn(is_small, "the return of space")
    assert topic.sequence == 6 * 60 * 50
    assert len(topic.read()) < topic.sequence // 3
    topic.check(topic.read())


def test_it_holds_after_a_restart_and_producers_go_on(start):
    topic = Topic(start())
    topic.publish_some(100)
    topic.compact()
    tables = topic.rig.worker.state.tables
    window = tables.window(tables.find_producer(1, topic.opened["producer_id"]))
    for _ in range(3):
        topic.rig.crash()
        topic.connect(start())
        tables = topic.rig.worker.state.tables
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


def test_what_has_no_key_stays(start):
    topic = Topic(start())
    for i in range(60):
        topic.publish([None, b"a", None, b"b"], [b"%d" % i * 1000, b"x" * 2000, None, b"y" * 2000])
    topic.publish([None] * 3, [b"only", b"keyless", None])
    topic.publish_some(60)
    topic.compact()
    got = topic.read()
    topic.check(got)
    assert sum(key is None for key, _ in got.values()) == 123


def test_a_tombstone_removes_its_key_and_goes_itself_a_day_later(start):
    topic = Topic(start())
    topic.publish([b"gone", b"stays"], [b"1", b"1"])
    topic.publish_some(60)
    topic.publish([b"gone"], [None])
    tombstone = topic.sequence - 1
    topic.publish_some(60)
    topic.compact()
    got = topic.read()
    topic.check(got)
    assert got[tombstone] == (b"gone", None)
    assert 0 not in got and got[1] == (b"stays", b"1")
    topic.publish_some(60)
    topic.compact()
    assert topic.read()[tombstone] == (b"gone", None), "it is young"
    for _ in range(3):
        later(topic.rig, 86_400 // 3 + 1)
    topic.connect(topic.rig)
    topic.rig.assign(2, durability="os")
    other = topic.client.open_producer(2)
    for i in range(60):  # the log goes on: copies of what was removed are given back
        assert topic.client.publish((2, topic.client.frame(other, i, [b"x" * 10_000])))[0] == 0
    worker = topic.rig.worker
    topic.rig.turn(
        lambda: (
            not worker.state.catalog.by_id[1].compacted.tombstone_ns and not worker.rewrites.is_busy
        ),
        "a pass for tombstones, without any publisher to the topic",
    )
    got = topic.read()
    assert tombstone not in got and 0 not in got and got[1] == (b"stays", b"1")
    topic.rig.crash()
    topic.connect(start())
    got = topic.read()
    assert tombstone not in got and 0 not in got and got[1] == (b"stays", b"1")


@pytest.mark.parametrize("codec", [1, 2])
def test_compressed_frames_stay_compressed(start, codec):
    topic = Topic(start())
    topic.publish([b"x%d" % i for i in range(50)], [b"x" * 100] * 50, codec=codec)
    topic.publish_some(250, codec=codec)
    topic.publish([b"x%d" % i for i in range(25)], [b"y" * 100] * 25, codec=codec)
    topic.publish_some(150, codec=codec)
    topic.compact()
    topic.check(got := topic.read())
    assert len(got) < topic.sequence // 2
    partition = topic.rig.worker.state.catalog.by_id[1]
    frames = topic.rig.worker.reader.read_now(partition, 30).frames
    assert FrameView(frames[0].memory).codec == codec
    assert frames[0].is_sparse and frames[0].message_count == 25


def test_a_pass_covers_only_the_keys_that_it_can_remember(start):
    topic = Topic(start(compaction_keys_max=39))
    topic.publish_some(100)
    for _ in range(3):
        topic.compact()
        topic.publish_some(60)
    topic.check(topic.read())


def test_consumers_of_every_type_get_what_stays(start):
    topic = Topic(start())
    kinds = ("exclusive", "shared", "failover", "key_shared")
    client = topic.rig.client()
    for number, kind in enumerate(kinds):
        client.subscribe(1, kind, consumer_id=number, kind=kind, credit=0)
        if kind in ("shared", "key_shared"):
            client.subscribe(1, kind, consumer_id=10 + number, kind=kind, credit=0)
    topic.publish_some(100)
    topic.compact()
    topic.publish_some(5)
    left = topic.left
    client.send(21, 1, 1 << 30, 1 << 30)
    got: dict[int, dict[int, Any]] = {}
    held: dict[int, list[int]] = {}

    def all_there() -> bool:
        client.pump()
        taken, client.delivered = client.delivered, []
        for consumer_id, view in taken:
            of_kind = got.setdefault(consumer_id % 10, {})
            keys, payloads = view.keys(), view.payloads()
            for offset, key, payload in zip(view.offsets().tolist(), keys, payloads, strict=True):
                assert offset not in of_kind
                of_kind[offset] = (key, payload)
                held.setdefault(consumer_id, []).extend([offset, offset + 1])
        return len(got) == 4 and all(topic.sequence - 1 in each for each in got.values())

    topic.rig.turn(all_there, "the newest message of all subscriptions")
    topic.rig.turn(lambda: all_there() and all(left.keys() <= each.keys() for each in got.values()),
                   "all that is left")  # fmt: skip
    for each in got.values():
        topic.check(dict(sorted(each.items())))
        assert len(each) < topic.sequence // 2
    for consumer_id, pairs in held.items():
        client.ack(*pairs, consumer_id=consumer_id)
    topic.rig.turn(
        lambda: {e["cursor"] for e in stats(topic.rig)["subscriptions"]} == {topic.sequence},
        "the end of all subscriptions",
    )


def test_a_message_that_was_replaced_while_it_was_held_is_settled(start):
    topic = Topic(start())
    client = topic.rig.client()
    client.subscribe(1, "s", consumer_id=1, kind="shared")
    topic.publish([b"a", b"b", b"c", b"d"], [b"1", b"2", b"3", b"4"])
    assert len(client.receive(4)) == 4
    topic.publish([b"a", b"b"], [b"5", b"6"])
    topic.publish_some(60)
    topic.compact()
    client.ack(0, 1)  # replaced, and acked all the same
    reply = client.ask(25, 1)  # the rest comes back
    assert reply[0] == 67, reply
    other = topic.rig.client()
    other.subscribe(1, "s", consumer_id=2, kind="shared")
    got = other.receive(2)
    assert [offset for offset, _ in got][:2] == [2, 3]
    rest = {offset for offset, _ in got}
    while topic.sequence - 1 not in rest:
        rest |= {offset for offset, _ in other.receive(1)}
    assert 1 not in rest
    other.ack(2, topic.sequence, consumer_id=2)
    assert subscription(topic.rig)["cursor"] == topic.sequence


def test_delayed_messages_that_were_replaced_are_not_delivered(start):
    topic = Topic(start())
    client = topic.rig.client()
    client.subscribe(1, "s", consumer_id=1, kind="shared", credit=0)
    due = topic.rig.worker.state.clock.wall_ns() + 100 * 1_000_000_000
    topic.publish([b"a", b"b", None], [b"1", b"2", b"3"], deliver_at=[due, due, due])
    topic.publish([b"a"], [b"4"])
    topic.publish_some(60)
    client.send(21, 1, 1 << 30, 1 << 30)
    first = {offset for offset, _ in client.receive(topic.sequence - 3)}
    assert not first & {0, 1, 2}
    client.ack(3, topic.sequence)
    topic.compact()
    later(topic.rig, 101)
    got: set[int] = set()
    while not {1, 2} <= got:
        got |= {offset for offset, _ in client.receive(1)}
    assert 0 not in got
    client.ack(0, topic.sequence)
    assert subscription(topic.rig)["cursor"] == topic.sequence


def test_skip_counts_the_messages_that_are_left(start):
    topic = Topic(start())
    topic.client.subscribe(1, "s", consumer_id=9, credit=0)
    topic.client.ask(25, 9)
    topic.publish_some(60)
    topic.publish([b"last"], [b"x"])
    topic.publish_some(20)
    topic.compact()
    got = sorted(topic.read(topic.rig.client()))
    assert topic.rig.operation(m.SkipMessages([1], "s", 5))[0][1] == 5
    topic.client.subscribe(1, "s", consumer_id=10)
    assert topic.client.receive(1)[0][0] == got[5], "five were skipped"


def test_many_topics_in_one_log_give_their_space_back(start, monkeypatch):
    """Even if the last snapshots are old and nothing more is published."""
    rig = start()
    topics = [Topic(rig, number) for number in (1, 2, 3)]
    plain_client = rig.client()
    policy = {"retention_policy": "until_expired", "retention_bytes": 1}
    rig.assign(4, durability="os", policy=policy)
    plain = plain_client.open_producer(4)
    for i in range(120):
        for topic in topics:
            topic.publish_some(3)
        if i == 20:
            monkeypatch.setattr(rig.worker.checkpoints, "_snapshot", lambda slot: None)
        assert plain_client.publish((4, plain_client.frame(plain, i, [b"z" * 4000]))) == [0, i]
    for topic in topics:
        topic.compact()
    monkeypatch.undo()
    log = rig.worker.state.logs[0]
    limit = log.written_position - sum(topic.sequence * 100 for topic in topics) // 2
    rig.turn(lambda: later(rig, 0.01) or log.oldest_position > limit, "the return of space")
    for topic in topics:
        topic.check(topic.read())


def test_policies_of_other_topics_do_nothing(start):
    rig = start()
    rig.assign(5, durability="memory", policy={"compaction": True})
    rig.assign(6, dispatch="non_reliable", policy={"compaction": True})
    client = rig.client()
    for number in (5, 6):
        opened = client.open_producer(number)
        frame = client.frame(opened, 0, [b"1", b"2"], keys=[b"a", b"a"])
        assert client.publish((number, frame)) == [0, 0]
    for _ in range(3):
        later(rig, 2)
    client.subscribe(5)
    assert [offset for offset, _ in client.receive(2)] == [0, 1]


def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes one frame a tick, and writes small pieces."""
    monkeypatch.setattr(rewrites, "STEPS_MAX", 1)
    monkeypatch.setattr(rewrite.Rewrite, "piece_bytes", 4096)


def begin_to_write(topic: Topic, written: int) -> None:
    """Turn until a pass has written so many frames again and is not at its end."""
    partition = topic.rig.worker.state.catalog.by_id[1]
    seen: set[int] = set()

    def is_amid() -> bool:
        topic.rig.worker.state.clock.ahead_ns += SECOND // 100
        seen.update(partition.breaks)
        return len(seen) >= written and topic.rig.worker.rewrites.is_busy

    topic.rig.turn(is_amid, "the middle of a pass")
    topic.connect(topic.rig)  # on a slow disk an hour of that clock went by, and the session


def amid_a_pass(start, monkeypatch, written, frames=80):
    """A topic whose pass has written so much, and goes on step by step."""
    step_by_step(monkeypatch)
    topic = Topic(start())
    topic.publish_some(frames)
    begin_to_write(topic, written)
    return topic


@pytest.mark.parametrize("written", [1, 3, 8])
def test_a_crash_in_the_middle_of_a_pass_loses_nothing(start, monkeypatch, written):
    step_by_step(monkeypatch)
    topic = Topic(start(), key_count=1500)
    for _ in range(3):
        topic.publish_some(80)
        begin_to_write(topic, written)
        topic.publish_some(3)
        topic.rig.crash()
        topic.connect(start())
        topic.check(topic.read())
    monkeypatch.undo()
    topic.publish_some(20)
    topic.compact()
    topic.check(topic.read())


def test_publishing_goes_on_during_a_pass(start, monkeypatch):
    topic, amid = amid_a_pass(start, monkeypatch, 1, frames=240), 0
    while topic.rig.worker.rewrites.is_busy or amid < 2:
        if not topic.rig.worker.rewrites.is_busy:  # one publish may outlast a pass
            topic.publish_some(240)
            begin_to_write(topic, 1)
        topic.publish_some(1)
        amid += topic.rig.worker.rewrites.is_busy
        assert amid < 2000, "the pass has no end"
        topic.rig.worker.state.clock.ahead_ns += SECOND // 100
    assert topic.clean_until > 0
    topic.check(topic.read())


def test_a_pass_that_meets_a_change_is_given_up(start, monkeypatch):
    topic = amid_a_pass(start, monkeypatch, 2)
    topic.rig.assign(1, durability="os", policy={"compaction": True, "producers_max": 7})
    topic.rig.assign(1, durability="fsync", policy={"compaction": True})
    topic.publish_some(2)
    topic.check(topic.read())
    monkeypatch.undo()
    topic.publish_some(40)
    later(topic.rig, 15)
    topic.compact()
    topic.check(topic.read())


def test_a_deleted_topic_ends_its_pass(start, monkeypatch):
    topic = amid_a_pass(start, monkeypatch, 2)
    topic.rig.operation(m.Unassign([1]))
    jobs = topic.rig.worker.rewrites
    topic.rig.turn(lambda: not jobs.is_busy, "the end of the pass")
    log = topic.rig.worker.state.logs[0]
    topic.rig.turn(lambda: later(topic.rig, 0.01) or log.segment_count <= 2, "the last trim")


def test_a_partition_that_moves_takes_its_frames_with_gaps_along(tmp_path):
    net = MoveRig(tmp_path, segment_bytes=SEGMENT_BYTES, tail_bytes_max=0)
    try:
        pid = net.create(durability="os").partition_id
        worker = net.workers[1].worker
        partition = worker.state.catalog.by_id[pid]
        assigned = msgspec.structs.replace(partition.assigned, policy=TopicPolicy(compaction=True))
        partition.assign(assigned)
        worker.state.apply_policy(partition)
        client = net.workers[1].client()
        opened = client.open_producer(pid)
        newest: dict[bytes, int] = {}
        draw = random.Random(1)
        for i in range(200):
            keys = [b"k%d" % draw.randrange(KEYS) for _ in range(50)]
            newest |= {key: 50 * i + at for at, key in enumerate(keys)}
            frame = client.frame(opened, 50 * i, [draw.randbytes(100) for _ in keys], keys=keys)
            assert client.publish((pid, frame)) == [0, 50 * i]
        net.workers[1].turn(lambda: partition.compacted.until > 5000, "a pass")
        net.workers[1].turn(lambda: not worker.rewrites.is_busy, "its end")
        outcome = net.start_move(1)
        net.settle()
        assert outcome and outcome[0][1] is None
        there = net.owner().client()
        there.subscribe(pid)
        got: set[int] = set()
        while 9999 not in got:
            got |= {offset for offset, _ in there.receive(1)}
        assert set(newest.values()) <= got
        assert len(got) < 8000
    finally:
        net.stop()
