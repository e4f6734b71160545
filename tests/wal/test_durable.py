"""Which way a disk is found to take small groups best, and a sync thread that writes them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from danube_fast.frame.kernel import direct
from danube_fast.wal.durable_writes import Way, best_way, choose_way, probe_disk
from danube_fast.wal.sync import SyncThread, queue_write

BOTH, ONE, DIRECT = Way.FDATASYNC, Way.DSYNC, Way.DIRECT
SECONDS = 10.0
call_queue_write = direct(queue_write)


@pytest.mark.parametrize(
    ("times", "way"),
    [
        ({}, BOTH),
        ({BOTH: 100.0}, BOTH),
        ({BOTH: 100.0, ONE: 84.0}, ONE),
        ({BOTH: 100.0, ONE: 86.0}, BOTH),
        ({ONE: 86.0}, ONE),
        ({BOTH: 100.0, ONE: 80.0, DIRECT: 60.0}, ONE),
        ({BOTH: 1000.0, ONE: 1000.0, DIRECT: 60.0}, DIRECT),
        ({BOTH: 100.0, DIRECT: 60.0}, BOTH),
    ],
)
def test_the_way_that_is_taken(times: dict[Way, float], way: Way) -> None:
    assert best_way(times) is way


def test_a_probe_measures_what_the_file_system_knows(tmp_path: Path) -> None:
    times = probe_disk(tmp_path, rounds=2)
    assert BOTH in times and all(us > 0 for us in times.values())
    assert list(tmp_path.iterdir()) == [], "the probe left a file behind"


def test_without_a_file_to_write_nothing_is_measured(tmp_path: Path) -> None:
    assert probe_disk(tmp_path / "missing") == {}
    assert choose_way(tmp_path / "missing") is BOTH


def write_by(sync: SyncThread, fd: int, data: bytearray, position: int, place: int) -> None:
    """Give a group to the thread."""
    start = (ctypes.c_char * len(data)).from_buffer(data)
    vector = np.array([ctypes.addressof(start), len(data)], np.int64)
    memory, bell = sync.queue
    assert call_queue_write(memory, bell, fd, os.RWF_DSYNC, position, vector.ctypes.data, place)


def test_the_thread_writes_a_group_and_tells_how_far_all_is_durable(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    sync = SyncThread(-1)
    sync.start(0)
    try:
        group, behind = bytearray(b"a" * 4096), bytearray(b"b" * 4096)
        write_by(sync, fd, group, 4096, 0)
        write_by(sync, fd, behind, 8192, 4096)
        sync.push(fd, 8192 + 512)
        assert sync.wait(8192 + 512, SECONDS), "nothing is synced"
        assert os.pread(fd, 8192, 0) == bytes(group + behind)
        assert sum(sync.times[:-1]) == 3, "each group is a call of its own"
    finally:
        assert sync.stop()
        os.close(fd)


def test_a_write_that_fails_is_a_sync_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    sync = SyncThread(-1)
    sync.start(0)
    try:
        write_by(sync, fd, bytearray(4096), 4096, 0)
        sync.drain()
        assert sync.fault is not None and sync.fault[1] == 4096
        assert sync.synced_position == 0
    finally:
        assert sync.stop()
        os.close(fd)
