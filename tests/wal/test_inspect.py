"""`wal inspect` and `wal verify`: every fault is named, and an accepted loss loses nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from danube_fast.errors import DataLoss, FailedPrecondition, NotFound
from danube_fast.wal.inspect import inspect_log, verify_log
from danube_fast.wal.layout import GROUP_ALIGNMENT, SEGMENT_HEADER_BYTES
from tests.wal.rig import (
    LOG_ID,
    SETTINGS,
    abandon,
    data_rows,
    open_log,
    put,
    segments,
    start_log,
    wait_synced,
    wait_until,
)

SMALL = msgspec.structs.replace(SETTINGS, segment_bytes=128 * 1024)


def make_log(directory: Path, *, snapshot_at: int | None = None) -> list[int]:
    """60 synced groups of one frame over some segments, and a marker; their positions."""
    log = start_log(directory, SMALL)
    positions = []
    for index in range(60):
        positions.append(log.written_position)
        put(log, [[b"%d" % index * 2000]], base_offset=index)
        wait_synced(log)
        if index == snapshot_at:
            log.save_snapshot(log.written_position, b"state")
            at = log.written_position
            wait_until(lambda at=at: log.snapshot_position == at, "the snapshot")
    assert log.write_marker()
    wait_synced(log)
    positions = [run.position for run in log.runs(5, 0, 1 << 40)]
    abandon(log)
    return positions


def damage(directory: Path, position: int, data: bytes) -> None:
    path = max(path for path in segments(directory) if int(path.stem) <= position)
    with open(path, "r+b") as file:
        file.seek(SEGMENT_HEADER_BYTES + position - int(path.stem))
        file.write(data)


def test_inspect_tells_what_is_there(tmp_path: Path) -> None:
    make_log(tmp_path, snapshot_at=30)
    report = inspect_log(tmp_path)
    assert report.log_id == LOG_ID
    assert [segment.path for segment in report.segments] == list(map(str, segments(tmp_path)))
    assert report.segments[0].end_position == report.segments[1].first_position
    assert [segment.fault for segment in report.segments] == [None] * len(report.segments)
    assert [(shot.state_bytes, shot.clean) for shot in report.snapshots] == [(5, False)]
    assert report.bytes_on_disk >= sum(path.stat().st_size for path in segments(tmp_path))
    assert report.losses == []
    assert msgspec.json.decode(msgspec.json.encode(report))


def test_inspect_looks_at_a_log_in_use_and_verify_does_not(tmp_path: Path) -> None:
    log = start_log(tmp_path)
    assert inspect_log(tmp_path).log_id == LOG_ID
    with pytest.raises(FailedPrecondition, match="in use"):
        verify_log(tmp_path, lock_timeout_ms=10)
    log.close()


def test_no_log_is_not_found(tmp_path: Path) -> None:
    for look in (inspect_log, verify_log):
        with pytest.raises(NotFound, match="there is no log"):
            look(tmp_path)


def test_a_sound_log_verifies(tmp_path: Path) -> None:
    positions = make_log(tmp_path)
    report = verify_log(tmp_path)
    assert report.faults == []
    assert (report.messages, report.log_id, report.first_position) == (61, LOG_ID, 0)
    assert report.cut == report.synced_position + GROUP_ALIGNMENT
    assert report.cut > positions[-1]


def test_every_fault_is_named_and_accepted_losses_lose_nothing_else(tmp_path: Path) -> None:
    positions = make_log(tmp_path)
    for index, data in ((10, b"!"), (25, bytes(64)), (59, b"!")):
        damage(tmp_path, positions[index] + (500 if len(data) == 1 else 0), data)
    report = verify_log(tmp_path)
    assert [fault.position for fault in report.faults] == [
        positions[10],
        positions[25],
        positions[59],
    ]
    for fault in report.faults:
        assert int(Path(fault.path).stem) <= fault.position < fault.until
    assert not report.repaired
    log = open_log(tmp_path, SMALL)
    with pytest.raises(DataLoss, match=f"position {positions[10]}"):
        data_rows(log)
    log.close()

    assert verify_log(tmp_path, accept_loss=True, wall_ns=77).repaired
    kept = [index for index in range(60) if index not in (10, 25, 59)]
    for _ in range(2):
        log = open_log(tmp_path, SMALL)
        assert [row[1] for row in data_rows(log)] == kept
        assert [loss.position for loss in log.losses] == [positions[at] for at in (10, 25, 59)]
        assert {loss.accepted_ns for loss in log.losses} == {77}
        log.begin_epoch([b"x"])
        assert log.find(5, 10) == log.find(5, 11)
        abandon(log)
    assert verify_log(tmp_path).faults == []


def test_a_missing_segment_is_filled(tmp_path: Path) -> None:
    positions = make_log(tmp_path)
    paths = segments(tmp_path)
    first, last = int(paths[1].stem), int(paths[2].stem)
    paths[1].unlink()
    with pytest.raises(DataLoss, match="missing"):
        open_log(tmp_path, SMALL)
    report = verify_log(tmp_path, accept_loss=True)
    assert (report.faults[0].position, report.faults[-1].until) == (first, last)
    log = open_log(tmp_path, SMALL)
    kept = [index for index, at in enumerate(positions) if not first <= at < last]
    assert [row[1] for row in data_rows(log)] == kept
    log.begin_epoch([b"x"])
    log.close()
    assert verify_log(tmp_path).faults == []


@pytest.mark.parametrize("snapshot_at", [None, 5, 30])
def test_a_missing_oldest_segment(tmp_path: Path, snapshot_at: int | None) -> None:
    make_log(tmp_path, snapshot_at=snapshot_at)
    paths = segments(tmp_path)
    first = int(paths[1].stem)
    paths[0].unlink()
    with pytest.raises(DataLoss, match=r"missing|does not start there"):
        open_log(tmp_path, SMALL)
    report = verify_log(tmp_path, accept_loss=True)
    assert report.faults[0].until == first
    log = open_log(tmp_path, SMALL)
    assert log.snapshot is not None
    assert (log.snapshot[1] == b"") == (snapshot_at is None)
    rows = data_rows(log)
    assert rows[0][2] >= first
    assert rows[-1][1] == 59
    log.begin_epoch([b"x"])
    log.close()


def test_a_damaged_header_and_snapshot_lose_nothing(tmp_path: Path) -> None:
    make_log(tmp_path, snapshot_at=30)
    for path in (segments(tmp_path)[1], next(tmp_path.glob("*.snap"))):
        with open(path, "r+b") as file:
            file.seek(30)
            file.write(b"\xff")
    report = verify_log(tmp_path)
    assert len(report.faults) == 2
    assert all(fault.position == fault.until for fault in report.faults)
    log = open_log(tmp_path, SMALL)
    assert log.snapshot is None
    assert [row[1] for row in data_rows(log)] == list(range(60))
    log.close()
    verify_log(tmp_path, accept_loss=True)
    assert verify_log(tmp_path).faults == []
    log = open_log(tmp_path, SMALL)
    assert len(data_rows(log)) == 60
    log.close()


@pytest.mark.parametrize(
    "kept_bytes", [0, 100, SEGMENT_HEADER_BYTES, 2 * SEGMENT_HEADER_BYTES + 10]
)
def test_a_file_that_was_cut_off_is_a_fault(tmp_path: Path, kept_bytes: int) -> None:
    """Even if nothing says that more was durable: files have their full size before they are written."""
    log = start_log(tmp_path, SMALL)
    for index in range(60):
        put(log, [[b"%02d" % index * 1000]], base_offset=index, sync=False)
    positions = [run.position for run in log.runs(5, 0, 1 << 40)]
    assert log.synced_position <= log._chain[-1].first_position
    abandon(log)
    newest = segments(tmp_path)[-1]
    end = int(newest.stem) + max(kept_bytes - SEGMENT_HEADER_BYTES, 0)
    os.truncate(newest, kept_bytes)
    log = open_log(tmp_path, SMALL)
    with pytest.raises(DataLoss, match=r"the file ends .* wal verify") as caught:
        data_rows(log)
    assert str(newest) in str(caught.value)
    log.close()
    report = verify_log(tmp_path, accept_loss=True)
    assert [fault.path for fault in report.faults] == [str(newest)]
    kept = [index for index, position in enumerate(positions) if position + 2000 < end]
    for offset in (100, 101):
        log = open_log(tmp_path, SMALL)
        rows = [row[1] for row in data_rows(log)]
        assert rows == kept
        log.begin_epoch([b"x"])
        put(log, [[b"more"]], base_offset=offset)
        wait_synced(log)
        kept.append(offset)
        abandon(log)
    assert verify_log(tmp_path).faults == []


def test_a_torn_tail_is_no_fault(tmp_path: Path) -> None:
    log = start_log(tmp_path, SMALL)
    put(log, [[b"kept"]])
    wait_synced(log)
    put(log, [[b"torn" * 2000]], base_offset=1, sync=False)
    cut = log._chain[-1].first_position + GROUP_ALIGNMENT * 2
    abandon(log)
    damage(tmp_path, cut + 4000, b"!!")
    report = verify_log(tmp_path)
    assert report.faults == []
    assert report.torn is not None
    assert report.cut == cut
    assert os.path.exists(segments(tmp_path)[0])
