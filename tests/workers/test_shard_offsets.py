"""Offsets are given once, whatever fails and restarts; a topic's durability may change under way."""

from __future__ import annotations

import threading

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.workers.process import environment
from tests.workers.shard_faults import HeldSyncs, fill, in_flight, post_publish, settled
from tests.workers.shard_rig import FakeRequest

# ---------------------------------------------------------------- offsets are given once


@pytest.mark.parametrize("settle_first", [True, False])
def test_offsets_that_were_skipped_stay_skipped(rigs, tmp_path, monkeypatch, settle_first):
    rig = rigs()
    rig.assign(1, durability="os")
    fill(rig.client(), 1, 3, size=10)
    rig.crash()
    other_boot = tmp_path / "boot_id"
    other_boot.write_text("after-the-power-cut")
    monkeypatch.setattr(environment, "BOOT_ID_PATH", other_boot)
    rig = rigs()
    partition = rig.worker.state.catalog.by_id[1]
    skipped_to = rig.worker.state.catalog.state_of(partition).next_offset
    assert skipped_to > 3
    if settle_first:
        settled(rig)
    rig.crash()
    rig = rigs()
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 3, [b"x"]))) == [0, skipped_to]
    client.subscribe(1)
    assert [offset for offset, _ in client.receive(4)] == [0, 1, 2, skipped_to]


@pytest.mark.parametrize("durability", ["memory", "os"])
def test_offsets_are_shown_only_when_their_reservation_is_durable(rigs, durability):
    rig = rigs()
    rig.assign(1, durability=durability)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    assert client.publish((1, client.frame(opened, 0, [b"a"]))) == [0, 0]
    partition = rig.worker.state.catalog.by_id[1]
    rig.worker.state.tables.partitions[partition.slot, PartitionWord.RESERVED_UNTIL] = 5
    partition.safe_until = partition.reserve_block = 5
    client.receive(1)
    disk = HeldSyncs(rig)
    first = post_publish(client, (1, client.frame(opened, 1, [b"b"] * 10)))
    rig.turn(in_flight(rig, 1), "the reservation's record")
    second = post_publish(client, (1, client.frame(opened, 11, [b"c"])))
    for _ in range(50):
        rig.worker.do_work()
        client.pump()
    assert client.delivered == [] and [r for r in client.waiting if r[1]] == []
    disk.release()
    assert client.answer(first)[1] == [0, 1]
    assert client.answer(second)[1] == [0, 11]
    assert [offset for offset, _ in client.receive(11)] == list(range(1, 12))
    third = post_publish(client, (1, client.frame(opened, 12, [b"d"])))
    assert client.answer(third)[1] == [0, 12]
    assert client.receive(1) == [(12, b"d")]


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_the_first_offset_is_known_after_a_restart(rigs, end):
    settings = {"segment_bytes": 256 * 1024, "retention_seconds_min": 0}
    rig = rigs(**settings)
    rig.assign(1)
    client = rig.client()
    fill(client, 1, 60, size=20_000)
    partition = rig.worker.state.catalog.by_id[1]
    rig.turn(lambda: partition.first_offset > 0, "a trim")
    first = partition.first_offset
    getattr(rig, end)()
    rig = rigs(**settings)
    assert rig.worker.state.catalog.by_id[1].first_offset >= first
    client = rig.client()
    assert client.subscribe(1)[2]["first_offset"] >= first


def test_an_older_snapshot_does_not_hold_segments_above_the_quota(rigs, monkeypatch):
    """Many segments are filled while one snapshot is saved, and then nothing more is written."""
    rig = rigs(segment_bytes=256 * 1024, retention_seconds_min=3600, wal_bytes_max=1 << 30)
    rig.assign(1)
    rig.assign(2)
    client = rig.client()
    log = rig.worker.state.logs[0]
    fill(client, 1, 20, size=20_000)
    rig.turn(lambda: log.snapshot_position, "the first snapshot")
    saving = threading.Event()
    monkeypatch.setattr(log._snapshots, "_synced_position", _behind(log, saving))
    fill(client, 2, 200, size=20_000)
    settled(rig)
    rig.turn(lambda: rig.worker.state.journals[0].marked, "the marker")
    assert log.segment_count > 10
    saving.set()
    rig.worker.quota._allowance = 0
    rig.turn(lambda: log.segment_count < 4, "room in the log")


