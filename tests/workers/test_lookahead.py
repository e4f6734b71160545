"""What a worker does for delayed messages before anybody asks: it knows when they are due, and has their
frames read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription import delays
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import DataLoss
from danube_fast.wal.index import Run
from danube_fast.wal.log import Log
from danube_fast.workers.shard.deliver import lookahead
from tests.workers.move_rig import MoveRig
from tests.workers.shard_rig import Rig
from tests.workers.test_policies import Ticking, later

SECOND = 1_000_000_000
FRAMES = 20
PER_FRAME = 10


def publish_delayed(
    rig: Rig, partition_id: int = 1, *, after_s: int = 100, kind: str = "shared"
) -> int:
    """Frames of delayed messages, the first of each is due at once. When the last are due."""
    client = rig.client()
    opened = client.open_producer(partition_id)
    now = rig.worker.state.clock.wall_ns()
    due = [now + after_s * SECOND + i for i in range(PER_FRAME)]
    client.subscribe(partition_id, "s", kind=kind, credit=0)
    for frame in range(FRAMES):
        times = [1, *due[1:]]
        payloads = [b"%d" % frame] * PER_FRAME
        sealed = client.frame(opened, frame * PER_FRAME, payloads, deliver_at=times)
        assert client.publish((partition_id, sealed)) == [0, frame * PER_FRAME]
    return due[-1]


def publish_mixed(rig: Rig, partition_id: int = 1) -> list[int]:
    """Frames in which every third message is delayed; offsets of the others."""
    client = rig.client()
    opened = client.open_producer(partition_id)
    client.subscribe(partition_id, "s", credit=0)
    due = rig.worker.state.clock.wall_ns() + 100 * SECOND
    for frame in range(FRAMES):
        times = [due if row % 3 == 1 else None for row in range(PER_FRAME)]
        sealed = client.frame(opened, frame * PER_FRAME, [b"x"] * PER_FRAME, deliver_at=times)
        client.publish((partition_id, sealed))
    return [at for at in range(FRAMES * PER_FRAME) if at % PER_FRAME % 3 != 1]


def subscription(rig: Rig, partition_id: int = 1) -> Subscription:
    return rig.worker.state.catalog.by_id[partition_id].subscriptions["s"]


def looked(rig: Rig) -> None:
    rig.turn(lambda: not rig.worker.lookahead.is_busy, "the look ahead")


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_a_restarted_worker_knows_what_is_due_before_its_consumers_are_back(
    start: Callable[..., Rig], end: str
) -> None:
    rig = start()
    rig.assign(1, durability="os")
    rig.assign(2, durability="os")
    publish_delayed(rig)
    plain = rig.client()
    plain.subscribe(2, "s", credit=0)
    opened = plain.open_producer(2)
    plain.publish((2, plain.frame(opened, 0, [b"x"])))
    getattr(rig, end)()
    rig = start()
    looked(rig)
    later(rig, 0.1)
    sub = subscription(rig)
    assert sub.looked_until == FRAMES * PER_FRAME
    assert (sub.ledger.delayed, sub.ledger.waiting) == (FRAMES * (PER_FRAME - 1), FRAMES)
    assert subscription(rig, 2).looked_until == 0
    client = rig.client()
    client.subscribe(1, "s", kind="shared")
    assert [offset for offset, _ in client.receive(FRAMES)] == list(range(0, 200, PER_FRAME))
    later(rig, 101)
    rest = {offset for offset, _ in client.receive(FRAMES * (PER_FRAME - 1))}
    assert len(rest) == FRAMES * (PER_FRAME - 1)


@pytest.mark.parametrize("cached", [True, False])
def test_what_stands_in_the_log_is_cut_out_before_it_is_due(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Without waiting for the disk, and each frame is read once for all that becomes due of it soon."""
    rig = start()
    rig.assign(1, durability="os")
    due = publish_delayed(rig)
    rig.stop()
    rig = start()
    rig.worker.state.clock = rig.boot.clock = Ticking(rig.worker.state.clock)
    looked(rig)
    later(rig, 0.1)
    sub = subscription(rig)
    client = rig.client()
    client.subscribe(1, "s", kind="shared")
    client.receive(FRAMES)
    log = rig.worker.state.logs[0]
    read_run, read_cached = log.read_run, log.read_cached
    reads: list[int] = []

    def read(run: Run) -> bytearray:
        reads.append(run.base_offset)
        return read_run(run)

    def read_if(run: Run) -> bytearray | None:
        if cached:
            return read_cached(run)
        asked.append(run.base_offset)
        return None

    asked: list[int] = []
    monkeypatch.setattr(log, "read_run", read)
    monkeypatch.setattr(log, "read_cached", read_if)
    for _ in range(9):
        later(rig, 10)
    assert not len(sub.prefetched), "nothing is due soon"
    later(rig, (due - rig.worker.state.clock.wall_ns()) / SECOND - 0.5)
    wanted = FRAMES * (PER_FRAME - 1)
    if cached:
        rig.turn(lambda: len(sub.prefetched) == wanted, "the cutting")
    else:
        rig.turn(lambda: len(set(asked)) == FRAMES, "the asking")
    later(rig, 1)
    assert len(client.receive(wanted)) == wanted
    assert len(reads) == (0 if cached else FRAMES)


