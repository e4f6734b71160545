"""Backup and restore on disks that are full or fail: a sentence, and nothing is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from danube_fast.clock import SystemClock
from danube_fast.workers.supervisor.backup import back_up
from danube_fast.workers.supervisor.restore import check_backup
from tests.faults.rig import Disk, Word
from tests.workers.backup_rig import make_directory, tree
from tests.workers.broker import ROOT

PROGRAM = [sys.executable, "-m", "danube_fast.cli.main"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A data directory and a backup of it; `disk` is the disk of what is made beside them."""
    make_directory(tmp_path / "data")
    back_up(tmp_path / "data", tmp_path / "sound", SystemClock())
    (tmp_path / "disk").mkdir()
    return tmp_path


def commands(place: Path) -> list[list[str]]:
    """Both commands, with the disk as the place of what they make."""
    return [
        ["backup", "--data-dir", str(place / "data"), str(place / "disk/saved")],
        ["restore", str(place / "sound"), "--data-dir", str(place / "disk/new")],
    ]


def run_on(disk: Disk, place: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    with disk.preloaded(place / "disk"):
        return subprocess.run(
            [*PROGRAM, *words], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
        )


def check_refused(found: subprocess.CompletedProcess[str], place: Path, text: str) -> None:
    (line,) = found.stderr.splitlines()
    assert found.returncode == 4 and line.startswith("danube-fast: ") and text in line, found
    assert found.stdout == "" and os.listdir(place / "disk") == [], found


@pytest.mark.parametrize("torn", [True, False])
def test_a_full_disk_leaves_nothing(disk: Disk, place: Path, torn: bool) -> None:
    disk.fill(everything=True, torn=torn)
    for words in commands(place):
        check_refused(run_on(disk, place, words), place, "no room for")
    assert disk[Word.WRITES_FAILED] >= 2
    disk.empty()
    for words in commands(place):
        found = run_on(disk, place, words)
        assert found.returncode == 0, found
    assert tree(place / "disk/new") == tree(place / "data")


def test_a_disk_that_cannot_sync_makes_no_backup(disk: Disk, place: Path) -> None:
    for words in commands(place):
        disk.fail_syncs(1, errno.EIO)
        check_refused(run_on(disk, place, words), place, "cannot write")
    assert disk[Word.SYNCS_FAILED] == 2


def test_writes_that_stop_short_go_on(disk: Disk, place: Path) -> None:
    disk.shorten()
    for words in commands(place):
        found = run_on(disk, place, words)
        assert found.returncode == 0, found
    assert disk[Word.WRITES_SHORT]
    assert tree(place / "disk/new") == tree(place / "data")
    check_backup(place / "disk/saved")


def test_a_full_disk_can_be_saved_to_another_one(disk: Disk, place: Path) -> None:
    """That of the data has no room even for a pid in its lock."""
    disk.fill(everything=True)
    with disk.preloaded(place / "data"):
        found = subprocess.run(
            [*PROGRAM, "backup", "--data-dir", str(place / "data"), str(place / "disk/saved")],
            capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
        )  # fmt: skip
    assert found.returncode == 0, found
    assert disk[Word.WRITES_FAILED]
    check_backup(place / "disk/saved")
