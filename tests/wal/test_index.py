"""Finding runs: the index, the tail table, and that the index is only a cache."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss
from danube_fast.wal.feed import RunTable
from danube_fast.wal.index import Index, meta_crc
from danube_fast.wal.layout import RUN_DTYPE
from danube_fast.wal.log import Log
from danube_fast.wal.tail import TailTable
from tests.wal.rig import (
    LOG_ID,
    SETTINGS,
    abandon,
    data_rows,
    open_log,
    put,
    start_log,
    wait_synced,
    wait_until,
)

SMALL = msgspec.structs.replace(SETTINGS, segment_bytes=128 * 1024)


def answers(log: Log, offsets: range) -> list[Any]:
    """Everything that a lookup can say."""
    found: list[Any] = [log.find(partition, at) for partition in (4, 5, 6, 7) for at in offsets]
    found += [log.runs(5, at, 20_000) for at in offsets]
    found += [log.find_time(partition, at) for partition in (5, 6) for at in offsets]
    return found


def fill(log: Log) -> None:
    """Two partitions with a hole in the offsets of one."""
    offset = put(log, ([b"a" * 700] * 3 for _ in range(100)))
    put(log, ([b"b"] for _ in range(40)), partition_id=6, time_ns=50)
    put(log, ([b"c" * 90] * 2 for _ in range(100)), base_offset=offset + 10)


def settle(log: Log) -> None:
    """Everything synced, and everything synced in the index."""
    wait_synced(log)
    while len(log._runs._tail):
        assert log._runs.work(log.synced_position, idle=True), "the index takes nothing more"


def say(transaction: Any, **values: bytes) -> None:
    """Change what the index says of itself, the checksum too."""
    changes = {name.encode(): value for name, value in values.items()}
    found = {bytes(key): bytes(value) for key, value in transaction.cursor()} | changes
    for key, value in {**changes, b"crc": meta_crc(found)}.items():
        transaction.put(key, value)


def test_lookups_by_offset_and_time(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    fill(log)
    for _ in range(2):
        for offset in (0, 1, 2, 3, 150, 299):
            run = log.find(5, offset)
            assert run is not None
            assert run.base_offset == offset // 3 * 3
            assert run.end_offset == run.base_offset + 3
        gap = log.find(5, 305)
        assert gap is not None and gap.base_offset == 310
        assert log.find(5, 510) is None
        assert log.find(4, 0) is None
        assert log.find(7, 0) is None
        runs = log.runs(5, 4, 10_000)
        assert [run.base_offset for run in runs] == [3 + 3 * index for index in range(len(runs))]
        total = sum(run.byte_count for run in runs)
        assert total >= 10_000 > total - runs[-1].byte_count
        assert len(log.runs(5, 0, 1)) == 1
        assert [run.end_offset for run in log.runs(5, 0, 1 << 40)][-1] == 510
        assert log.find_time(5, 0) == 0
        assert log.find_time(5, 2) == 3
        assert log.find_time(5, 10_000) is None
        assert log.find_time(6, 50) == 0
        assert log.find_time(6, 51) is None
        settle(log)
    log.close()


def test_index_and_tail_table_answer_alike(tmp_path: Path) -> None:
    log = start_log(tmp_path, msgspec.structs.replace(SETTINGS, index_flush_entries=1 << 20))
    fill(log)
    wait_synced(log)
    offsets = range(0, 520, 7)
    before = answers(log, offsets)
    assert len(log._runs._tail) == 240
    settle(log)
    assert answers(log, offsets) == before
    log.close()


@pytest.mark.parametrize("how", ["deleted", "foreign", "other boot", "garbage", "kept"])
def test_the_index_is_only_a_cache(tmp_path: Path, how: str) -> None:
    log = start_log(tmp_path, SMALL)
    fill(log)
    wait_synced(log)
    log.save_snapshot(log.written_position, b"state")
    wait_until(lambda: log.snapshot_position == log.written_position, "the snapshot")
    put(log, ([b"d"] for _ in range(20)), base_offset=600)
    settle(log)
    offsets = range(0, 640, 11)
    before = answers(log, offsets)
    abandon(log)
    index = tmp_path / "index"
    if how == "deleted":
        shutil.rmtree(index)
    elif how == "garbage":
        (index / "data.mdb").write_bytes(os.urandom(100_000))
    elif how in ("foreign", "other boot"):
        with lmdb.open(str(index), max_dbs=3, lock=False) as environment:
            meta = environment.open_db(b"meta")
            with environment.begin(write=True, db=meta) as transaction:
                if how == "foreign":
                    say(transaction, log_id=bytes(8))
                else:
                    say(transaction, boot_id=b"yesterday", indexed=(1 << 40).to_bytes(8, "little"))
    log = open_log(tmp_path, SMALL)
    assert [row[1] for row in data_rows(log)] == list(range(600, 620))
    log.begin_epoch([b"x"])
    assert answers(log, offsets) == before
    log.close(b"state")
    log = start_log(tmp_path, SMALL)
    assert answers(log, offsets) == before
    log.close()


def test_catching_up_reads_only_what_is_not_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = start_log(tmp_path, SMALL)
    fill(log)
    settle(log)
    log.close(b"state")
    asked: list[int] = []
    original = os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        asked.append(at)
        return original(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    log = open_log(tmp_path, SMALL)
    assert data_rows(log) == []
    opened = {
        os.readlink(f"/proc/self/fd/{segment.fd}") for segment in log._chain if segment.fd > 0
    }
    log.close()
    assert len(opened) == 1, "segments were read that the snapshot and the index cover"
    assert asked


def test_trim_recycles_and_its_entries_are_swept(tmp_path: Path) -> None:
    log = start_log(tmp_path, msgspec.structs.replace(SMALL, spare_segments=1))
    put(log, ([bytes(3000)] for _ in range(200)), time_ns=None)
    settle(log)
    assert log.trim(log.written_position) == 0, "trimmed without a snapshot"
    middle = log.find(5, 100)
    assert middle is not None
    log.save_snapshot(log.written_position, b"s")
    wait_until(lambda: log.snapshot_position == log.written_position, "the snapshot")
    before = log.bytes_on_disk
    assert log.trim(middle.position) >= 2
    assert log.bytes_on_disk < before
    assert 0 < log.oldest_position <= middle.position
    first = log.find(5, 0)
    assert first is not None and first.position >= log.oldest_position
    assert log.find_time(5, 0) == first.base_offset
    log.read_run(first)
    with pytest.raises(DataLoss, match="was trimmed"):
        log.read(0, 10)
    while log._runs.work(log.synced_position, idle=True):
        pass
    environment = log._runs._index._environment
    with environment.begin() as transaction:
        kept = transaction.stat(log._runs._index._offsets)["entries"]
        times = transaction.stat(log._runs._index._times)["entries"]
    assert kept == times == 200 - first.base_offset
    assert log.find(5, 0) == first
    log.close(b"end")
    log = start_log(tmp_path, SMALL)
    assert log.find(5, 0) == first
    log.close()


def test_trim_keeps_what_the_older_snapshot_needs(tmp_path: Path) -> None:
    log = start_log(tmp_path, SMALL)
    positions = []
    for index in range(3):
        put(log, ([bytes(3000)] for _ in range(60)), base_offset=60 * index)
        wait_synced(log)
        positions.append(log.written_position)
        assert log.snapshot_due
        log.save_snapshot(positions[-1], b"s%d" % index)
        wait_until(lambda: log.snapshot_position == positions[-1], "the snapshot")
        assert not log.snapshot_due
    assert len(list(tmp_path.glob("*.snap"))) == 2
    log.trim(log.written_position)
    assert log.oldest_position <= positions[1]
    assert log.oldest_position > positions[0] - SMALL.segment_bytes
    log.close()


def test_a_dropped_partition_is_gone_at_once_and_for_good(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    fill(log)
    settle(log)
    put(log, [[b"late"]], base_offset=510)
    log.drop_partition(5)
    assert log.find(5, 0) is None
    assert log.find_time(5, 0) is None
    assert log.find(6, 0) is not None
    settle(log)
    while log._runs.work(log.synced_position, idle=True):
        pass
    log.close()
    log = start_log(tmp_path)
    assert log.find(5, 0) is None
    assert log.find(6, 39) is not None
    log.close()


def test_a_full_disk_under_the_index_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = start_log(tmp_path)
    put(log, ([b"a"] for _ in range(50)))
    wait_synced(log)
    index = log._runs._index
    original = index._put

    def full(*_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(index, "_put", full)
    log._runs.work(log.synced_position, idle=True)
    assert log._runs._index.fault is not None and "free space" in log._runs._index.fault
    put(log, ([b"b"] for _ in range(50)), base_offset=50)
    assert [run.base_offset for run in log.runs(5, 0, 1 << 40)] == list(range(100))
    monkeypatch.setattr(index, "_put", original)
    monkeypatch.setattr(index, "_retry_at_ns", 0)
    settle(log)
    assert log._runs._index.fault is None
    assert [run.base_offset for run in log.runs(5, 0, 1 << 40)] == list(range(100))
    log.close()


def test_the_map_grows_before_it_is_full(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", LOG_ID, 256 * 1024, SystemClock())
    index.open()
    for step in range(20):
        runs = np.zeros(1000, dtype=RUN_DTYPE)
        runs["base_offset"] = np.arange(1000) + 1000 * step
        runs["append_time_ns"] = runs["base_offset"]
        runs["offset_span"] = 1
        runs["position"] = 4096 * runs["base_offset"]
        assert index.add(runs, int(runs["position"][-1]) + 4096), index.fault
    assert (tmp_path / "index" / "data.mdb").stat().st_size > 256 * 1024
    assert len(list(index.runs(0, 0, 0))) == 20_000
    index.close(clean=True)


def test_a_change_of_every_page_finds_room_in_the_smallest_map(tmp_path: Path) -> None:
    """Rows all over the index, and their removal: both copy nearly all of its pages at once."""
    index = Index(tmp_path / "index", LOG_ID, 1 << 20, SystemClock())
    index.open()
    mixed = np.random.default_rng(1).permutation(20_000)
    for rows in np.split(mixed, 20):
        runs = np.zeros(1000, dtype=RUN_DTYPE)
        runs["partition_id"] = rows % 500
        runs["base_offset"] = rows
        runs["append_time_ns"] = rows
        runs["offset_span"] = 1
        runs["position"] = 4096 * rows
        assert index.add(runs, 4096 * 20_000), index.fault
    size = (tmp_path / "index" / "data.mdb").stat()
    assert size.st_blocks * 512 >= size.st_size >= index._map_bytes, "blocks for all of the map"
    index.start_sweep(4096 * 10_000)
    while index.sweep(512):
        assert index.fault is None
    assert index.fault is None
    assert sum(len(list(index.runs(part, 0, 0))) for part in range(500)) == 10_000
    index.close(clean=True)


def test_no_room_for_the_map_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.posix_fallocate

    def refuse(fd: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("data.mdb"):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    log = start_log(tmp_path)
    put(log, [[b"x"]])
    assert log.find(5, 0) is not None
    log.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 400)),
            st.tuples(st.just("drop"), st.integers(0, 300)),
            st.tuples(st.just("cut"), st.integers(0, 3000)),
        ),
        max_size=30,
    )
)
def test_the_tail_table_is_a_queue(steps: list[tuple[str, int]]) -> None:
    table, position = TailTable(), 0
    model: list[int] = []
    for what, number in steps:
        if what == "add":
            runs = np.zeros(number, dtype=RUN_DTYPE)
            runs["position"] = position + np.arange(number)
            table.add(runs)
            model += range(position, position + number)
            position += number
        elif what == "drop":
            count = min(number, len(model))
            table.drop_first(count)
            del model[:count]
        else:
            table.drop_from(number)
            model = [at for at in model if at < number]
            position = min(position, max(number, 0)) if model or number < position else position
        assert table.rows["position"].tolist() == model


def test_a_partition_that_comes_back_is_found_where_it_is_now(tmp_path: Path) -> None:
    """Its entries of before are hidden when it leaves, removed before it returns, and those of now are
    taken in; after a rebuild, too, the newer place of a frame counts."""
    log = start_log(tmp_path, SMALL)
    put(log, ([b"a" * 90] for _ in range(300)))
    settle(log)
    assert log.find(5, 0) is not None
    log.drop_partition(5)
    assert log.find(5, 0) is None
    slices = 1
    while not log.purge_partition(5):
        slices += 1
    assert log.find(5, 0) is None
    put(log, ([b"a" * 90] for _ in range(300)), base_offset=0)
    settle(log)
    placed = [log.find(5, offset) for offset in range(300)]
    assert len({run.position for run in placed if run is not None}) == 300
    first = placed[0]
    assert first is not None
    assert first.position > 300 * 90, "the first life, which is garbage"
    log.close()
    shutil.rmtree(tmp_path / "index")
    again = start_log(tmp_path, SMALL)
    assert [again.find(5, offset) for offset in range(300)] == placed
    again.close()


# ---------------------------------------------------------------- runs that were written again


def model_find(model: dict[int, int], offset: int, oldest: int) -> tuple[int, int] | None:
    """(base offset, position) of the first run that ends behind `offset`; runs are of 2 offsets."""
    living = [(base, at) for base, at in model.items() if at >= oldest and base + 2 > offset]
    return min(living, default=None)


@settings(
    deadline=None, max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("new"), st.integers(1, 20)),
            st.tuples(st.just("again"), st.lists(st.integers(0, 60), min_size=1, max_size=15)),
            st.tuples(st.just("flush"), st.integers(0, 100)),
            st.tuples(st.just("trim"), st.integers(0, 80)),
        ),
        max_size=14,
    )
)
def test_runs_that_were_written_again_are_found_where_they_stand_now(tmp_path, steps):
    """Against a dict: whatever is in the index, in the tail table, in both, swept or not."""
    table = RunTable(
        tmp_path / os.urandom(6).hex(), 1, SETTINGS, SystemClock(), fake_chain(lambda: oldest)
    )
    table.note_rewritten(5)
    model: dict[int, int] = {}
    position = oldest = 0
    times: dict[int, int] = {}

    def append(bases: list[int]) -> None:
        nonlocal position
        runs = np.zeros(len(bases), RUN_DTYPE)
        for row, base in zip(runs, bases, strict=True):
            row["partition_id"], row["base_offset"], row["offset_span"] = 5, base, 2
            row["position"], row["byte_count"] = position, 100
            row["append_time_ns"] = times.setdefault(base, base // 6)
            model[base] = position
            position += 100
        table.appended(runs)

    for what, value in steps:
        if what == "new":
            append([2 * (len(model) + i) for i in range(value)])
        elif what == "again":
            append([base for base in sorted({2 * v for v in value}) if base in model])
        elif what == "flush":
            table.work(position * value // 100, idle=True)
        else:
            oldest = max(oldest, position * value // 100)
            table.start_sweep(oldest)
            while table._index.sweep(3):
                pass
        for offset in range(0, 2 * len(model) + 2, 3):
            run = table.find(5, offset)
            found = None if run is None else (run.base_offset, run.position)
            assert found == model_find(model, offset, oldest)
        wanted = sorted((base, at) for base, at in model.items() if at >= oldest)
        for limit in (1, 350, 1 << 40):
            runs = [(run.base_offset, run.position) for run in table.runs(5, 0, limit)]
            assert runs == wanted[: -(-limit // 100)]
        for time_ns in range(30):
            later = [base for base, _ in wanted if times[base] >= time_ns]
            assert table.find_time(5, time_ns) == (later[0] if later else None)
    table.work(position, idle=True)
    living = sorted(base for base, at in model.items() if at >= oldest)
    table.start_sweep(oldest + 1)
    while table._index.sweep(7):
        pass
    with table._index._environment.begin(db=table._index._times) as transaction:
        assert transaction.stat()["entries"] <= len({times[base] for base in living}) + 1
    table.close(position, clean=False)
    shutil.rmtree(table._directory)


def fake_chain(oldest: Any) -> Any:
    """A chain of which only the oldest position matters."""

    class Oldest:
        @property
        def oldest_position(self) -> int:
            return int(oldest())

    return Oldest()