@pytest.mark.parametrize("attended", [True, False])
def test_cuts_have_a_bound_and_what_nobody_waits_for_is_let_go(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, attended: bool
) -> None:
    rig = start()
    rig.assign(1, durability="os")
    publish_delayed(rig, after_s=20)
    rig.stop()
    monkeypatch.setattr(lookahead, "CUT_BYTES_MAX", 2000)
    rig = start()
    looked(rig)
    sub = subscription(rig)
    assert 2000 <= sub.prefetched.byte_count < 3000
    if attended:
        rig.client().subscribe(1, "s", kind="shared", credit=0)
        sub.settle(0, 200)
        later(rig, 0.2)
    else:
        later(rig, 5)
        assert len(sub.prefetched)
        later(rig, 6)
    assert (len(sub.prefetched), sub.prefetched.byte_count) == (0, 0)


def test_looking_for_frames_takes_a_bounded_part_of_a_turn(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many frames have one message each that is due soon, and the disk does not keep up."""
    rig = start()
    rig.assign(1, durability="os")
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, "s", credit=0)
    due = rig.worker.state.clock.wall_ns() + 100 * SECOND
    for i in range(200):
        client.publish((1, client.frame(opened, i, [b"x"], deliver_at=[due])))
    rig.stop()
    rig = start()
    rig.worker.state.clock = rig.boot.clock = Ticking(rig.worker.state.clock)
    looked(rig)
    rig.client().subscribe(1, "s", credit=0)
    found: list[int] = []
    first_run = lookahead.first_run

    def counted(log: Log, partition: Partition, offset: int) -> Run | None:
        found.append(offset)
        return first_run(log, partition, offset)

    monkeypatch.setattr(lookahead, "first_run", counted)
    monkeypatch.setattr(lookahead, "LOOKUPS_MAX", 30)
    monkeypatch.setattr(rig.worker.state.logs[0], "read_cached", lambda run: None)
    later(rig, (due - rig.worker.state.clock.wall_ns()) / SECOND - 0.8)
    for _ in range(5):
        assert 0 < len(found) <= 30
        found.clear()
        rig.worker.state.clock.ahead_ns += SECOND // 10
        rig.worker.do_work()
    assert rig.worker.lookahead._wanted
    later(rig, 1.1)
    assert not rig.worker.lookahead._wanted, "they are of no use any more"


def unreadable(run: Run) -> bytearray:
    raise DataLoss("it is damaged")


def test_a_log_that_cannot_be_read_is_left_to_the_consumers(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    rig.assign(1, durability="os")
    publish_delayed(rig)
    rig.stop()
    rig = start()
    with monkeypatch.context() as broken:
        for read in ("read_run", "read_cached"):
            broken.setattr(rig.worker.state.logs[0], read, unreadable)
        looked(rig)
    assert subscription(rig).looked_until == 0
    client = rig.client()
    client.subscribe(1, "s", kind="shared")
    assert len(client.receive(FRAMES)) == FRAMES


def test_many_partitions_do_not_hold_up_the_loop(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn looks at some frames of one of them."""
    monkeypatch.setattr(lookahead, "FRAMES_AT_ONCE", 3)
    monkeypatch.setattr(lookahead, "STEPS_PER_TURN", 1)
    rig = start()
    for partition_id in (1, 2, 3):
        rig.assign(partition_id, durability="os")
        publish_delayed(rig, partition_id)
    rig.stop()
    rig = start()
    turns = 0
    while rig.worker.lookahead.is_busy:
        before = [subscription(rig, pid).looked_until for pid in (1, 2, 3)]
        rig.worker.do_work()
        after = [subscription(rig, pid).looked_until for pid in (1, 2, 3)]
        moved = [b - a for a, b in zip(before, after, strict=True) if a != b]
        assert len(moved) <= 1
        assert sum(moved) <= 3 * PER_FRAME
        turns += 1
    assert turns >= 3 * FRAMES / 3
    states = [subscription(rig, pid).ledger.state_of(199)[0] for pid in (1, 2, 3)]
    assert states == [State.DELAYED] * 3


def test_a_partition_that_arrived_is_looked_at(tmp_path: Any) -> None:
    rig = MoveRig(tmp_path)
    try:
        pid = rig.create(durability="os").partition_id
        before = rig.owner()
        publish_delayed(before, pid)
        rig.start_move(1 - rig.partition().log_id)
        rig.settle()
        owner = rig.owner()
        assert owner is not before
        looked(owner)
        owner.turn(lambda: subscription(owner, pid).ledger.waiting, "the first are due")
        assert subscription(owner, pid).ledger.delayed == FRAMES * (PER_FRAME - 1)
    finally:
        rig.stop()


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_a_restart_turns_round_nothing_that_shares_a_frame_with_delayed_messages(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The consumer is back before the worker has read all ahead, and before it has woken what is due."""
    monkeypatch.setattr(delays, "WAKE_MAX", 1)
    monkeypatch.setattr(lookahead, "FRAMES_AT_ONCE", 1)
    monkeypatch.setattr(lookahead, "STEPS_PER_TURN", 1)
    rig = start(tail_bytes_max=1 << 20)
    rig.assign(1, durability="os")
    undelayed = publish_mixed(rig)
    getattr(rig, end)()
    rig = start(tail_bytes_max=1 << 20)
    rig.turn(lambda: subscription(rig).looked_until >= 3 * PER_FRAME, "the look ahead")
    client = rig.client()
    client.subscribe(1, "s")
    assert [offset for offset, _ in client.receive(len(undelayed))] == undelayed
    assert subscription(rig).ledger.delayed == FRAMES * PER_FRAME - len(undelayed)


def test_a_move_turns_round_nothing_that_shares_a_frame_with_delayed_messages(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays, "WAKE_MAX", 1)
    rig = MoveRig(tmp_path)
    try:
        pid = rig.create(durability="os").partition_id
        undelayed = publish_mixed(rig.owner(), pid)
        rig.start_move(1 - rig.partition().log_id)
        rig.settle()
        owner = rig.owner()
        looked(owner)
        client = owner.client()
        opened = client.open_producer(pid)
        client.publish((pid, client.frame(opened, opened["next_sequence"], [b"fresh"])))
        client.subscribe(pid, "s")
        wanted = [*undelayed, FRAMES * PER_FRAME]
        assert [offset for offset, _ in client.receive(len(wanted))] == wanted
    finally:
        rig.stop()
