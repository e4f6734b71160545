"""Turns of kernels over rings that end while frames are under way to the disk."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

import pytest

from danube_fast.workers.shard.publish import ring_intake
from danube_fast.workers.shard.publish.turn_kernel import pause
from danube_fast.workers.shard.publish.turn_layout import JobWord
from tests.workers.ring_client import fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import LateSyncs, intake_of
from tests.workers.shard_rig import Rig
from tests.workers.test_ring_intake_limits import Publisher, finish

ROOM_BYTES = 20_000


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


@pytest.fixture
def late(rig: Rig) -> Iterator[LateSyncs]:
    syncs = LateSyncs(rig)
    yield syncs
    syncs.close()


def test_a_frame_that_waits_for_a_sync_does_not_wait_for_what_is_written_behind_it(
    rig: Rig, late: LateSyncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.assign(1, durability="fsync")
    rig.assign(2, durability="os")
    strict, quick = Publisher(rig, 1, "p"), Publisher(rig, 2, "q")
    rig.turn(lambda: not rig.worker.state.journals[0].busy, "rest")
    paused: list[int] = []

    def post_behind(job: int) -> int:
        if not paused:
            quick.post(1)
        paused.append(job)
        return int(pause(job))

    monkeypatch.setattr(ring_intake, "pause", post_behind)
    strict.post(1)
    rig.turn(lambda: quick.hear() == 1, "the answer that waits for no sync")
    log = rig.worker.state.logs[0]
    assert strict.hear() == 0 and log.syncs.backlog == 1
    assert rig.worker.state.journals[0].last_group() is not None
    late.wake()
    finish(rig, strict)
    assert strict.answers == [[0, 0]]


def test_groups_that_a_turn_pads_leave_room_for_what_it_has_admitted(
    rig: Rig, late: LateSyncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.assign(1, durability="fsync")
    rig.assign(2, durability="os")
    strict, quick = Publisher(rig, 1, "p"), Publisher(rig, 2, "q")
    log = rig.worker.state.logs[0]
    while (room := log.room_bytes) > ROOM_BYTES:
        quick.post(1, min(60_000, max(8, room - ROOM_BYTES)))
        finish(rig, quick)
    rig.turn(lambda: not rig.worker.state.journals[0].busy, "rest")
    first = quick.sent
    monkeypatch.setattr(ring_intake, "ROOM_MIN", 0)
    batches = [1, 1, 6]

    def post_behind(job: int) -> int:
        if batches:
            quick.post(batches.pop(0), 2000)
        return int(pause(job))

    monkeypatch.setattr(ring_intake, "pause", post_behind)
    strict.post(1)
    rig.turn(
        lambda: not batches and quick.hear() == quick.sent, "the answers that wait for no sync"
    )
    late.wake()
    finish(rig, strict)
    assert strict.answers == [[0, 0]]
    assert quick.answers[first:] == [[0, offset] for offset in range(first, quick.sent)]


@pytest.mark.parametrize("consumer_id", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -1000])
def test_consumers_of_any_number_get_their_messages(rig: Rig, consumer_id: int) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1, "p")
    reader = ring_client(rig)
    reply = reader.ask(20, consumer_id, 1, 1, "s", "exclusive", "earliest")
    assert reply[0] == 67, reply
    reader.send(21, 1, 1 << 20, 1000)
    for _ in range(5):
        publisher.post(1)
        finish(rig, publisher)

    def is_delivered() -> bool:
        reader.pump()
        return len(reader.delivered) == 5

    rig.turn(is_delivered, "the deliveries")
    assert {consumer for consumer, _ in reader.delivered} == {consumer_id}


def test_a_turn_that_took_the_bell_s_signals_rings_it_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another log's sync may have rung it, or another process: the loop must not sleep on that."""
    rig.assign(1, durability="fsync")
    publisher = Publisher(rig, 1, "p")
    rig.turn(lambda: not rig.worker.state.journals[0].busy, "rest")
    taking = intake_of(rig)
    bell, rung = taking._bell, list[int]()

    def take_signal(job: int) -> int:
        os.eventfd_write(bell, 1)
        flags = int(pause(job))
        rung.append(taking._words[JobWord.BELL_RANG])
        return flags

    monkeypatch.setattr(ring_intake, "pause", take_signal)
    publisher.post(1)
    rig.worker.do_work()
    assert 1 in rung, "no kernel took the signal"
    assert select.select([bell], [], [], 0)[0], "a signal is lost"
    finish(rig, publisher)
    assert publisher.answers == [[0, 0]]
