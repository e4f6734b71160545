"""Groups and records at the ends of segments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.broker.ledger.layout import State
from danube_fast.config import KIB
from danube_fast.errors import Internal
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.workers.shard.keep import cursors
from danube_fast.workers.shard.publish import siblings
from danube_fast.workers.shard.publish.journal import Journal
from tests.workers.shard_rig import RawClient, Rig

FRAMES = 300
MESSAGES = 40
SIBLINGS = 5


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    started = Rig(tmp_path / "data", segment_bytes=64 * KIB, group_bytes_max=64 * KIB)
    yield started
    started.stop()


def test_records_that_come_behind_a_reservation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has its places when acks of the same turn turn into records, again and again: none of
    both is refused where a segment ends."""
    monkeypatch.setattr(cursors, "INTERVAL_NS", 0)
    draw = random.Random(3)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    holes = range(0, FRAMES * MESSAGES, 7)
    for turn in range(FRAMES):
        payloads = [draw.randbytes(draw.randrange(120)) for _ in range(MESSAGES)]
        frame = client.frame(opened, turn * MESSAGES, payloads)
        assert client.publish((1, frame)) == [0, turn * MESSAGES]
        client.receive(MESSAGES)
        base = turn * MESSAGES
        acked = [i for i in range(base, base + MESSAGES) if i not in holes]
        # unanswered, so that it is read in one turn with the next publish
        client.send(22, 0, [[1, [edge for i in acked for edge in (i, i + 1)]]])
    assert rig.worker.state.journals[0].refusal == ""
    partition = rig.worker.state.catalog.by_id[1]
    client.ack(FRAMES * MESSAGES - 1, FRAMES * MESSAGES)
    ledger = partition.subscriptions["s"].ledger
    held = [i for i in range(FRAMES * MESSAGES) if ledger.state_of(i)[0] is State.UNACKED]
    assert held == list(holes)
    assert rig.worker.state.logs[0].written_position > 10 * 64 * KIB


def test_durable_acks_with_ever_so_many_holes(tmp_path: Path) -> None:
    """Every second message of 30,000 is acked: a crash brings back the others and nothing else, and
    the log does not fill with the same ranges again and again."""
    settings = {"segment_bytes": 1024 * KIB, "group_bytes_max": 64 * KIB}
    rig = Rig(tmp_path / "data", **settings)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    for base in range(0, 30_000, 1000):
        frame = client.frame(opened, base, [b"%d" % n for n in range(base, base + 1000)])
        assert client.publish((1, frame)) == [0, base]
    client.receive(30_000)
    before = rig.worker.state.logs[0].written_position
    for base in range(0, 30_000, 1000):
        client.ack(*[edge for n in range(base, base + 1000, 2) for edge in (n, n + 1)])
    assert rig.worker.state.logs[0].written_position - before < 1024 * KIB
    rig.crash()
    rig = Rig(tmp_path / "data", **settings)
    client = rig.client()
    client.subscribe(1)
    assert [offset for offset, _ in client.receive(15_000)] == list(range(1, 30_000, 2))
    client.ack(0, 30_000)
    assert rig.worker.state.catalog.by_id[1].subscriptions["s"].cursor == 30_000
    rig.stop()


def gather(rig: Rig) -> Journal:
    """Have the journal believe that many clients publish one by one."""
    journal = rig.worker.state.journals[0]
    journal.siblings.count = SIBLINGS
    return journal


def post(client: RawClient, opened: dict[str, int], sequence: int, partition_id: int = 1) -> int:
    frame = client.frame(opened, sequence, [b"%d" % sequence])
    return client.post(11, parts=(sealed_bundle([(partition_id, frame)]),))


def test_publications_of_many_go_into_one_group(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small group waits for as many publications as the last one had, and is then one write."""
    monkeypatch.setattr(siblings, "SIBLINGS_WAIT_NS", 3_600_000_000_000)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    journal = gather(rig)
    before = journal.group_count
    requests = [post(client, opened, number) for number in range(SIBLINGS - 1)]
    rig.turn(lambda: rig.worker.intake.frames_in == SIBLINGS - 1, "what was sent")
    rig.worker.do_work()
    assert (journal.group_count, journal.syncing) == (before, False)
    assert journal.waits, "the loop does not sleep past the group's time"
    requests.append(post(client, opened, SIBLINGS - 1))
    answers = [client.answer(request)[1] for request in requests]
    assert answers == [[0, number] for number in range(SIBLINGS)]
    assert journal.group_count == before + 1
    assert not journal.waits


def test_who_publishes_alone_waits_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the others do not come, one group waits for its time, and the next not at all."""
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    journal = gather(rig)
    asked_ns = rig.boot.clock.monotonic_ns()
    assert client.answer(post(client, opened, 0))[1] == [0, 0]
    assert rig.boot.clock.monotonic_ns() - asked_ns >= siblings.SIBLINGS_WAIT_NS
    assert not journal.siblings.gather
    monkeypatch.setattr(siblings, "SIBLINGS_WAIT_NS", 3_600_000_000_000)
    assert client.answer(post(client, opened, 1))[1] == [0, 1]


def test_acks_that_wait_for_no_sync_wait_for_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "SIBLINGS_WAIT_NS", 3_600_000_000_000)
    rig.assign(1, durability="os")
    client = rig.client()
    opened = client.open_producer(1)
    gather(rig)
    assert client.answer(post(client, opened, 0))[1] == [0, 0]


def test_a_group_of_some_size_waits_for_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "SIBLINGS_WAIT_NS", 3_600_000_000_000)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    gather(rig)
    frame = client.frame(opened, 0, [bytes(siblings.SIBLINGS_BYTES_MAX)])
    assert client.publish((1, frame)) == [0, 0]


def test_as_many_as_a_group_waits_for_at_most(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "SIBLINGS_WAIT_NS", 3_600_000_000_000)
    monkeypatch.setattr(siblings, "SIBLINGS_MAX", 2)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    gather(rig)
    requests = [post(client, opened, number) for number in range(2)]
    assert [client.answer(request)[1] for request in requests] == [[0, 0], [0, 1]]


def test_a_group_that_is_taken_back_keeps_nobody_awake(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop polls each millisecond while a group waits, and only then."""
    monkeypatch.setattr(siblings, "SIBLINGS_WAIT_NS", 3_600_000_000_000)
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    journal = gather(rig)
    post(client, opened, 0)
    rig.turn(lambda: journal.waits, "an open group that waits")
    journal.void_unsynced(Internal("the disk failed"))
    assert not journal.waits
