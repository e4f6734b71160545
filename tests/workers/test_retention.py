"""Ages and sizes as retention looks at them: from the index, a bounded part of a turn, and none too early."""

from __future__ import annotations

from typing import Any

from danube_fast.broker import messages as m
from danube_fast.errors import DataLoss
from danube_fast.workers.shard.keep import retention
from tests.workers.test_policies import Ticking, assign, later, subscription


def test_a_time_to_live_asks_the_index_and_not_the_disk(start, monkeypatch):
    """A damaged segment stops nobody but who reads it, and ages are looked at often."""

    def unreadable(run: Any) -> bytearray:
        raise DataLoss("it is damaged")

    rig = start()
    assign(rig, message_ttl_ms=10_000)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    for i in range(3):
        assert client.publish((1, client.frame(opened, i * 10, [b"x"] * 10))) == [0, i * 10]
        later(rig, 4)
    for read in ("read_run", "read_cached"):
        monkeypatch.setattr(rig.worker.state.logs[0], read, unreadable)
    later(rig, 0.2)
    assert subscription(rig)["expired"] == 10
    later(rig, 4)
    assert subscription(rig)["expired"] == 20


def test_messages_of_one_instant_live_on_when_the_first_of_them_are_trimmed(start, monkeypatch):
    rig = start(index_flush_entries=10)
    assign(rig, message_ttl_ms=3_600_000)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, kind="shared")
    now_ns = rig.worker.state.clock.wall_ns()
    with monkeypatch.context() as frozen:
        frozen.setattr(rig.worker.state.clock, "wall_ns", lambda: now_ns)
        for i in range(100):
            assert client.publish((1, client.frame(opened, i, [b"%5000d" % i]))) == [0, i]
        client.receive(100)
    log = rig.worker.state.logs[0]
    (kept,) = [run for run in log.runs(1, 0, 1 << 30) if run.position == log.oldest_end]
    client.ack(0, kept.base_offset)
    for i in range(100, 200):
        assert client.publish((1, client.frame(opened, i, [b"%5000d" % i]))) == [0, i]
    rig.turn(lambda: later(rig, 2) or log.oldest_position, "a trim")
    for _ in range(5):
        rig.worker.cursors.write()
        client.ack(0, 1)
        later(rig, 2)
    assert subscription(rig)["expired"] == 0
    assert subscription(rig)["cursor"] == kept.base_offset


def test_what_a_large_topic_keeps_is_counted_in_slices(start, monkeypatch):
    """However many frames it has when it gets a policy on sizes."""
    rig = start()
    assign(rig)
    client = rig.client()
    opened = client.open_producer(1)
    for i in range(300):
        assert client.publish((1, client.frame(opened, i, [b"x"]))) == [0, i]
    partition = rig.worker.state.catalog.by_id[1]
    listed: dict[int, int] = {}
    live_runs = retention.live_runs

    def counted(log: Any, partition: Any, offset: int, byte_limit: int) -> Any:
        runs = live_runs(log, partition, offset, byte_limit)
        listed[rig.worker.state.now_ns] = listed.get(rig.worker.state.now_ns, 0) + len(runs)
        return runs

    rig.worker.state.clock = rig.boot.clock = Ticking(rig.worker.state.clock)
    monkeypatch.setattr(retention, "live_runs", counted)
    monkeypatch.setattr(retention, "COUNT_BYTES", 2000, raising=False)
    monkeypatch.setattr(retention, "COUNT_NS_MAX", 1_000_000, raising=False)
    assign(rig, retention_policy="until_expired", retention_bytes=1 << 30)
    for _ in range(1000):
        later(rig, 0.02)
        if partition.sizes is not None:
            break
    assert sum(listed.values()) == 300
    assert max(listed.values()) < 200
    client.publish((1, client.frame(opened, 300, [b"x"])))
    later(rig, 0.2)
    kept = rig.worker.state.logs[0].runs(1, 0, 1 << 30)
    assert rig.worker.retention.size_of(partition) == sum(run.byte_count for run in kept)


def test_an_idle_log_gives_back_what_was_purged(start, monkeypatch):
    """Whatever the last snapshots need: they may be far apart on a slow disk."""
    rig = start(spare_segments=0, retention_seconds_min=3600)
    assign(rig)
    client = rig.client()
    opened = client.open_producer(1)
    log = rig.worker.state.logs[0]
    sent = 0

    def fill(segments: int) -> None:
        nonlocal sent
        until = log.segment_count + segments
        while log.segment_count < until:
            frame = client.frame(opened, sent, [b"%20000d" % sent])
            assert client.publish((1, frame)) == [0, sent]
            sent += 1

    fill(1)
    rig.turn(lambda: log.snapshot_position, "a snapshot")
    oldest = log.snapshot_position
    with monkeypatch.context() as slow:
        slow.setattr(rig.worker.checkpoints, "_snapshot", lambda slot: None)
        fill(5)
    rig.turn(lambda: log.snapshot_position > oldest, "another snapshot")
    assert rig.operation(m.PurgePartitions([1])) == [(1, sent, sent)]
    rig.turn(lambda: log.segment_count == 1, "giving back all but the newest segment")
