"""Files that survive a power cut: what is synced, in which order, and what a failure leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from danube_fast.durable import replace_file, sync_directory


def fail_sync(monkeypatch: pytest.MonkeyPatch, number: int, *, of_files: bool) -> None:
    """Let syncs of files, or of folders, fail with that errno."""
    fsync = os.fsync

    def fail(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_dir() != of_files:
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)


def test_bytes_are_synced_before_the_name_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: seen.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, path.read_bytes())),
    )
    replace_file(path, b"ne", bytearray(b"w"))
    assert seen == [("file.partial", b"old"), (tmp_path.name, b"new")]
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_cannot_be_synced_does_not_replace_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    fail_sync(monkeypatch, errno.EIO, of_files=True)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_syncs_of_folders_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_sync(monkeypatch, number, of_files=False)
    replace_file(tmp_path / "file", b"new")


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_is_not_durable_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_sync(monkeypatch, number, of_files=False)
    with pytest.raises(OSError) as caught:
        sync_directory(tmp_path)
    assert caught.value.errno == number