def _behind(log, saving):
    return lambda: log.synced_position if saving.is_set() else 0


# ---------------------------------------------------------------- durability that changes


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in ("fsync", "os", "memory") for b in ("fsync", "os", "memory") if a != b],
)
def test_durability_changes_under_way(rigs, before, after):
    rig = rigs(tail_bytes_max=0)
    rig.assign(1, durability=before)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    for i in range(5):
        assert client.publish((1, client.frame(opened, i, [b"%d" % i] * 1))) == [0, i]
    disk = HeldSyncs(rig)
    under_way = post_publish(client, (1, client.frame(opened, 5, [b"5"])))
    asked = FakeRequest(
        m.Assign([m.Assignment(1, "/default/t1", 0, "reliable", after, log_id=0, incarnation=1)])
    )
    rig.turn(in_flight(rig, 1) if before == "fsync" else lambda: client._answer(under_way), "5")
    rig.worker.assignments._assign(asked)
    refused = client.ask(11, parts=(sealed_bundle([(1, client.frame(opened, 6, [b"6"]))]),))
    assert refused[1] == [8, 0] and "durability" in refused[2][8]
    disk.release()
    rig.turn(lambda: asked.done, "the change")
    assert asked.error is None
    for i in range(6, 10):
        assert client.publish((1, client.frame(opened, i, [b"%d" % i]))) == [0, i]
    client.send(21, 1, 1 << 20, 1000)
    assert client.receive(10) == [(i, b"%d" % i) for i in range(10)]
    assert client.events == []
    assert rig.worker.tails.byte_count >= 0
    settled(rig)
    rig.crash()
    rig = rigs()
    client = rig.client()
    assert rig.worker.state.catalog.by_id[1].assigned.durability == after
    opened = client.open_producer(1)
    status, offset = client.publish((1, client.frame(opened, opened["next_sequence"], [b"x"])))
    assert (status, offset >= 10) == (0, True)
    client.subscribe(1)
    got = dict(client.receive(1 if after == before == "memory" else 2))
    if after != "memory":
        while len(got) < 11:
            got |= dict(client.receive(1))
        assert [got[i] for i in range(10)] == [b"%d" % i for i in range(10)]


def test_a_snapshot_knows_of_reservations_that_are_under_way(rigs):
    rig = rigs()
    rig.assign(1, durability="memory")
    client = rig.client()
    opened = client.open_producer(1)
    worker = rig.worker
    partition = worker.state.catalog.by_id[1]
    settled(rig)
    row = worker.state.tables.partitions[partition.slot]
    row[PartitionWord.NEXT_OFFSET] = row[PartitionWord.RESERVED_UNTIL]
    disk = HeldSyncs(rig)
    worker.intake.reserve_offsets(partition)
    rig.turn(in_flight(rig, 1), "the reservation's record")
    worker.state.logs[0]._snapshot_rolls = -1
    rig.turn(lambda: worker.state.journals[0].snapshot, "a snapshot in the making")
    disk.release()
    rig.turn(lambda: worker.state.logs[0].snapshot_position, "a snapshot")
    status, offset = client.publish((1, client.frame(opened, 0, [b"a"])))
    assert status == 0
    rig.crash()
    rig = rigs()
    client = rig.client()
    opened = client.open_producer(1)
    status, again = client.publish((1, client.frame(opened, opened["next_sequence"], [b"b"])))
    assert status == 0 and again > offset


def test_a_change_of_durability_is_not_lost_to_a_snapshot(rigs):
    rig = rigs()
    rig.assign(1)
    settled(rig)
    disk = HeldSyncs(rig)
    asked = FakeRequest(
        m.Assign([m.Assignment(1, "/default/t1", 0, "reliable", "memory", log_id=0, incarnation=1)])
    )
    rig.worker.assignments._assign(asked)  # type: ignore[arg-type]
    rig.turn(in_flight(rig, 1), "the change's record")
    rig.worker.state.logs[0]._snapshot_rolls = -1
    for _ in range(20):
        rig.worker.checkpoints._snapshot(0)
        rig.worker.do_work()
    disk.release()
    rig.turn(lambda: asked.done, "the change")
    rig.turn(lambda: rig.worker.state.logs[0].snapshot_position, "a snapshot")
    rig.crash()
    rig = rigs()
    assert rig.worker.state.catalog.by_id[1].assigned.durability == "memory"
