"""The log: what a group costs, written and synced; what an index entry costs; how fast it recovers.

Every function reads back what it wrote.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.wal.index import Index
from danube_fast.wal.layout import RUN_DTYPE
from danube_fast.wal.log import Log
from tests.wal.rig import (
    LOG_ID,
    MIB,
    abandon,
    data_rows,
    make_frame,
    open_log,
    stamp_frame,
    start_log,
    wait_synced,
)

GROUP_BYTES = (4 * 1024, 256 * 1024)
SETTINGS = Settings(segment_bytes=64 * MIB, spare_segments=2, index_map_bytes=64 * MIB)


class _Writer:
    """Appends the same frame again and again, each time at its own place."""

    def __init__(self, log: Log, group_bytes: int) -> None:
        self.log = log
        self.frame = make_frame([random.Random(1).randbytes(group_bytes - 512)])
        self.offset = 0

    def append(self) -> None:
        """One group of one frame."""
        log, frame = self.log, self.frame
        position = log.reserve(len(frame))
        stamp_frame(
            frame, position, epoch=log.epoch, base_offset=self.offset, synced=log.synced_position
        )
        run = np.zeros(1, dtype=RUN_DTYPE)
        run["partition_id"], run["base_offset"], run["offset_span"] = 5, self.offset, 1
        run["position"], run["byte_count"], run["append_time_ns"] = position, len(frame), 1
        log.append([frame], len(frame), run)
        self.offset += 1


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = start_log(tmp_path, SETTINGS)
    yield made
    made.close()


def _note_rate(benchmark: Any, byte_count: int) -> None:
    if benchmark.stats:
        benchmark.extra_info["mb_per_s"] = byte_count / benchmark.stats.stats.min / 1e6


@pytest.mark.parametrize("group_bytes", GROUP_BYTES)
def test_append(benchmark: Any, log: Log, full_size: bool, group_bytes: int) -> None:
    writer = _Writer(log, group_bytes)
    rounds = 500 if full_size else 5
    benchmark.pedantic(writer.append, rounds=rounds, warmup_rounds=1)
    log.sync()
    wait_synced(log)
    _note_rate(benchmark, group_bytes)
    found = log.find(5, writer.offset - 1)
    assert found is not None
    assert found.base_offset == writer.offset - 1
    assert bytes(log.read_run(found)) == bytes(writer.frame)


@pytest.mark.parametrize("group_bytes", GROUP_BYTES)
def test_append_and_sync(benchmark: Any, log: Log, full_size: bool, group_bytes: int) -> None:
    writer = _Writer(log, group_bytes)

    def run() -> None:
        writer.append()
        log.sync()
        wait_synced(log)

    benchmark.pedantic(run, rounds=300 if full_size else 5, warmup_rounds=1)
    _note_rate(benchmark, group_bytes)
    assert log.synced_position == log.written_position


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path, LOG_ID, 256 * MIB, SystemClock())
    made.open()
    yield made
    made.close(clean=False)


def _runs(start: int, count: int) -> np.ndarray[Any, Any]:
    runs = np.zeros(count, dtype=RUN_DTYPE)
    numbers = np.arange(start, start + count)
    runs["partition_id"] = 1 + numbers % 100
    runs["base_offset"] = numbers // 100 * 10
    runs["offset_span"], runs["byte_count"] = 10, 4096
    runs["position"] = numbers * 4096
    runs["append_time_ns"] = 1 + numbers
    return runs


def test_index_add_and_find(benchmark: Any, index: Index, full_size: bool) -> None:
    count = 4096 if full_size else 256
    added = 0

    def run() -> None:
        nonlocal added
        assert index.add(_runs(added, count), (added + count) * 4096)
        added += count

    benchmark.pedantic(run, rounds=50 if full_size else 3)
    if benchmark.stats:
        benchmark.extra_info["ns_per_entry"] = benchmark.stats.stats.min * 1e9 / count
    last = next(index.runs(1 + (added - 1) % 100, (added - 1) // 100 * 10, 0))
    assert last.position == (added - 1) * 4096


def test_recovery(benchmark: Any, tmp_path: Path, full_size: bool) -> None:
    """Opening a log after a kill, without a snapshot: every byte is checked."""
    settings = msgspec.structs.replace(SETTINGS, spare_segments=0)
    log = start_log(tmp_path, settings)
    writer = _Writer(log, 64 * 1024)
    groups = 8000 if full_size else 20
    for _ in range(groups):
        writer.append()
    log.sync()
    wait_synced(log)
    written = log.written_position
    abandon(log)

    def run() -> list[tuple[int, int, int]]:
        opened = open_log(tmp_path, settings)
        rows = data_rows(opened)
        abandon(opened)
        return rows

    rows = benchmark.pedantic(run, rounds=3 if full_size else 1)
    assert [offset for _, offset, _ in rows] == list(range(groups))
    _note_rate(benchmark, written)
