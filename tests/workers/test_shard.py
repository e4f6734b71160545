"""The shard worker over real sockets and a real log, one turn at a time."""

from __future__ import annotations

import os

import msgspec
import pytest

from danube_fast.broker import messages as m
from danube_fast.errors import DataLoss
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.layout import FRAME_BYTES_CAP
from tests.workers.broker import wait_until


def test_a_message_goes_in_and_comes_out(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    assert opened["next_sequence"] == 0
    assert client.publish((1, client.frame(opened, 0, [b"a", b"b"]))) == [0, 0]
    assert client.publish((1, client.frame(opened, 2, [b"c"]))) == [0, 2]
    reply = client.subscribe(1)
    want = {"next_offset": 0, "end_offset": 3, "first_offset": 0, "ack_timeout_ms": 30_000}
    assert reply[2] == want
    assert client.receive(3) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert client.names == {opened["producer_id"]: "p"}
    client.ack(0, 3)
    assert rig.worker.state.catalog.by_id[1].subscriptions["s"].cursor == 3
    client.publish((1, client.frame(opened, 3, [b"live"])))
    assert client.receive(1) == [(3, b"live")]


def test_duplicates_gaps_and_strangers_are_told_apart(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    first = client.frame(opened, 0, [b"a", b"b"])
    assert client.publish((1, first)) == [0, 0]
    assert client.publish((1, first)) == [1, 0]
    assert client.publish((1, client.frame(opened, 1, [b"b"]))) == [1, 1]
    assert client.publish((1, client.frame(opened, 5, [b"x"]))) == [32, 0]
    assert client.publish((2, client.frame(opened, 2, [b"x"]))) == [36, 0]
    broken = client.frame(opened, 2, [b"x"])
    broken[130] ^= 1
    assert client.publish((1, broken))[0] == 3
    other = rig.client()
    newer = other.open_producer(1)
    assert newer["next_sequence"] == 2
    assert client.publish((1, client.frame(opened, 2, [b"x"]))) == [34, 0]
    assert other.publish((1, other.frame(newer, 2, [b"y"]))) == [0, 2]


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_everything_is_there_after_a_restart(rigs, end):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    for i in range(20):
        assert client.publish((1, client.frame(opened, i, [b"m%d" % i]))) == [0, i]
    client.subscribe(1)
    client.receive(20)
    client.ack(0, 5, 7, 9)
    getattr(rig, end)()
    rig = rigs()
    client = rig.client()
    reopened = client.open_producer(1)
    assert reopened["next_sequence"] == 20
    assert reopened["producer_epoch"] > opened["producer_epoch"]
    assert client.publish((1, client.frame(reopened, 3, [b"m3"]))) == [1, 3]
    assert client.publish((1, client.frame(reopened, 20, [b"m20"]))) == [0, 20]
    client.subscribe(1)
    assert [offset for offset, _ in client.receive(14)] == [5, 6, *range(9, 21)]


@pytest.mark.parametrize("durability", ["os", "memory"])
def test_other_durabilities_deliver_too(rigs, durability):
    rig = rigs()
    rig.assign(1, durability=durability)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    for i in range(5):
        assert client.publish((1, client.frame(opened, i, [b"x"]))) == [0, i]
    assert len(client.receive(5)) == 5
    client.ack(0, 5)


@pytest.mark.parametrize(
    ("durability", "waits"), [("memory", False), ("os", False), ("fsync", True)]
)
def test_who_wakes_the_worker_is_served_first(rigs, durability, waits):
    """Delivered before the rest of the turn, which then answers; one message only."""
    rig = rigs()
    rig.assign(1, durability=durability)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    assert client.publish((1, client.frame(opened, 0, [b"0"]))) == [0, 0]
    assert client.receive(1) == [(0, b"0")]
    rig.turn(lambda: rig.worker.transports.drained, "quiet")
    bundles = [sealed_bundle([(1, client.frame(opened, i, [b"%d" % i]))]) for i in (1, 2)]
    requests = [client.post(11, parts=(bytes(bundle),)) for bundle in bundles]
    wait_until("the first message", lambda: served(rig))
    assert rig.worker.intake.frames_in == 2, "the second waits for the turn"
    assert rig.worker.delivery.messages_out == (1 if waits else 2)
    assert [client.answer(request)[1] for request in requests] == [[0, 1], [0, 2]]
    assert client.receive(2) == [(1, b"1"), (2, b"2")]


def served(rig):
    """Whether a worker that is asleep took what woke it."""
    before = rig.worker.intake.frames_in
    if rig.worker.transports.readable():
        rig.worker._serve_first()
    return rig.worker.intake.frames_in > before


def test_memory_offsets_are_never_reused_after_a_crash(rigs):
    rig = rigs()
    rig.assign(1, durability="memory")
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"x"] * 3))) == [0, 0]
    rig.crash()
    rig = rigs()
    client = rig.client()
    opened = client.open_producer(1)
    status, offset = client.publish((1, client.frame(opened, opened["next_sequence"], [b"y"])))
    assert (status, offset >= 3) == (0, True)


