"""Kernels of a turn over rings and a disk in bad luck: writes that fail, syncs that fail or are late, full segments."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.errors import Internal
from danube_fast.wal import appender
from danube_fast.wal.durable_writes import Way
from danube_fast.wal.writer import WriteFault
from danube_fast.workers.shard.publish.turn_layout import JobWord, OutletKind
from tests.workers.ring_client import RingClient, fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import (
    FailingWrites,
    HeldTurns,
    Publisher,
    expected,
    intake_of,
    payload,
    served_again,
    warmed,
)
from tests.workers.shard_faults import HeldSyncs, in_flight, settled
from tests.workers.shard_rig import Rig

CASES = int(os.environ.get("DANUBE_TURN_CASES", "10"))
SEED = int(os.environ.get("DANUBE_TURN_SEED", "1"))
KINDS = {"fsync": OutletKind.FSYNC, "os": OutletKind.OS}


@pytest.fixture(params=[Way.FDATASYNC, Way.DSYNC])
def rig(request: pytest.FixtureRequest, rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint(), tail_bytes_max=0, durable_writes=request.param)


def read_all(rig: Rig, partition: int, count: int) -> list[tuple[int, bytes]]:
    """Read a partition from its start, out of the log."""
    client = rig.client()
    client.subscribe(partition, f"reader {count}")
    return client.receive(count)


def restarted(rig: Rig, rigs: Callable[..., Rig]) -> Rig:
    """Another worker on what this one leaves when it dies."""
    rig.crash()
    return rigs(ipc_endpoint=fresh_endpoint(), tail_bytes_max=0)


def check_index(rig: Rig, partition: int, count: int) -> None:
    """Every offset is found by the index, once, and positions ascend."""
    runs = [rig.worker.state.logs[0].find(partition, offset) for offset in range(count)]
    assert [run and run.base_offset for run in runs] == list(range(count))
    positions = [run.position for run in runs if run]
    assert positions == sorted(set(positions)), "two frames share a place in the log"


# ---------------------------------------------------------------- writes


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_write_that_fails_is_made_again(
    rig: Rig, rigs: Callable[..., Rig], durability: str
) -> None:
    rig.assign(1, durability=durability)
    publisher = Publisher(rig, 1)
    served = warmed(rig, publisher)
    disk = FailingWrites(rig)
    publisher.post(20)
    rig.turn(lambda: intake_of(rig)._words[JobWord.IS_TORN], "a write of kernels that fails")
    assert disk.lent and not served, "served although the write failed"
    assert publisher.finish() == [[0, at] for at in range(21)]
    disk.mend()
    settled(rig)
    served_again(rig, served, publisher, KINDS[durability])
    total = publisher.sent
    assert publisher.outcomes == [[0, at] for at in range(total)]
    assert read_all(rig, 1, total) == expected(0, total)
    check_index(rig, 1, total)
    assert read_all(restarted(rig, rigs), 1, total) == expected(0, total)


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_write_that_fails_again_is_refused_and_its_offsets_are_given_anew(
    rig: Rig, rigs: Callable[..., Rig], durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.assign(1, durability=durability)
    publisher = Publisher(rig, 1)
    served = warmed(rig, publisher)
    epoch = rig.worker.state.logs[0].epoch
    disk = FailingWrites(rig)

    def fail(*_: Any) -> None:
        raise WriteFault(Internal("the disk fails"), touched=False)

    with monkeypatch.context() as patch:
        patch.setattr(appender, "write_all", fail)
        publisher.post(3)
        assert publisher.finish()[1:] == [[8, 0]] * 3
    assert not served
    disk.mend()
    assert rig.worker.state.logs[0].epoch == epoch + 1, "what kernels left may be taken for a group"
    publisher.sent = 1
    publisher.post(3)
    assert publisher.finish()[4:] == [[0, 1], [0, 2], [0, 3]]
    settled(rig)
    publisher.post(3)
    assert publisher.finish()[7:] == [[0, 4], [0, 5], [0, 6]]
    assert read_all(rig, 1, 7) == expected(0, 7)
    assert read_all(restarted(rig, rigs), 1, 7) == expected(0, 7)


# ---------------------------------------------------------------- syncs


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("is_followed", [False, True])
def test_a_sync_that_fails_takes_back_what_waited_for_it(
    rig: Rig, rigs: Callable[..., Rig], is_seen: bool, is_followed: bool
) -> None:
    """`is_seen`: by the kernels, within their turn. `is_followed`: by frames that wait for the next group."""
    rig.assign(1)
    rig.assign(2, durability="os")
    strict, loose = Publisher(rig, 1), Publisher(rig, 2)
    served = warmed(rig, strict, loose)
    consumer = ring_client(rig)
    consumer.subscribe(1)
    consumer.receive(1)
    journal = rig.worker.state.journals[0]
    settled(rig)
    disk = HeldTurns(rig)
    if is_seen:
        disk.note_fault()
    strict.post(5)
    loose.post(5)
    rig.turn(lambda: journal._in_flight, "a group that kernels wrote")
    assert disk.held, "kernels queued no sync"
    assert [strict.hear(), served[OutletKind.FSYNC]] == [1, 0], "acked before its sync"
    if is_followed:
        strict.post(5)
        rig.turn(lambda: journal.has_open_group, "the next group")
    disk.fail()
    assert strict.finish()[1:] == [[13, 0]] * (len(strict.requests) - 1)
    assert loose.finish() == [[0, at] for at in range(6)]
    consumer.pump()
    assert consumer.delivered == [], "delivered what was never durable"
    rig.turn(lambda: rig.worker.state.logs[0].sync_fault is None, "the repair")
    strict.sent, strict.requests, strict.answers = 1, [], {}
    for _ in range(3):
        settled(rig)
        strict.post(5)
        loose.post(5)
        strict.finish()
        loose.finish()
    assert strict.outcomes == [[0, at] for at in range(1, 16)]
    assert loose.outcomes == [[0, at] for at in range(21)]
    assert consumer.receive(15) == expected(1, 16)
    assert read_all(rig, 2, 21) == expected(0, 21)
    again = restarted(rig, rigs)
    assert read_all(again, 1, 16) == expected(0, 16)
    assert read_all(again, 2, 21) == expected(0, 21)


def test_a_sync_that_is_late_is_waited_for_by_the_ordinary_turn(rig: Rig) -> None:
    for partition, durability in ((1, "fsync"), (2, "os"), (3, "fsync"), (4, "memory")):
        rig.assign(partition, durability=durability)
    publishers = [Publisher(rig, partition) for partition in (1, 2, 3, 4)]
    warmed(rig, *publishers)
    consumer = ring_client(rig)
    for publisher in publishers:
        consumer.subscribe(publisher.partition, consumer_id=publisher.partition)
    consumer.receive(4)
    settled(rig)
    disk = HeldTurns(rig)
    for _ in range(3):
        for publisher in publishers:
            publisher.post(2)
    journal = rig.worker.state.journals[0]
    rig.turn(lambda: journal._in_flight, "a group that kernels wrote")
    assert disk.held, "kernels queued no sync"
    assert intake_of(rig)._words[JobWord.AWAITED] > 0, "no frame waited for a sync"
    for _ in range(50):  # turns in which the disk stands still
        rig.worker.do_work()
    assert [publisher.hear() for publisher in publishers] == [1, 7, 1, 7]
    for publisher in publishers:
        publisher.post(3)
    rig.turn(lambda: publishers[3].hear() == 10, "what is kept in memory")
    assert [publishers[0].hear(), publishers[2].hear()] == [1, 1]
    disk.release()
    for publisher in publishers:
        assert publisher.finish() == [[0, at] for at in range(10)]
    settled(rig)
    for publisher in publishers:
        publisher.post(3)
        publisher.finish()
    rig.turn(lambda: consumer.pump() or len(consumer.delivered) >= 48, "all deliveries")
    for publisher in publishers:
        got = [
            (int(view.offsets()[0]), view.payloads()[0])
            for number, view in consumer.delivered
            if number == publisher.partition
        ]
        assert got == expected(1, 13), f"partition {publisher.partition}"


# ---------------------------------------------------------------- room in the log


def test_groups_larger_than_the_staging_memory_and_segments_that_are_full(
    rigs: Callable[..., Rig],
) -> None:
    settings = {"segment_bytes": 1024 * 1024, "tail_bytes_max": 0, "shm_ring_bytes": 1 << 20}
    rig = rigs(ipc_endpoint=fresh_endpoint(), **settings)
    rig.assign(1)
    rig.assign(2, durability="os")
    publishers = [Publisher(rig, 1), Publisher(rig, 2)]
    size, rounds, count = 15_000, 12, 30
    served = warmed(rig, *publishers)
    for _ in range(rounds):
        settled(rig)
        for publisher in publishers:
            publisher.post(count, size=size)
        for publisher in publishers:
            publisher.finish()
    total = 1 + rounds * count
    for publisher in publishers:
        assert publisher.outcomes == [[0, at] for at in range(total)]
        messages = [(0, payload(0)), *expected(1, total, size)]
        assert read_all(rig, publisher.partition, total) == messages
        check_index(rig, publisher.partition, total)
    assert rig.worker.state.logs[0]._appender.rolls >= 4, "no segment was full"
    assert served[OutletKind.FSYNC] and served[OutletKind.OS], served
    rig.crash()
    again = rigs(**settings)
    for publisher in publishers:
        messages = [(0, payload(0)), *expected(1, total, size)]
        assert read_all(again, publisher.partition, total) == messages


# ---------------------------------------------------------------- several logs, offsets, all at random


def test_kernels_write_to_the_log_that_they_are_lent_and_python_to_the_other(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(ipc_endpoint=fresh_endpoint(), tail_bytes_max=0, log_count=2)
    publishers = []
    for partition in (1, 2, 3, 4):
        durability = "os" if partition > 2 else "fsync"
        rig.assign(partition, log_id=partition % 2, durability=durability)
        publishers.append(Publisher(rig, partition))
    served = warmed(rig, *publishers)
    for number in range(30):
        for publisher in publishers:
            if number % 3 == 0 or publisher.partition % 2 == number % 3 - 1:
                publisher.post(3)
        for publisher in publishers:
            publisher.finish()
        settled(rig, 0)
        settled(rig, 1)
    assert served.total() > 0, "kernels served nothing"
    for publisher in publishers:
        assert publisher.outcomes == [[0, at] for at in range(61)]
        assert read_all(rig, publisher.partition, 61) == expected(0, 61)
    rig.crash()
    again = rigs(tail_bytes_max=0, log_count=2)
    for publisher in publishers:
        assert read_all(again, publisher.partition, 61) == expected(0, 61)


@pytest.mark.parametrize("durability", ["memory", "os"])
def test_kernels_show_no_offset_whose_reservation_is_not_durable(rig: Rig, durability: str) -> None:
    rig.assign(1, durability=durability)
    publisher = Publisher(rig, 1)
    served = warmed(rig, publisher)
    consumer = ring_client(rig)
    consumer.subscribe(1)
    consumer.receive(1)
    publisher.post()
    publisher.finish()
    consumer.receive(1)
    settled(rig)
    partition = rig.worker.state.catalog.by_id[1]
    rig.worker.state.tables.partitions[partition.slot, PartitionWord.RESERVED_UNTIL] = 5
    partition.safe_until = partition.reserve_block = 5
    kind = {"memory": OutletKind.MEMORY, **KINDS}[durability]
    seen = served[kind]
    disk = HeldSyncs(rig)
    if durability == "os":
        del disk.log.lend  # kernels may write; what they do not write waits
    publisher.post(10)
    rig.turn(in_flight(rig, 1), "the reservation's record")
    for _ in range(30):
        rig.worker.do_work()
    assert publisher.hear() <= 5, "acked behind what is reserved durably"
    consumer.pump()
    shown = [int(offset) for _, view in consumer.delivered for offset in view.offsets()]
    assert shown == list(range(2, 2 + len(shown))) and len(shown) <= 3, shown
    assert served[kind] - seen <= 3
    disk.sync.push = disk.push  # type: ignore[method-assign]
    for fd, position in disk.held:
        disk.push(fd, position)
    if "lend" in vars(disk.log):
        del disk.log.lend
    assert publisher.finish() == [[0, at] for at in range(12)]
    assert consumer.receive(10) == expected(2, 12)


def publish_under_faults(rig: Rig, draw: random.Random, publishers: list[Publisher]) -> None:
    """Publish some with a disk in the mood of the moment, and again what was refused."""
    mood = draw.choice(("sound", "sound", "failing writes", "late", "failing syncs"))
    disk = None
    journal = rig.worker.state.journals[0]
    if mood == "failing writes":
        disk = FailingWrites(rig)
    elif mood != "sound":
        disk = HeldTurns(rig)
    for publisher in draw.sample(publishers, draw.randrange(1, len(publishers) + 1)):
        publisher.post(draw.choice((1, 3, 10)), size=draw.choice((8, 200, 3000)))
    for _ in range(draw.randrange(1, 4)):
        rig.worker.do_work()
    if isinstance(disk, FailingWrites):
        disk.mend()
    elif disk is not None:
        if mood == "failing syncs" and disk.held:
            disk.fail()
        else:
            disk.release()
    for publisher in publishers:
        publisher.finish()
    rig.turn(lambda: not journal.busy and journal.log.sync_fault is None, "rest")


@pytest.mark.parametrize("case", range(CASES))
def test_nothing_acked_is_lost_and_nothing_refused_appears(tmp_path: Path, case: int) -> None:
    seed = SEED + case
    again = f"DANUBE_TURN_SEED={seed} DANUBE_TURN_CASES=1 pytest -n 0 tests/workers/test_ring_turn_faults.py"
    draw = random.Random(seed)
    rig = Rig(tmp_path, ipc_endpoint=fresh_endpoint(), tail_bytes_max=0)
    kept: dict[int, dict[int, bytes]] = {1: {}, 2: {}, 3: {}}
    try:
        for partition, durability in ((1, "fsync"), (2, "os"), (3, "fsync")):
            rig.assign(partition, durability=durability)
        publishers = [Publisher(rig, partition) for partition in kept]
        consumer = ring_client(rig)
        for partition in kept if draw.random() < 0.7 else ():
            consumer.subscribe(partition, consumer_id=partition)
        for _ in range(12):
            publish_under_faults(rig, draw, publishers)
            for publisher in publishers:
                for request, message in publisher.posted.items():
                    status, offset = publisher.answers[request]
                    if status == 0:
                        assert offset not in kept[publisher.partition], f"twice; again: {again}"
                        kept[publisher.partition][offset] = message
                publisher.posted.clear()
                publisher.sent = len(kept[publisher.partition])
        for partition, messages in kept.items():
            assert sorted(messages) == list(range(len(messages))), f"offsets; again: {again}"
            if consumer.rig.worker.state.catalog.by_id[partition].subscriptions:
                rig.turn(
                    lambda n=partition, count=len(messages): len(received(consumer, n)) >= count,
                    f"deliveries; again: {again}",
                )
                assert received(consumer, partition) == sorted(messages.items()), again
        for lives in (True, False):
            if not lives:
                rig.crash()
                rig = Rig(tmp_path, ipc_endpoint=fresh_endpoint(), tail_bytes_max=0)
            for partition, messages in kept.items():
                found = read_all(rig, partition, len(messages)) if messages else []
                assert found == sorted(messages.items()), f"lives: {lives}; again: {again}"
    finally:
        rig.stop()


def received(client: RingClient, consumer: int) -> list[tuple[int, bytes]]:
    """What a consumer got so far."""
    client.pump()
    return [
        (int(offset), message or b"")
        for number, view in client.delivered
        if number == consumer
        for offset, message in zip(view.offsets(), view.payloads(), strict=True)
    ]
