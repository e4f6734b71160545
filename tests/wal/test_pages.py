"""Pages of a log that every consumer has passed leave the page cache, and can be read all the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from danube_fast.wal.background import Background, Job
from danube_fast.wal.log import Log
from tests.wal.rig import MIB, abandon, descriptors_of, make_frame, put, start_log, wait_synced

PAYLOAD = os.urandom(64 * 1024)
GROUPS = 160
"""Ten MiB: three segments."""


class Kept(Background):
    """Jobs wait until a test does them; the log's own run as ever."""

    def __init__(self) -> None:
        self.pages: list[threading.Thread] = []

    def start(self, name: str, work: object) -> Job:
        if name != "wal-pages":
            return super().start(name, work)  # type: ignore[arg-type]
        thread = threading.Thread(target=work)  # type: ignore[arg-type]
        self.pages.append(thread)
        return thread


def drops_pages(directory: Path) -> bool:
    """Whether the file system has a page cache that drops what it is told to; tmpfs does not."""
    path = directory / "probe"
    path.write_bytes(bytes(MIB))
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, MIB, os.POSIX_FADV_DONTNEED)
        return not Background().read_cached(file.fileno(), memoryview(bytearray(4096)), 0)


def filled(directory: Path, background: Background | None = None) -> Log:
    log = start_log(directory, background=background or Background())
    put(log, ([PAYLOAD] for _ in range(GROUPS)))
    wait_synced(log)
    return log


def cached(log: Log) -> list[bool]:
    return [log.read_cached(run) is not None for run in log.runs(5, 0, GROUPS * MIB)]


def test_what_was_passed_leaves_the_cache_and_is_read_from_the_disk(tmp_path: Path) -> None:
    if not drops_pages(tmp_path):
        pytest.skip("this file system keeps pages that it is told to drop")
    background = Kept()
    log = filled(tmp_path / "log", background)
    runs = log.runs(5, 0, GROUPS * MIB)
    assert (len(runs), all(cached(log))) == (GROUPS, True)
    log.pages.drop(runs[GROUPS // 2].position)
    (thread,) = background.pages
    thread.start()
    thread.join(60)
    # a page that large ones share with what stays may stay, too; neighbours are not told yet
    kept = cached(log)
    assert kept[GROUPS // 2 :] == [True] * (GROUPS - GROUPS // 2)
    assert sum(kept[: GROUPS // 2]) <= GROUPS // 8
    expected = bytes(make_frame([PAYLOAD])[-64 * 1024 :])
    for run in runs:
        assert bytes(log.read_run(run)[-64 * 1024 :]) == expected
    abandon(log)


def test_each_page_is_dropped_once_and_one_job_runs_at_a_time(tmp_path: Path) -> None:
    background = Kept()
    log = filled(tmp_path / "log", background)
    runs = log.runs(5, 0, GROUPS * MIB)
    log.pages.drop(runs[130].position)
    log.pages.drop(runs[130].position)
    log.pages.drop(runs[10].position)
    assert len(background.pages) == 1
    gate = threading.Event()
    background.pages[0] = slow = threading.Thread(target=gate.wait, daemon=True)
    log.pages._job = slow
    slow.start()
    log.pages.drop(runs[140].position)
    assert len(background.pages) == 1, "the one before has not ended"
    gate.set()
    slow.join(60)
    log.pages.drop(runs[140].position)
    assert len(background.pages) == 2
    abandon(log)


def test_a_segment_that_is_removed_meanwhile_does_no_harm(tmp_path: Path) -> None:
    background = Kept()
    log = filled(tmp_path / "log", background)
    before = descriptors_of(tmp_path)
    assert before
    log.pages.drop(log.synced_position)
    moved = sorted((tmp_path / "log").glob("*.seg"))
    for path in moved:
        path.rename(path.with_suffix(".away"))
    (thread,) = background.pages
    thread.run()
    for path in moved:
        path.with_suffix(".away").rename(path)
    assert descriptors_of(tmp_path) == before
    abandon(log)
