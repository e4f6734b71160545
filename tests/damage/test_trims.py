"""The oldest segments of a log: trimmed, or lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from danube_fast.errors import DataLoss
from danube_fast.wal.inspect import verify_log
from danube_fast.wal.log import Log
from danube_fast.wal.trims import trimmed_position
from tests.damage.test_index import SMALL
from tests.wal.rig import data_rows, open_log, put, segments, start_log, wait_synced, wait_until


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Several segments, two snapshots at the end."""
    log = start_log(tmp_path / "log", SMALL)
    put(log, ([bytes([number % 251]) * 900] * 3 for number in range(200)))
    wait_synced(log)
    for _ in range(2):
        at = log.written_position
        assert log.save_snapshot(at, b"state")
        wait_until(lambda at=at: log.snapshot_position == at, "the snapshot")
        put(log, [[b"behind"]], base_offset=600)
        wait_synced(log)
    return log


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_lost_oldest_segment_is_not_taken_for_a_trimmed_one(log: Log, trimmed: bool) -> None:
    directory = log.directory
    if trimmed:
        assert log.trim(int(segments(directory)[1].stem)) == 1
    assert trimmed_position(directory) == log.oldest_position
    log.close(b"state")
    open_log(directory, SMALL).close()
    first, second = (int(path.stem) for path in segments(directory)[:2])
    segments(directory)[0].unlink()
    with pytest.raises(DataLoss, match=rf"damaged at position {first}: the segments from there on"):
        open_log(directory, SMALL)
    report = verify_log(directory, accept_loss=True)
    assert [(fault.position, fault.until) for fault in report.faults] == [(first, second)]
    again = open_log(directory, SMALL)
    assert data_rows(again) == []
    assert again.oldest_position == second
    again.close()


def test_a_disk_that_takes_no_name_trims_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = segments(log.directory)
    with monkeypatch.context() as patched:
        patched.setattr("danube_fast.wal.log.note_trim", full)
        assert log.trim(log.synced_position) == 0
    assert segments(log.directory) == before
    assert log.trim(log.synced_position) > 0
    assert trimmed_position(log.directory) == int(segments(log.directory)[0].stem)
    log.close()


def test_a_middle_segment_is_missed(log: Log, tmp_path: Path) -> None:
    log.close(b"state")
    for path in segments(log.directory)[1:-1]:
        copy = tmp_path / path.stem
        shutil.copytree(log.directory, copy)
        (copy / path.name).unlink()
        with pytest.raises(DataLoss, match="the segment before this one is missing"):
            open_log(copy, SMALL)
