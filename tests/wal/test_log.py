"""The ordinary life of a log: write, sync, read, close, open again."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
)
from danube_fast.frame.crc import crc32c
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE, Flag
from danube_fast.wal.index import Run
from danube_fast.wal.layout import GROUP_ALIGNMENT, SegmentHeader
from danube_fast.wal.log import Log
from tests.wal.rig import (
    LOG_ID,
    MIB,
    SETTINGS,
    abandon,
    data_rows,
    descriptors_of,
    make_frame,
    open_log,
    put,
    segments,
    stamp_frame,
    start_log,
    wait_synced,
    wait_until,
)


def test_a_fresh_log_starts_with_a_synced_control_frame(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert log.snapshot is None
    assert list(log.replay()) == []
    position = log.begin_epoch([b"one", b"two"])
    assert (position, log.epoch) == (0, 1)
    assert log.synced_position == log.written_position == GROUP_ALIGNMENT
    log.close()

    again = open_log(tmp_path)
    rows = np.concatenate([block.rows for block in again.replay()])
    assert rows["flags"].tolist() == [Flag.CONTROL]
    assert rows["message_count"].tolist() == [2]
    assert rows["epoch"].tolist() == [1]
    assert again.epoch == 1, "before the start: the highest that was seen"
    again.begin_epoch([])
    assert again.epoch == 2
    again.close()


def test_what_was_written_comes_back_in_order(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, ([b"%d" % index] * 3 for index in range(200)))
    put(log, ([b"other"] for _ in range(50)), partition_id=6)
    wait_synced(log)
    log.close()
    again = open_log(tmp_path)
    rows = data_rows(again)
    assert [row[1] for row in rows if row[0] == 5] == list(range(0, 600, 3))
    assert [row[1] for row in rows if row[0] == 6] == list(range(50))
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)
    again.close()


def test_groups_of_several_frames_and_many_buffers(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    frames = [make_frame([b"m%d" % index]) for index in range(3000)]  # over IOV_MAX buffers
    total = sum(map(len, frames))
    position = at = log.reserve(total)
    for index, frame in enumerate(frames):
        stamp_frame(frame, at, epoch=log.epoch, base_offset=index)
        at += len(frame)
    end = log.append(frames, total)
    assert end % GROUP_ALIGNMENT == 0
    assert log.read(position, total) == b"".join(frames)
    log.sync()
    wait_synced(log)
    abandon(log)
    again = open_log(tmp_path)
    assert [row[1] for row in data_rows(again)] == list(range(3000))
    again.close()


def test_a_group_is_closed_by_a_pad_frame_and_aligned(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    for size in (1, 3700, 3800, 3900, 3950, 4096, 8000):
        frame = make_frame([bytes(size)])
        position = log.reserve(len(frame))
        assert position % GROUP_ALIGNMENT == 0
        stamp_frame(frame, position, epoch=log.epoch)
        end = log.append([frame], len(frame))
        assert end % GROUP_ALIGNMENT == 0
        if end > position + len(frame):
            head = log.read(position + len(frame), HEADER_BYTES)
            pad = np.frombuffer(head, HEADER_DTYPE)[0]
            assert pad["flags"] == Flag.PAD | Flag.CONTROL
            assert (pad["message_count"], pad["partition_id"]) == (0, 0)
            assert pad["frame_bytes"] == end - position - len(frame)
            assert pad["log_position"] == position + len(frame)
            assert (pad["log_id"], pad["epoch"]) == (LOG_ID, log.epoch)
    log.close()


def test_only_whole_pages_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a page that is not in the page cache would have to be read from the disk first."""
    log = start_log(tmp_path)
    write, written = os.pwritev, []

    def note(fd: int, buffers: Any, place: int) -> int:
        count = write(fd, buffers, place)
        written.append((place, count))
        return count

    monkeypatch.setattr(os, "pwritev", note)
    for size in (0, 1, 3700, 3800, 3900, 3950, 4096, 8000):
        put(log, [[bytes(size)]])
    log.append_control([b"record"])
    log.write_marker()
    assert len(written) >= 9
    assert all(place % GROUP_ALIGNMENT == count % GROUP_ALIGNMENT == 0 for place, count in written)
    log.close()


