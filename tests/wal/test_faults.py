"""A disk that fails: syncs that do not, writes that stop half-way."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE, Flag
from danube_fast.wal.layout import GROUP_ALIGNMENT
from danube_fast.wal.log import Log
from tests.wal.rig import (
    abandon,
    data_rows,
    make_frame,
    open_log,
    put,
    segments,
    stamp_frame,
    start_log,
    wait_synced,
    wait_until,
)


@contextmanager
def broken_descriptor(log: Log) -> Iterator[None]:
    """While this is open, fdatasync on the newest segment fails with EINVAL (it is a pipe)."""
    fd = log._chain[-1].fd
    good = os.dup(fd)
    reading, writing = os.pipe()
    os.dup2(writing, fd)
    try:
        yield
    finally:
        os.dup2(good, fd)
        for other in (good, reading, writing):
            os.close(other)


def fail_a_sync(log: Log) -> None:
    """What is written and not synced fails to sync."""
    with broken_descriptor(log):
        log.sync()
        wait_until(lambda: log.sync_fault is not None, "the failed sync")


def test_a_failed_sync_cuts_back_and_goes_on(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, ([b"durable"] for _ in range(3)))
    wait_synced(log)
    cut = log.synced_position
    put(log, ([b"lost"] for _ in range(2)), base_offset=3, sync=False)
    written = log.written_position
    fail_a_sync(log)
    assert log.sync_fault == (errno.EINVAL, written)
    log.sync()
    put(log, [[b"also lost"]], base_offset=5)
    assert log.synced_position == cut, "synced after a failed sync"

    assert log.cut_after_fault() == cut
    assert (log.epoch, log.written_position, log.synced_position) == (2, cut, cut)
    assert log.sync_fault is None
    assert log.find(5, 3) is None, "the tail table still knows what was cut"
    put(log, [[b"again"]], base_offset=3)
    wait_synced(log)
    run = log.find(5, 3)
    assert run is not None and b"again" in log.read_run(run)
    abandon(log)

    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0, 1, 2, 3]
    log.begin_epoch([b"x"])
    assert log.epoch == 3
    log.close()
    assert str(cut) in segments(tmp_path)[-1].name


def test_a_cut_at_the_start_of_a_segment(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, ([bytes(900_000)] for _ in range(4)))
    wait_synced(log)
    put(log, [[bytes(900_000)]], base_offset=4, sync=False)
    assert len(segments(tmp_path)) == 2
    cut = log.synced_position
    assert int(segments(tmp_path)[1].stem) == cut
    fail_a_sync(log)
    assert log.cut_after_fault() == cut
    assert [int(path.stem) for path in segments(tmp_path)] == [0, cut]
    put(log, [[b"new"]], base_offset=4)
    wait_synced(log)
    log.close()
    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0, 1, 2, 3, 4]
    log.close()


@contextmanager
def broken_first_segment(log: Log) -> Iterator[None]:
    """Fills the first segment unsynced; while this is open its sync fails."""
    put(log, ([bytes(900_000)] for _ in range(4)), base_offset=1, sync=False)
    with broken_descriptor(log):
        yield


def test_a_cut_takes_whole_segments_back(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"durable"]])
    wait_synced(log)
    cut = log.synced_position
    with broken_first_segment(log):
        put(log, ([bytes(900_000)] for _ in range(8)), base_offset=5, sync=False)
        assert len(segments(tmp_path)) >= 3
        wait_until(lambda: log.sync_fault is not None, "the failed sync")
    log.cut_after_fault()
    assert [int(path.stem) for path in segments(tmp_path)] == [0, cut]
    put(log, [[b"new"]], base_offset=1)
    wait_synced(log)
    abandon(log)
    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0, 1]
    log.close()


def test_three_failures_within_a_minute_refuse_publishes(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"kept"]])
    wait_synced(log)
    for turn in range(3):
        assert not log.refusing
        put(log, [[b"x"]], base_offset=1, sync=False)
        fail_a_sync(log)
        log.cut_after_fault()
        if turn < 2:
            log.reserve(100)
    assert log.refusing
    with pytest.raises(Unavailable, match="restart the broker"):
        log.reserve(100)
    log.append_control([b"still allowed"])
    run = log.find(5, 0)
    assert run is not None
    log.read_run(run)
    log.close()
    log = start_log(tmp_path)
    assert not log.refusing
    put(log, [[b"y"]], base_offset=1)
    log.close()


def test_cut_without_a_fault_is_refused(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    with pytest.raises(FailedPrecondition, match="no sync failed"):
        log.cut_after_fault()
    log.close()


def test_a_cut_that_finds_no_file_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = start_log(tmp_path)
    put(log, [[b"x"]], sync=False)
    fail_a_sync(log)
    wait_until(lambda: not log._spares._thread.is_alive(), "the reserve")  # type: ignore[union-attr]
    log._spares.reserve_path.unlink(missing_ok=True)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResourceExhausted, match="free space"):
        log.cut_after_fault()
    assert log.sync_fault is not None
    assert log.epoch == 1
    monkeypatch.undo()
    log.cut_after_fault()
    put(log, [[b"y"]])
    wait_synced(log)
    log.close()


def test_a_failed_last_sync_is_told_by_close(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"x"]], sync=False)
    with broken_descriptor(log), pytest.raises(Internal, match="sync"):
        log.close(b"state")
    log = open_log(tmp_path)
    assert log.snapshot is None, "a clean snapshot of what was not durable"
    log.close()


def test_a_snapshot_waits_for_the_log(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"x"]], sync=False)
    assert log.save_snapshot(log.written_position, b"too early")
    assert not log.save_snapshot(log.written_position, b"another")
    fail_a_sync(log)
    log.cut_after_fault()
    assert log.snapshot_position == 0
    assert not list(tmp_path.glob("*.snap"))
    put(log, [[b"y"]])
    at = log.written_position
    log.save_snapshot(at, b"right")
    wait_until(lambda: log.snapshot_position == at, "the snapshot")
    log.close()


def test_a_write_that_stops_half_way_leaves_no_ghost(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    frames = [make_frame([bytes([index]) * 3936]) for index in range(6)]
    assert len(frames[0]) % GROUP_ALIGNMENT == 0, "each frame starts a page"
    total = sum(map(len, frames))
    position = at = log.reserve(total)
    for index, frame in enumerate(frames):
        stamp_frame(frame, at, epoch=log.epoch, base_offset=index)
        at += len(frame)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = log._chain[-1].file_offset(position) + total - len(frames[-1]) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DanubeError, match="free space"):
            log.append(frames, total)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.written_position == position
    assert log.epoch == 2, "whole frames of this epoch may stand there"
    with pytest.raises(FailedPrecondition, match="call reserve"):
        log.append(frames, total)
    put(log, [[b"short"]])
    wait_synced(log)
    abandon(log)
    log = open_log(tmp_path)
    assert [row[1] for row in data_rows(log)] == [0], "frames of the failed group came back"
    log.close()


def test_the_new_epoch_is_durable_before_anything_in_it(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"x"]], sync=False)
    fail_a_sync(log)
    cut = log.cut_after_fault()
    position = log.reserve(100)
    assert position == cut + GROUP_ALIGNMENT
    assert log.synced_position == position
    barrier = np.frombuffer(log.read(cut, HEADER_BYTES), HEADER_DTYPE)[0]
    assert barrier["flags"] == Flag.PAD | Flag.CONTROL
    assert barrier["epoch"] == 2
    log.close()
