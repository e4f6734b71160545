"""Groups that the sync thread writes and makes durable in one call: only behind a durable log, and nothing behind them
before they are written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from danube_fast.frame.kernel import direct
from danube_fast.wal.appender import Lent
from danube_fast.wal.durable_writes import DURABLE_BYTES_MAX, Way
from danube_fast.wal.layout import GROUP_ALIGNMENT
from danube_fast.wal.sync import _AT_SIZE, SyncThread
from danube_fast.workers.shard.publish.serve_kernel import is_due
from danube_fast.workers.shard.publish.turn_layout import AT_TAKEN, JobWord
from tests.workers.ring_client import fresh_endpoint
from tests.workers.ring_turn_rig import (
    TRIES,
    HeldTurns,
    Publisher,
    expected,
    intake_of,
    load,
    warmed,
)
from tests.workers.shard_faults import settled, wait
from tests.workers.shard_rig import Rig
from tests.workers.test_ring_turn_faults import read_all, restarted

call_is_due = direct(is_due)
WAYS = (Way.DSYNC, Way.DIRECT)


@pytest.fixture(params=WAYS)
def rig(request: pytest.FixtureRequest, rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint(), tail_bytes_max=0, durable_writes=request.param)


class Watch:
    """Counts the groups that were given to the sync thread, and turns in which kernels wrote others."""

    def __init__(self, rig: Rig) -> None:
        self.log = rig.worker.state.logs[0]
        self.intake = intake_of(rig)
        self.counts = Counter[str]()
        take_back = self.log.take_back

        def count(*args: object, **more: object) -> None:
            words = self.intake._words
            self.counts["turns"] += words[JobWord.GROUPS] > 0
            self.counts["durable"] += words[JobWord.DURABLE_END] > 0
            take_back(*args, **more)  # type: ignore[arg-type]

        self.log.take_back = count  # type: ignore[method-assign]


def is_group_held(disk: HeldTurns) -> bool:
    """Whether the newest entry of the queue has a group to write."""
    entries = disk._entries()
    return bool(entries) and load(entries[-1] + _AT_SIZE) > 0


def durable(rig: Rig, slot: int = 0) -> None:
    """All that a log has is durable."""
    settled(rig, slot)
    log = rig.worker.state.logs[slot]
    log.sync()
    wait(lambda: log.synced_position == log.written_position, "a sync")


def held_group(rig: Rig, strict: Publisher) -> HeldTurns:
    """Publish until kernels have given a group to the sync thread, which stands still."""
    durable(rig)
    disk = HeldTurns(rig)
    strict.post()
    rig.turn(lambda: rig.worker.state.journals[0]._in_flight, "a group of kernels")
    assert is_group_held(disk), "the group was written by the worker"
    return disk


def test_small_groups_are_written_by_one_call(rig: Rig, rigs: Callable[..., Rig]) -> None:
    rig.assign(1)
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    watch = Watch(rig)
    for _ in range(20):
        settled(rig)
        publisher.post()
        publisher.finish()
    assert watch.counts["durable"] >= 10, watch.counts
    total = publisher.sent
    assert publisher.outcomes == [[0, at] for at in range(total)]
    assert read_all(rig, 1, total) == expected(0, total)
    assert read_all(restarted(rig, rigs), 1, total) == expected(0, total)


def test_large_groups_and_those_of_os_topics_are_written_by_the_worker(rig: Rig) -> None:
    rig.assign(1)
    rig.assign(2, durability="os")
    strict, loose = Publisher(rig, 1), Publisher(rig, 2)
    warmed(rig, strict, loose)
    watch = Watch(rig)
    for _ in range(10):
        durable(rig)
        strict.post(size=DURABLE_BYTES_MAX)
        strict.finish()
    assert not watch.counts["durable"], "a group was larger than it may be"
    for _ in range(10):
        durable(rig)
        loose.post()
        loose.finish()
    assert not watch.counts["durable"], "an `os` publish waited for the disk"
    assert watch.counts["turns"] >= 10, watch.counts


def test_behind_bytes_that_are_not_durable_a_group_is_written_and_synced_with_them(
    rig: Rig,
) -> None:
    """One call would make the group durable and not what is before it, and a log ends at its first hole."""
    rig.assign(1)
    rig.assign(2, durability="os")
    strict, loose = Publisher(rig, 1), Publisher(rig, 2)
    warmed(rig, strict, loose)
    log = rig.worker.state.logs[0]
    for _ in range(TRIES):
        loose.post()
        loose.finish()
        if not rig.worker.state.journals[0].busy and log.synced_position < log.written_position:
            break
    assert log.synced_position < log.written_position, "all that was published is durable"
    watch = Watch(rig)
    disk = HeldTurns(rig)
    strict.post()
    rig.turn(lambda: rig.worker.state.journals[0]._in_flight, "a group of kernels")
    assert watch.counts["turns"] and not is_group_held(disk), watch.counts
    disk.release()
    assert strict.finish() == [[0, 0], [0, 1]]


def test_the_first_group_of_a_segment_is_synced_with_its_header(rig: Rig) -> None:
    rig.assign(1)
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    log = rig.worker.state.logs[0]
    durable(rig)
    lent = log.lend()
    assert lent is not None and lent.durable_bytes == DURABLE_BYTES_MAX
    newest, rolls = log._appender._chain.segments[-1], log._appender.rolls
    log.reserve(newest.segment_bytes - 2 * GROUP_ALIGNMENT)
    assert log._appender.rolls == rolls + 1, "no segment was begun"
    rig.worker.state.journals[0].refresh()
    lent = log.lend()
    assert lent is not None and lent.durable_bytes == 0, "its header is not durable yet"
    publisher.post()
    publisher.finish()
    durable(rig)
    lent = log.lend()
    assert lent is not None and lent.durable_bytes == DURABLE_BYTES_MAX


def test_a_group_of_an_os_topic_is_not_due_before_the_one_before_it_is_written() -> None:
    sync = SyncThread(-1)
    sync.start(8192)
    try:
        job = np.zeros(AT_TAKEN // 8, np.int64)
        job[JobWord.SYNCS] = sync.queue[0]
        job[JobWord.PENDING] = job[JobWord.HAS_WRITTEN] = job[JobWord.AWAITED] = 1
        for end, due in ((12288, 0), (8192, 1), (0, 1)):
            job[JobWord.DURABLE_END] = end
            assert call_is_due(job.ctypes.data) == due, (
                f"synced up to 8192, the group ends at {end}"
            )
    finally:
        sync.stop()


def test_what_comes_behind_a_group_that_hangs_is_not_behind_a_hole(
    rig: Rig, rigs: Callable[..., Rig]
) -> None:
    rig.assign(1)
    rig.assign(2, durability="os")
    strict, loose = Publisher(rig, 1), Publisher(rig, 2)
    warmed(rig, strict, loose)
    held_group(rig, strict)
    loose.post(3)
    assert loose.finish() == [[0, at] for at in range(4)], "an `os` publish waits for a sync"
    assert strict.hear() == 1, "acked before it was durable"
    again = restarted(rig, rigs)  # and the sync thread never wrote its group
    assert read_all(again, 2, 4) == expected(0, 4)


def test_nothing_is_staged_over_a_group_that_hangs(rigs: Callable[..., Rig]) -> None:
    """Its memory is the one that groups of other logs are put together in."""
    rig = rigs(
        ipc_endpoint=fresh_endpoint(), tail_bytes_max=0, log_count=2, durable_writes=Way.DSYNC
    )
    rig.assign(1, log_id=0)
    rig.assign(2, log_id=1)
    first, second = Publisher(rig, 1), Publisher(rig, 2)
    warmed(rig, first, second)
    settled(rig, 1)
    disk = held_group(rig, first)
    intake = intake_of(rig)
    assert intake._writing is rig.worker.state.logs[0]
    held = rig.worker.state.logs[0]._appender._held
    assert held is not None
    before = bytes(held[2])
    sync = rig.worker.state.logs[0].syncs
    rig.worker.state.logs[0].syncs = disk.queue  # what still has something to do
    for _ in range(5):
        second.post()
        second.finish()
    assert bytes(held[2]) == before, "another group was put there"
    rig.worker.state.logs[0].syncs = sync
    disk.release()
    assert first.finish() == [[0, 0], [0, 1]]


def test_a_group_whose_write_fails_is_taken_back(rig: Rig, rigs: Callable[..., Rig]) -> None:
    rig.assign(1)
    rig.assign(2, durability="os")
    strict, loose = Publisher(rig, 1), Publisher(rig, 2)
    warmed(rig, strict, loose)
    log = rig.worker.state.logs[0]
    durable(rig)
    fd = os.open(os.devnull, os.O_RDONLY)
    lend = log.lend

    def lend_other() -> Lent | None:
        lent = lend()
        return None if lent is None else lent._replace(durable_fd=fd)

    log.lend = lend_other  # type: ignore[method-assign]
    strict.post(5)
    assert strict.finish()[1:] == [[13, 0]] * 5
    loose.post(5)
    assert loose.finish() == [[0, at] for at in range(6)]
    del log.lend
    os.close(fd)
    rig.turn(lambda: log.sync_fault is None, "the repair")
    strict.sent, strict.requests, strict.answers = 1, [], {}
    settled(rig)
    strict.post(5)
    assert strict.finish() == [[0, at] for at in range(1, 6)]
    assert read_all(rig, 1, 6) == expected(0, 6)
    again = restarted(rig, rigs)
    assert read_all(again, 1, 6) == expected(0, 6)
    assert read_all(again, 2, 6) == expected(0, 6)
