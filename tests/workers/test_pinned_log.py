"""A log at its limit whose oldest segment is still needed: moved out of the way, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker.subscription.consumer import SubscriptionKind
from danube_fast.errors import DataLoss
from danube_fast.wal.index import Run
from danube_fast.workers.shard.keep import pinned
from tests.workers.shard_rig import RawClient, Rig
from tests.workers.small_segments import SEGMENT_BYTES
from tests.workers.test_policies import later, stats, subscription


def pinned_log(
    start: Callable[..., Rig], *, tail_bytes_max: int = 0, **policy: Any
) -> tuple[Rig, RawClient, dict[str, int]]:
    rig = start(index_flush_entries=64, tail_bytes_max=tail_bytes_max)
    rig.worker.quota._allowance = 0  # what is left is the floor: four segments
    rig.assign(1, durability="os", policy=policy)
    client = rig.client()
    client.subscribe(1, "s", consumer_id=1, kind="shared")
    return rig, client, client.open_producer(1)


def test_one_unacked_message_does_not_stop_a_topic(start):
    rig, client, opened = pinned_log(start)
    log = rig.worker.state.logs[0]
    for i in range(600):
        frame = client.frame(opened, i, [b"%6000d" % i])
        assert client.publish((1, frame)) == [0, i], stats(rig)["refusal"]
        while client.receive(1)[-1][0] != i:
            pass  # 3 and 377 come again when their ack timeout is over
        if i not in (3, 377):
            client.ack(i, i + 1)
        if i % 30 == 29:
            later(rig, 1.1)
    rig.turn(
        lambda: later(rig, 0.01) or log.written_position - log.oldest_position < 12 * SEGMENT_BYTES,
        "the moving of what is left",
    )
    assert subscription(rig)["cursor"] == 3
    client.ask(25, 1)
    other = rig.client()
    other.subscribe(1, "s", consumer_id=2, kind="shared")
    assert other.receive(2) == [(3, b"%6000d" % 3), (377, b"%6000d" % 377)]
    rig.crash()
    rig = start()
    client = rig.client()
    client.subscribe(1, "s", consumer_id=1, kind="shared")
    assert client.receive(2) == [(3, b"%6000d" % 3), (377, b"%6000d" % 377)]
    client.ack(3, 4, 377, 378)
    assert subscription(rig)["cursor"] == 600


def test_what_was_moved_is_no_younger_and_no_older(start):
    """Its time to live is an hour, whatever was trimmed where it stood."""
    rig, client, opened = pinned_log(start, message_ttl_ms=3_600_000)
    log = rig.worker.state.logs[0]
    for i in range(300):
        assert client.publish((1, client.frame(opened, i, [b"%6000d" % i]))) == [0, i]
        while client.receive(1)[-1][0] != i:
            pass
        if i != 3:
            client.ack(i, i + 1)
        later(rig, 0.11)
    rig.turn(lambda: later(rig, 0.11) or log.oldest_position > SEGMENT_BYTES, "the moving")
    assert (subscription(rig)["cursor"], subscription(rig)["expired"]) == (3, 0)
    for _ in range(2):
        later(rig, 1900)
    assert (subscription(rig)["cursor"], subscription(rig)["expired"]) == (300, 1)


@pytest.mark.parametrize("who", ["s", "late"])
def test_who_asks_for_acked_messages_while_a_segment_is_emptied_gets_them(start, monkeypatch, who):
    """It was looked at who needs what by then, and one message is on its way to the tail."""
    rig, client, opened = pinned_log(start)
    partition = rig.worker.state.catalog.by_id[1]
    asked: list[int] = []

    def move(*arguments: Any) -> Any:
        yield from unpinning_move(*arguments)
        if not asked:
            asked.append(partition.first_offset)
            sub, _ = partition.subscribe(who, SubscriptionKind.SHARED, "earliest")
            sub.seek(partition.first_offset)

    unpinning_move = pinned._move
    monkeypatch.setattr(pinned, "_move", move)
    published = 0
    while not asked:
        frame = client.frame(opened, published, [b"%6000d" % published])
        assert client.publish((1, frame)) == [0, published]
        while client.receive(1)[-1][0] != published:
            pass
        if published != 3:
            client.ack(published, published + 1)
        published += 1
        if published % 30 == 0:
            later(rig, 1.1)
        assert published < 600, "no segment is to be emptied"
    for _ in range(3):
        later(rig, 1.1)
    client.ask(25, 1)
    other = rig.client()
    other.subscribe(1, who, consumer_id=2, kind="shared")
    # the last ack may have come after the seek, and count
    wanted = set(range(asked[0], published - 1))
    assert {offset for offset, _ in other.receive(len(wanted))} | {published - 1} >= wanted


def test_the_limit_holds_when_what_is_needed_cannot_be_read(start, monkeypatch):
    rig, client, opened = pinned_log(start, tail_bytes_max=SEGMENT_BYTES)

    def unreadable(run: Run) -> bytearray:
        raise DataLoss("it is damaged")

    for read in ("read_run", "read_cached"):
        monkeypatch.setattr(rig.worker.state.logs[0], read, unreadable)
    status = i = 0
    while status == 0:
        status, _ = client.publish((1, client.frame(opened, i, [b"%6000d" % i])))
        if status == 0 and i != 3:
            client.ack(0, 3, 4, i + 1)
        i += 1
        later(rig, 0.1)
        assert i < 600, "nobody is refused"
    assert "subscription 's'" in stats(rig)["refusal"]
    assert rig.worker.state.logs[0].oldest_position == 0
    monkeypatch.undo()
    rig.turn(lambda: later(rig, 1.1) or not stats(rig)["refusal"], "the end of the refusal")


def test_who_needs_most_of_the_oldest_segment_is_refused(start):
    rig, client, opened = pinned_log(start)
    status, i = 0, 0
    while status == 0:
        status, _ = client.publish((1, client.frame(opened, i, [b"%3500d" % i])))
        i += 1
        later(rig, 0.02)  # in all less than an ack timeout, behind which the first ones come again
        assert i < 3000, "nobody is refused"
    assert "subscription 's'" in stats(rig)["refusal"]
    assert rig.worker.state.logs[0].oldest_position == 0
    got = client.receive(i - 1)
    assert [offset for offset, _ in got] == list(range(i - 1))
    client.ack(0, i - 1)
    rig.turn(lambda: later(rig, 1.1) or not stats(rig)["refusal"], "the end of the refusal")


def test_the_limit_holds_before_the_first_snapshot(start, monkeypatch):
    """A slow disk may take its time for that; nothing of the oldest segment could go anyway."""
    rig, client, opened = pinned_log(start)
    monkeypatch.setattr(rig.worker.checkpoints, "_snapshot", lambda slot: None)
    for i in range(600):
        status, _ = client.publish((1, client.frame(opened, i, [b"%6000d" % i])))
        if status:
            break
        later(rig, 0.11)
    assert "needs its oldest segment" in stats(rig)["refusal"]
    assert rig.worker.state.logs[0].snapshot_position == 0


def test_a_pinned_log_of_several_topics_goes_on(start):
    rig, client, opened = pinned_log(start)
    rig.assign(2, durability="os", policy={"retention_policy": "forever"})
    rig.assign(3, durability="os")
    other = rig.client()
    kept = other.open_producer(2)
    unread = other.open_producer(3)
    other.subscribe(3, "idle", consumer_id=5, credit=0)
    for number, who in ((2, kept), (3, unread)):
        for i in range(4):
            frame = other.frame(who, i, [b"kept %d %d" % (number, i)])
            assert other.publish((number, frame)) == [0, i]
    for i in range(500):
        assert client.publish((1, client.frame(opened, i, [b"%6000d" % i]))) == [0, i]
        client.receive(1)
        client.ack(i, i + 1)
        if i % 30 == 29:
            later(rig, 1.1)
    assert rig.worker.state.logs[0].oldest_position > 0
    third = rig.client()
    third.subscribe(2, "all", consumer_id=6)
    assert [payload for _, payload in third.receive(4)] == [b"kept 2 %d" % i for i in range(4)]
    rig.crash()
    rig = start()
    other = rig.client()
    other.subscribe(3, "idle", consumer_id=5)
    assert [payload for _, payload in other.receive(4)] == [b"kept 3 %d" % i for i in range(4)]


def test_one_unacked_message_of_a_large_frame_moves_alone(start):
    rig, client, opened = pinned_log(start)
    for i in range(30):
        frame = client.frame(opened, 100 * i, [b"%1000d" % at for at in range(100)])
        assert client.publish((1, frame)) == [0, 100 * i], stats(rig)["refusal"]
        while client.receive(1)[-1][0] != 100 * i + 99:
            pass
        client.ack(100 * i, 100 * i + 7, 100 * i + 8, 100 * i + 100)
        for _ in range(3):
            later(rig, 1.1)
    assert rig.worker.state.logs[0].oldest_position > 6 * SEGMENT_BYTES
    rig.crash()
    rig = start()
    client = rig.client()
    client.subscribe(1, "s", consumer_id=1, kind="shared")
    left = [(100 * i + 7, b"%1000d" % 7) for i in range(30)]
    assert client.receive(30) == left
    client.ack(*[bound for offset, _ in left for bound in (offset, offset + 1)])
    rig.turn(lambda: subscription(rig)["cursor"] == 3000, "the end of the subscription")


def test_a_log_that_was_closed_while_it_waited_is_left_out(start):
    rig, _, _ = pinned_log(start)
    rewrites = rig.worker.rewrites
    rewrites._wanted += [99, 0]
    rig.turn(lambda: later(rig, 1.1) or not rewrites._wanted, "the end of what is wanted")
    rig.turn(lambda: later(rig, 1.1) or not rewrites.is_busy, "the end of the job")
