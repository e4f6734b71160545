"""Reads behind the tail wait for no disk: what is not in the page cache is fetched by a thread meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.subscription.consumer import PENDING
from danube_fast.errors import DataLoss
from danube_fast.wal.index import Run
from tests.workers.shard_rig import RawClient, Rig

FRAMES = 40
SECONDS = 60


class Disk:
    """A log whose pages come when `let_go` says so; nothing that is asked of it may wait before."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = rig.worker.state.logs[0]
        self.cached: set[int] = set()
        """Positions of runs that are in the page cache."""
        self.fetched: list[int] = []
        self.waited = 0
        """Reads that would have waited for the disk."""
        self._goes = threading.Event()
        read_cached, prefetch, read_run = self.log.read_cached, self.log.prefetch, self.log.read_run

        def cached(run: Run) -> bytearray | None:
            return read_cached(run) if run.position in self.cached else None

        def fetch(run: Run, byte_count: int) -> Callable[[], None]:
            work = prefetch(run, byte_count)
            self.fetched.append(run.position)

            def slowly() -> None:
                assert self._goes.wait(SECONDS)
                work()
                self.cached.add(run.position)

            return slowly

        def waits(run: Run) -> bytearray:
            self.waited += 1
            return read_run(run)

        monkeypatch.setattr(self.log, "read_cached", cached)
        monkeypatch.setattr(self.log, "prefetch", fetch)
        monkeypatch.setattr(self.log, "read_run", waits)

    def let_go(self) -> None:
        """Let all that is under way, and what comes, end."""
        self._goes.set()


def filled(rig: Rig, *partition_ids: int) -> RawClient:
    """Partitions with a backlog that stands in the log alone."""
    client = rig.client()
    for partition_id in partition_ids:
        rig.assign(partition_id, durability="os")
        opened = client.open_producer(partition_id)
        for number in range(FRAMES):
            frame = client.frame(opened, number, [b"%5000d" % number])
            assert client.publish((partition_id, frame)) == [0, number]
    return client


def turns(rig: Rig, count: int = 20) -> None:
    for _ in range(count):
        rig.worker.do_work()


def test_a_slow_disk_holds_up_who_waits_for_it_and_no_one_else(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tail_bytes_max=0)
    client = filled(rig, 1)
    disk = Disk(rig, monkeypatch)
    client.subscribe(1)
    rig.turn(lambda: disk.fetched, "a fetch")
    turns(rig)
    client.pump()
    assert not client.delivered and len(disk.fetched) == 1, "one thread reads"
    other = rig.client()
    opened = other.open_producer(1)
    for number in range(5):
        assert other.publish((1, other.frame(opened, FRAMES + number, [b"x"])))[0] == 0
    assert not rig.worker.state.ready, "the worker may sleep meanwhile"
    disk.let_go()
    got = [offset for offset, _ in client.receive(FRAMES + 5)]
    assert got == list(range(FRAMES + 5))
    assert disk.waited == 0