def test_a_cached_read_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = start_log(tmp_path)
    put(log, ([b"%d" % index * 9000] for index in range(20)))
    (run, *_) = log.runs(5, 0, 1)
    assert log.read_cached(run) == log.read_run(run)
    read, advised = os.preadv, []

    def cold(fd: int, buffers: Any, place: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        return read(fd, buffers, place)

    def partly(fd: int, buffers: Any, place: int, flags: int = 0) -> int:
        return read(fd, [buffers[0][:100]] if flags else buffers, place)

    monkeypatch.setattr(os, "posix_fadvise", lambda *_: advised.append(1))
    for answer in (cold, partly):
        monkeypatch.setattr(os, "preadv", answer)
        assert log.read_cached(run) is None
    assert not advised, "that can wait for the disk, too"
    monkeypatch.undo()
    before = descriptors_of(tmp_path)
    assert before
    fetch = log.prefetch(run, 1 << 20)
    for path in segments(tmp_path):  # a segment that is trimmed meanwhile does no harm
        path.rename(path.with_suffix(".away"))
    fetch()
    assert descriptors_of(tmp_path) == before
    for path in tmp_path.glob("*.away"):
        path.rename(path.with_suffix(".seg"))
    log.close()


def test_segments_roll_and_positions_are_contiguous(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, ([bytes(200_000)] for _ in range(60)))
    wait_synced(log)
    log.close()
    paths = segments(tmp_path)
    assert len(paths) >= 3
    for path in paths:
        assert path.stat().st_size == SETTINGS.segment_bytes
        header = SegmentHeader.decode(path.read_bytes()[:4096], str(path))
        assert header.first_position == int(path.stem)
        assert header.first_position % GROUP_ALIGNMENT == 0
    again = open_log(tmp_path)
    assert len(data_rows(again)) == 60
    again.close()


def test_reads_go_across_segments(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, ([bytes([index]) * 300_000] for index in range(30)))
    boundary = int(segments(tmp_path)[1].stem)
    whole = log.read(0, log.written_position)
    assert log.read(boundary - 5000, 10_000) == whole[boundary - 5000 : boundary + 5000]
    assert log.read(boundary - 1, 2) == whole[boundary - 1 : boundary + 1]
    with pytest.raises(InvalidArgument, match="not written yet"):
        log.read(log.written_position - 1, 2)
    log.close()


def syncs(log: Log) -> int:
    """Calls of fdatasync that succeeded."""
    return sum(log.syncs.times[:-1])


def test_wake_fd_is_signalled_after_a_sync(tmp_path: Path) -> None:
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        log = start_log(tmp_path, wake_fd=wake)
        os.eventfd_read(wake)
        before = syncs(log)
        put(log, [[b"x"]])
        assert select.select([wake], [], [], 60)[0], "no wake-up within 60 s"
        wait_synced(log)
        assert syncs(log) > before
        log.close()
    finally:
        os.close(wake)


def test_the_end_of_a_quiet_sync_wakes_nobody_unless_it_failed_or_is_asked_for(
    tmp_path: Path,
) -> None:
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def is_woken() -> bool:
        if not select.select([wake], [], [], 0)[0]:
            return False
        os.eventfd_read(wake)
        return True

    log = start_log(tmp_path, wake_fd=wake)
    try:
        assert is_woken()
        log.append_control([b"a cursor"])
        log.sync(quiet=True)
        wait_synced(log)
        wait_until(lambda: not log.syncs.backlog, "the end of the sync thread's turn")
        assert not is_woken()
        log.sync(again=True)
        assert select.select([wake], [], [], 60)[0], "no wake-up within 60 s"
        wait_until(lambda: not log.syncs.backlog and is_woken(), "the end of the other sync")
        log._appender.is_put_off = (
            True  # a waiter asked while the disk hung: not lost, nor made quiet
        )
        log.sync(quiet=True)
        assert select.select([wake], [], [], 60)[0], "no wake-up within 60 s"
        wait_until(lambda: not log.syncs.backlog and is_woken(), "the end of what was put off")
        read_end, write_end = os.pipe()  # fdatasync on a pipe fails with EINVAL
        try:
            log.syncs.push(write_end, log.written_position + 1, quiet=True)
            assert select.select([wake], [], [], 60)[0], "nothing told of a fault within 60 s"
            assert log.sync_fault is not None
        finally:
            os.close(read_end)
            os.close(write_end)
    finally:
        abandon(log)
        os.close(wake)


def test_many_queued_syncs_share_calls(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    before = syncs(log)
    put(log, ([b"x"] for _ in range(500)))
    wait_synced(log)
    assert 1 <= syncs(log) - before <= 500
    log.close()


def test_a_group_must_be_stamped_for_its_place(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    frame = make_frame([b"x"])
    position = log.reserve(len(frame))
    for wrong in ({"position": position + 4096, "epoch": 1}, {"position": position, "epoch": 7}):
        with pytest.raises(Internal, match="stamp it again"):
            log.append([stamp_frame(frame, **wrong)], len(frame))
    stamp_frame(frame, position, epoch=1)
    with pytest.raises(InvalidArgument, match="bytes announced"):
        log.append([frame], len(frame) + 8)
    assert log.written_position == position
    log.close()


def test_a_group_that_fits_no_segment_is_refused(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    with pytest.raises(InvalidArgument, match="raise segment_bytes"):
        log.reserve(SETTINGS.segment_bytes)
    log.reserve(SETTINGS.segment_bytes - 2 * 4096)
    log.close()


def test_order_of_the_start_is_enforced(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(FailedPrecondition, match="begin_epoch"):
        log.reserve(100)
    with pytest.raises(FailedPrecondition, match="replay"):
        log.begin_epoch([b""])
    list(log.replay())
    log.begin_epoch([b"x"])
    with pytest.raises(FailedPrecondition, match="one epoch only"):
        log.begin_epoch([b"x"])
    log.close()
    log.close()


def test_a_second_open_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    with pytest.raises(FailedPrecondition, match=f"in use by process {os.getpid()}"):
        open_log(tmp_path, lock_timeout_ms=50)
    log.close()
    start_log(tmp_path).close()


def test_another_logs_folder_is_refused(tmp_path: Path) -> None:
    start_log(tmp_path).close()
    with pytest.raises(FailedPrecondition, match="belongs to log"):
        Log.open(tmp_path, log_id=1, settings=SETTINGS, clock=SystemClock())
    start_log(tmp_path).close()  # and the lock was let go


def test_markers_tell_what_is_durable_once(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"x"]])
    wait_synced(log)
    synced = log.synced_position
    assert log.write_marker()
    wait_synced(log)
    assert not log.write_marker()
    pad = np.frombuffer(log.read(synced, HEADER_BYTES), HEADER_DTYPE)[0]
    assert pad["synced_position"] == synced
    assert log.written_position == synced + GROUP_ALIGNMENT
    put(log, [[b"y"]], base_offset=1)
    wait_synced(log)
    assert log.write_marker()
    log.close()


def test_clean_close_is_told_from_a_kill(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"x"]])
    log.close(b"the state")
    again = open_log(tmp_path)
    assert again.snapshot is not None
    assert again.snapshot[1] == b"the state"
    assert data_rows(again) == []
    assert again._recovery.cut == again.snapshot[0]
    again.begin_epoch([b"x"])
    abandon(again)
    third = open_log(tmp_path)
    assert data_rows(third) == []
    assert third.snapshot is not None
    assert third._recovery.cut > third.snapshot[0]
    third.close()


def test_a_full_disk_leaves_nothing_written(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    segment = log._chain[-1]
    frame = make_frame([b"x" * 1000])
    position = log.reserve(len(frame))
    stamp_frame(frame, position, epoch=log.epoch)
    good = os.dup(segment.fd)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, segment.fd)
    os.close(full)
    with pytest.raises(ResourceExhausted, match=r"No space left.*free space"):
        log.append([frame], len(frame))
    os.dup2(good, segment.fd)
    os.close(good)
    assert (log.written_position, log.epoch) == (position, 1)
    log.append([frame], len(frame))  # nothing reached the file: the same stamp is right
    log.sync()
    wait_synced(log)
    log.close()
    again = open_log(tmp_path)
    assert len(data_rows(again)) == 1
    again.close()


def test_no_room_for_a_segment_but_the_reserve_for_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = start_log(tmp_path)
    wait_until(lambda: log._spares.reserve_path.exists(), "the reserve")
    put(log, ([bytes(900_000)] for _ in range(4)))

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResourceExhausted, match=r"no new log segment.*free space"):
        log.reserve(900_000)
    first = log.append_control([b"c" * 700_000])
    assert log.written_position > first + 700_000
    with pytest.raises(ResourceExhausted):
        log.reserve(1000)
    log.append_control([b"small"])
    monkeypatch.undo()
    put(log, [[b"after"]], base_offset=4)
    log.sync()
    wait_synced(log)
    log.close()
    again = open_log(tmp_path)
    assert [row[1] for row in data_rows(again)] == [0, 1, 2, 3, 4]
    again.close()