def test_old_messages_come_from_the_log(rigs):
    rig = rigs(tail_bytes_max=10_000)
    rig.assign(1)
    rig.assign(2)
    client = rig.client()
    one, two = client.open_producer(1), client.open_producer(2)
    for i in range(100):
        payload = [b"%d-" % i + bytes(300)] * 4
        client.publish(
            (1, client.frame(one, 4 * i, payload)), (2, client.frame(two, 4 * i, payload))
        )
    assert rig.worker.tails.byte_count <= 10_000
    client.subscribe(1)
    got = client.receive(400)
    assert [offset for offset, _ in got] == list(range(400))
    assert all(payload.startswith(b"%d-" % (offset // 4)) for offset, payload in got)


def test_two_shared_consumers_divide_and_inherit(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    one, two = rig.client(), rig.client()
    for consumer in (one, two):
        assert consumer.subscribe(1, kind="shared")[0] == 67
    client.publish((1, client.frame(opened, 0, [b"%d" % i for i in range(10)])))
    first, second = one.receive(5), two.receive(5)
    assert sorted(first + second) == [(i, b"%d" % i) for i in range(10)]
    two.ack(second[0][0], second[0][0] + 1)
    two.ask(3)
    again = one.receive(4)
    assert again == second[1:]


def test_an_unknown_session_is_told_to_say_hello(rigs):
    rig = rigs()
    client = rig.client()
    client.ask(3)
    reply = client.ask(2)
    assert reply[0] == 66 and reply[2] == 33


def test_two_logs_in_one_bundle(rigs):
    rig = rigs(log_count=2)
    rig.assign(1, log_id=0)
    rig.assign(2, log_id=1)
    client = rig.client()
    one, two = client.open_producer(1), client.open_producer(2)
    statuses = client.publish(
        (1, client.frame(one, 0, [b"a"])), (2, client.frame(two, 0, [b"b"])),
        (1, client.frame(one, 1, [b"c"])),
    )  # fmt: skip
    assert statuses == [0, 0, 0, 0, 0, 1]


def test_segments_roll_and_snapshots_carry_the_state(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    payload = [bytes(1000)] * 100
    for i in range(120):
        assert client.publish((1, client.frame(opened, 100 * i, payload)))[0] == 0
    log = rig.worker.state.logs[0]
    assert log.segment_count >= 3
    rig.turn(lambda: log.snapshot_position, "a snapshot")
    rig.crash()
    rig = rigs()
    client = rig.client()
    reopened = client.open_producer(1)
    assert reopened["next_sequence"] == 12_000
    assert client.publish((1, client.frame(reopened, 11_900, payload))) == [1, 11_900]


def test_a_deleted_partition_tells_its_clients(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    client.publish((1, client.frame(opened, 0, [b"x"])))
    client.subscribe(1)
    client.receive(1)
    rig.operation(m.Unassign([1]))
    assert client.publish((1, client.frame(opened, 1, [b"x"]))) == [35, 0]
    rig.turn(lambda: client.pump() or client.events, "closed event")
    assert client.events[0][2] == "closed" and client.events[0][3]["code"] == 35
    rig.stop()
    rig = rigs()
    assert 1 not in rig.worker.state.catalog.by_id


def test_only_what_was_deleted_is_dropped(rigs):
    """A coordinator that knows nothing, as with metadata that was lost, costs no message."""
    rig = rigs()
    for partition_id in (1, 2):
        rig.assign(partition_id)
        client = rig.client()
        opened = client.open_producer(partition_id)
        client.publish((partition_id, client.frame(opened, 0, [b"kept"])))
    rig.stop()
    rig = rigs()
    rig.answer_assignments([], [])
    assert set(rig.worker.state.catalog.by_id) == {1, 2}
    rig.answer_assignments([], [2, 77])
    rig.turn(lambda: len(rig.said(m.PartitionsDropped)) == 2, "word of what was dropped")
    assert rig.said(m.PartitionsDropped) == [m.PartitionsDropped([77]), m.PartitionsDropped([2])]
    rig.stop()
    rig = rigs()
    assert set(rig.worker.state.catalog.by_id) == {1}
    client = rig.client()
    client.subscribe(1)
    assert client.receive(1) == [(0, b"kept")]


def test_a_partition_of_another_topic_is_refused(rigs):
    """Metadata of another data directory: the id is known, but as a partition of something else."""
    rig = rigs()
    rig.assign(1)
    with pytest.raises(DataLoss, match="do not belong together"):
        rig.assign(1, incarnation=2, topic="/default/other")
    assert rig.worker.state.catalog.by_id[1].topic == "/default/t1"


def test_a_failed_sync_acks_nothing_and_the_next_segment_serves(rigs, monkeypatch):
    rig = rigs()
    rig.assign(1)
    rig.assign(2, durability="os")
    client = rig.client()
    strict, loose = client.open_producer(1), client.open_producer(2)
    assert client.publish((1, client.frame(strict, 0, [b"a"]))) == [0, 0]
    log = rig.worker.state.logs[0]
    epoch = log.epoch
    read_end, write_end = os.pipe()  # fdatasync on a pipe fails with EINVAL
    push = log._appender._sync.push

    def fail_once(fd: int, position: int, *, quiet: bool = False) -> object:
        monkeypatch.undo()  # three failures would stop publishes
        return push(write_end, position)

    assert client.publish((2, client.frame(loose, 0, [b"os"]))) == [0, 0]
    monkeypatch.setattr(log._appender._sync, "push", fail_once)
    request = client.post(11, parts=(sealed_bundle([(1, client.frame(strict, 1, [b"b"]))]),))
    rig.turn(lambda: log.sync_fault or log.epoch > epoch, "a sync fault")
    reply = client.answer(request)
    assert reply[1] == [13, 0] and "send it again" in reply[2][13]
    assert log.epoch > epoch
    assert client.publish((1, client.frame(strict, 1, [b"c"]))) == [0, 1]
    rig.crash()
    os.close(read_end)
    os.close(write_end)
    rig = rigs()
    client = rig.client()
    client.subscribe(1)
    assert client.receive(2) == [(0, b"a"), (1, b"c")]
    other = rig.client()
    other.subscribe(2)
    assert other.receive(1) == [(0, b"os")]


def test_what_cannot_be_right_is_refused_with_a_reason(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"a", b"b"]))) == [0, 0]
    overlapping = client.frame(opened, 1, [b"b", b"c"])
    reply = client.ask(11, parts=(sealed_bundle([(1, overlapping)]),))
    assert reply[1] == [3, 0] and "same frames" in reply[2][3]
    large = client.frame(opened, 2, [bytes(FRAME_BYTES_CAP // 2)] * 2)
    reply = client.ask(11, parts=(sealed_bundle([(1, large)]),))
    assert reply[1] == [3, 0] and "fewer messages" in reply[2][3]
    assert client.publish((1, client.frame(opened, 2, [bytes(FRAME_BYTES_CAP)]))) == [0, 2]
    huge = client.frame(opened, 3, [bytes(5 << 19)])
    reply = client.ask(11, parts=(sealed_bundle([(1, huge)]),))
    assert reply[1] == [3, 0] and "over the limit" in reply[2][3]
    assert client.ask(11)[:1] == [66]
    assert "beyond the end" in client.subscribe(1, position=4)[3]
    client.send(2, 99, "one field too many")
    rig.turn(
        lambda: client.pump() or [reply for reply in client.waiting if reply[:2] == [66, 0]],
        "an error for what is no command",
    )


def test_a_producer_that_never_published_is_known_after_a_restart(rigs):
    rig = rigs()
    rig.assign(1)
    assert rig.client().open_producer(1)["producer_epoch"] == 1
    rig.crash()
    rig = rigs()
    rig.worker.do_work()  # upkeep looks for producers that were not used for long
    assert rig.client().open_producer(1)["producer_epoch"] == 2


def test_settings_that_change_reach_every_part(rigs):
    rig = rigs()
    rig.assign(1, durability="os")
    client = rig.client()
    opened = client.open_producer(1)
    for i in range(10):
        client.publish((1, client.frame(opened, i, [b"x" * 1000])))
    partition = rig.worker.state.partition(1)
    assert partition.tail_count == 10
    changed = msgspec.structs.replace(
        rig.settings,
        tail_bytes_max=3000,
        sessions_max=1,
        message_bytes_max=5000,
        delivery_bytes_max=2000,
    )
    rig.worker.state.apply_settings(changed)
    rig.worker.do_work()
    assert 0 < partition.tail_bytes <= 3000
    with pytest.raises(AssertionError, match="sessions_max"):
        rig.client()
    refused = client.ask(
        11, parts=(bytes(sealed_bundle([(1, client.frame(opened, 10, [bytes(6000)]))])),)
    )
    assert refused[0] == 66 or refused[1][0] != 0, refused
    client.subscribe(1, credit=1 << 20)
    assert len(client.receive(10)) == 10