def test_partitions_of_a_log_are_fetched_by_turns(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a long backlog does not keep the others waiting until it is read to its end."""
    rig = rigs(tail_bytes_max=0)
    filled(rig, 1, 2, 3)
    disk = Disk(rig, monkeypatch)
    reader = rig.client()
    for partition_id in (1, 2, 3):
        reader.subscribe(partition_id, consumer_id=partition_id)
    disk.let_go()
    first: dict[int, int] = {}

    def all_began() -> bool:
        turns(rig, 1)
        reader.pump()
        for place, (consumer_id, _) in enumerate(reader.delivered):
            first.setdefault(consumer_id, place)
        return len(first) == 3

    rig.turn(all_began, "something of each")
    assert max(first.values()) < FRAMES, first
    rig.turn(lambda: reader.pump() or len(reader.delivered) >= 3 * FRAMES, "all of them")


def test_pages_that_go_again_at_once_are_waited_for(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too little memory a fetch may be in vain: the consumer gets on all the same, and nothing is
    fetched twice."""
    rig = rigs(tail_bytes_max=0)
    client = filled(rig, 1)
    disk = Disk(rig, monkeypatch)
    monkeypatch.setattr(disk.log, "read_cached", lambda run: None)
    disk.let_go()
    client.subscribe(1)
    assert [offset for offset, _ in client.receive(FRAMES)] == list(range(FRAMES))
    assert disk.waited and len(disk.fetched) == len(set(disk.fetched))


def test_a_disk_that_fails_is_told_by_the_read_behind_the_fetch(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tail_bytes_max=0)
    client = filled(rig, 1)
    preadv = os.preadv

    def broken(fd: int, buffers: Any, place: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, "preadv", broken)
        client.subscribe(1)
        rig.turn(lambda: client.pump() or client.events, "word of the fault")
    assert preadv is os.preadv
    assert "Input/output error" in str(client.events[0])


def test_a_fetch_that_gets_no_descriptor_delays_the_read_alone(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tail_bytes_max=0)
    client = filled(rig, 1)

    def exhausted(fd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(rig.worker.state.logs[0], "read_cached", lambda run: None)
    monkeypatch.setattr(os, "dup", exhausted)
    client.subscribe(1)
    assert [offset for offset, _ in client.receive(FRAMES)] == list(range(FRAMES))


def test_a_partition_that_is_deleted_while_it_waits_is_forgotten(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(tail_bytes_max=0)
    client = filled(rig, 1)
    disk = Disk(rig, monkeypatch)
    client.subscribe(1)
    reader = rig.worker.reader
    rig.turn(lambda: reader.fetches, "a fetch")
    partition = rig.worker.state.catalog.by_id[1]
    assert reader.read(partition, 0, 1) is PENDING
    rig.operation(m.Unassign([1]))
    disk.let_go()
    rig.turn(lambda: not reader.fetches, "the end of the fetch")
    assert not rig.worker.state.ready


def test_a_partition_that_comes_back_while_a_thread_reads_for_it_is_woken(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the thread of the log like any other, though that was begun for its life before."""
    rig = rigs(tail_bytes_max=0)
    client = filled(rig, 1)
    disk = Disk(rig, monkeypatch)
    client.subscribe(1)
    rig.turn(lambda: rig.worker.reader.fetches, "a fetch")
    rig.operation(m.Unassign([1]))
    again = filled(rig, 1)
    again.subscribe(1)
    turns(rig)
    assert len(disk.fetched) == 1
    disk.let_go()
    assert [offset for offset, _ in again.receive(FRAMES)] == list(range(FRAMES))


def scattered(rig: Rig) -> RawClient:
    """Frames of one partition in the log, each with a dozen of another one behind it."""
    client = rig.client()
    for partition_id in (1, 2):
        rig.assign(partition_id, durability="os")
    rare, often = client.open_producer(1), client.open_producer(2)
    for number in range(FRAMES):
        assert client.publish((1, client.frame(rare, number, [b"%30000d" % number]))) == [0, number]
        for i in range(number * 12, number * 12 + 12):
            assert client.publish((2, client.frame(often, i, [b"%60000d" % i]))) == [0, i]
    return client


def test_one_of_many_partitions_is_read_alone(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between its messages is not read, and each of them once."""
    rig = rigs(tail_bytes_max=0, segment_bytes=128 << 20)
    client = scattered(rig)
    log = rig.worker.state.logs[0]
    read, bytes_read = os.preadv, []

    def counted(fd: int, buffers: Any, place: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        count = read(fd, buffers, place)
        bytes_read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    client.subscribe(1, "s", consumer_id=1)
    assert client.receive(FRAMES) == [(i, b"%30000d" % i) for i in range(FRAMES)]
    own = sum(run.byte_count for run in log.runs(1, 0, 1 << 30))
    assert sum(bytes_read) <= 1.2 * own


@pytest.fixture
def cold(rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A log with scattered runs, none of which is in the page cache."""
    rig = rigs(tail_bytes_max=0, segment_bytes=128 << 20)
    scattered(rig)
    monkeypatch.setattr(rig.worker.state.logs[0], "read_cached", lambda _: None)
    return rig


def test_runs_that_a_thread_read_are_checked(cold: Rig) -> None:
    log, reader = cold.worker.state.logs[0], cold.worker.reader
    partition = cold.worker.state.catalog.by_id[1]
    runs = log.runs(1, 0, 1 << 30)
    path, place, _ = log.files(runs[1])[0]
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"?", place + 20_000)
    assert reader.read_run(partition, runs[0]) is None
    cold.turn(lambda: not reader.fetches, "the end of the fetch")
    assert bytes(reader.read_run(partition, runs[0])) == bytes(log.read_run(runs[0]))
    with pytest.raises(DataLoss, match=f"damaged at position {runs[1].position}"):
        reader.read_run(partition, runs[1])


@pytest.mark.parametrize("changed", ["epoch", "log"])
def test_runs_of_an_earlier_epoch_or_another_log_are_read_again(cold: Rig, changed: str) -> None:
    """Behind a failed sync other frames may stand where they stood; and a slot may have another log."""
    log, reader = cold.worker.state.logs[0], cold.worker.reader
    partition = cold.worker.state.catalog.by_id[1]
    (first, second, *_) = log.runs(1, 0, 1 << 30)
    assert reader.read_run(partition, first) is None
    cold.turn(lambda: not reader.fetches, "the end of the fetch")
    assert reader.read_run(partition, first) is not None
    log_id, epoch = reader._fetched[0].of
    reader._fetched[0].of = (log_id, epoch - 1) if changed == "epoch" else (log_id + 1, epoch)
    assert reader.read_run(partition, second) is None, "it is fetched anew"
    cold.turn(lambda: not reader.fetches, "the end of the fetch")


def test_a_fetch_takes_one_descriptor_of_each_segment_and_closes_it(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(tail_bytes_max=0, segment_bytes=128 << 20, segment_start_bytes=4 << 20)
    scattered(rig)
    log = rig.worker.state.logs[0]
    runs = log.runs(1, 0, 1 << 30)
    files = {path for run in runs for path, *_ in log.files(run)}
    assert len(runs) == FRAMES and len(files) > 1
    log.reader.fetch(runs)()  # the loop's own are open now
    before = set(os.listdir("/proc/self/fd"))
    work = log.reader.fetch(runs)
    assert len(set(os.listdir("/proc/self/fd")) - before) == len(files)
    assert {at: bytes(data) for at, data in work().items()} == {
        run.position: bytes(log.read_run(run)) for run in runs
    }
    assert set(os.listdir("/proc/self/fd")) == before


def test_small_messages_that_lie_close_are_read_with_what_lies_between(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand reads would take longer, and hold up the loop."""
    rig = rigs(tail_bytes_max=0)
    client = rig.client()
    for partition_id in (1, 2):
        rig.assign(partition_id, durability="os")
    rare, often = client.open_producer(1), client.open_producer(2)
    for number in range(FRAMES):
        assert client.publish((1, client.frame(rare, number, [b"x"]))) == [0, number]
        assert client.publish((2, client.frame(often, number, [b"%60000d" % number])))[0] == 0
    log = rig.worker.state.logs[0]
    disk = Disk(rig, monkeypatch)
    disk.let_go()
    monkeypatch.setattr(log.reader, "fetch", lambda _: pytest.fail("read one by one"))
    client.subscribe(1, "s", consumer_id=1)
    assert [offset for offset, _ in client.receive(FRAMES)] == list(range(FRAMES))
    assert disk.fetched