def test_spares_are_made_and_used(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, spare_segments=2)
    log = start_log(tmp_path, settings)
    wait_until(lambda: len(log._spares) == 2, "two spares")
    put(log, ([bytes(900_000)] for _ in range(10)))
    wait_synced(log)
    wait_until(lambda: len(log._spares) == 2, "two spares again")
    assert log.bytes_on_disk == (len(segments(tmp_path)) + 2) * 4 * MIB
    log.close()
    assert not list(tmp_path.glob("*.tmp"))


def test_an_empty_log_is_small_and_grows_with_what_it_holds(tmp_path: Path) -> None:
    """Groups that are larger than the first segments find room as well; a restart sees them all."""
    settings = msgspec.structs.replace(
        SETTINGS, segment_bytes=16 * MIB, segment_start_bytes=MIB, spare_segments=2
    )
    log = start_log(tmp_path, settings)
    wait_until(lambda: len(log._spares) == 2, "two spares")
    wait_until(lambda: log._spares.reserve_path.exists(), "the reserve")
    assert log.bytes_on_disk == 3 * MIB
    put(log, ([bytes(900_000)] for _ in range(40)))
    put(log, ([bytes(5_000_000)] for _ in range(4)), base_offset=40)
    wait_synced(log)
    sizes = [path.stat().st_size // MIB for path in segments(tmp_path)]
    assert sizes[0] == 1 and max(sizes) == 16, sizes
    log.close()
    again = open_log(tmp_path, settings)
    assert [row[1] for row in data_rows(again)] == list(range(44))
    again.close()


def test_a_newer_segment_is_refused(tmp_path: Path) -> None:
    start_log(tmp_path).close()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FailedPrecondition, match="version 2"):
        open_log(tmp_path)


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    put(log, [[b"a" * 1000], [b"b" * 1000]])
    run = log.find(5, 1)
    assert run is not None
    assert bytes(log.read_run(run)).count(b"b") >= 1000
    fd = os.open(segments(tmp_path)[0], os.O_RDWR)
    os.pwrite(fd, b"!", 4096 + run.position + 500)
    os.close(fd)
    with pytest.raises(DataLoss, match=rf"\.seg is damaged at position {run.position}: the crc of"):
        log.read_run(run)
    log.close()


def test_a_run_that_is_there_no_more_is_not_read_ahead(tmp_path: Path) -> None:
    """Who looked it up a moment ago does not know that the log was cut or trimmed meanwhile."""
    log = start_log(tmp_path)
    put(log, ([b"x" * 1000] for _ in range(3 * 4 * MIB // 1000)), partition_id=5)
    wait_synced(log)
    with pytest.raises(InvalidArgument, match="not written yet"):
        log.read_cached(Run(5, 0, 1, log.written_position + 64 * MIB, 1000, 0))
    first = log.find(5, 0)
    assert first is not None and log.read_cached(first) == log.read_run(first)
    for _ in range(2):
        assert log.save_snapshot(log.written_position, b"")
        wait_until(lambda: log.snapshot_position == log.written_position, "a snapshot")
        log.append_control([])
        log.sync()
        wait_synced(log)
    assert log.trim(log.written_position) > 0
    with pytest.raises(DataLoss, match="was trimmed"):
        log.read_cached(first)
    log.close()
