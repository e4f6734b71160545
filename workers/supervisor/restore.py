"""Restore of a data directory from a backup: all of it, checked, or nothing.

    FILE --> .NAME.restore-<random>/ beside the directory, each file checked and synced --> renamed to NAME

A crash leaves a folder with a hidden name, which no broker starts on by itself; it may be removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory
from danube_fast.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from danube_fast.workers.supervisor.archive import ArchiveReader, File, Manifest
from danube_fast.workers.supervisor.backup import FULL, Report
from danube_fast.workers.supervisor.contents import SECRET_FILES

__all__ = ["check_backup", "restore"]

_NOT_REPLACED = frozenset({errno.EBUSY, errno.EXDEV})


def check_backup(path: Path, on_progress: Report = lambda done, total: None) -> Manifest:
    """Read all of a backup, and check it. Raises as `ArchiveReader`, and NotFound if it is not there."""
    with _opened(path) as reader:
        _read_all(reader, lambda file: contextlib.nullcontext(len), on_progress)
        return reader.manifest


def restore(path: Path, data_dir: Path, on_progress: Report = lambda done, total: None) -> Manifest:
    """Make a data directory out of a backup, where there is none yet or an empty one.

    Raises as `check_backup`, AlreadyExists if something is there, ResourceExhausted if the disk is full,
    FailedPrecondition if it cannot be written. Then nothing is there, unless the error says that it is.
    """
    target = Path(os.path.realpath(data_dir))
    _check_target(target)
    with _opened(path) as reader:
        need, free = reader.manifest.data_bytes, _free_bytes(target.parent)
        if need > free:
            raise ResourceExhausted(
                f"no room for {target}: {path} holds {need:,} bytes and {free:,} are free; name a directory on a larger "
                "disk with --data-dir"
            )
        with _explained(target):
            beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.restore-", dir=target.parent))
            try:
                _fill(reader, beside, on_progress)
                os.rename(beside, target)
            except BaseException:
                shutil.rmtree(beside, ignore_errors=True)
                raise
        _sync_name(target)
        return reader.manifest


def _check_target(target: Path) -> None:
    """Raise unless the directory may be put there."""
    if os.path.ismount(target):
        raise InvalidArgument(
            f"{target} is a mount, and what is restored appears by a rename; name a directory in it with --data-dir"
        )
    with _explained(target):
        if os.path.lexists(target):
            if not target.is_dir() or os.listdir(target):
                raise _taken(target)
            _check_owner(target)
    if not target.parent.is_dir():
        raise NotFound(f"there is no folder {target.parent}; make it first")


def _sync_name(target: Path) -> None:
    try:
        sync_directory(target.parent)
    except OSError as error:
        raise FailedPrecondition(
            f"{target} is restored and in its place, but the folder that it is in cannot be synced ({error.strerror}), so a "
            "power failure may take it away: see to its disk; to be sure move it away and restore again"
        ) from error


def _check_owner(target: Path) -> None:
    """Raise if what takes the place of an empty directory would be another user's: the broker could not use it."""
    owner = target.stat().st_uid
    if owner != os.geteuid():
        raise FailedPrecondition(
            f"{target} is of the user with id {owner}, and what is restored would be of that with id {os.geteuid()}: "
            "run this as that user, or name another directory with --data-dir"
        )


def _taken(target: Path) -> AlreadyExists:
    return AlreadyExists(
        f"{target} is there and not empty, and a restore overwrites nothing: move it away, or name another directory with "
        "--data-dir"
    )


def _free_bytes(folder: Path) -> int:
    with _explained(folder):
        found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[ArchiveReader]:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}; name a backup") from None
    except OSError as error:
        raise FailedPrecondition(
            f"cannot read {path}: {error.strerror}; name a backup that this user can read"
        ) from error
    with file:
        if not file.seekable():
            raise InvalidArgument(f"{path} is no file; name a backup")
        yield ArchiveReader(path, file)


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Errors of the disk, in our words."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise _taken(target) from None
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise _taken(target) from None
        if error.errno in FULL:
            raise ResourceExhausted(
                f"no room for {target}: {error.strerror}; name a directory on a larger disk with --data-dir"
            ) from error
        if error.errno in _NOT_REPLACED:
            raise InvalidArgument(
                f"{target} cannot be replaced ({error.strerror}); name a directory in it with --data-dir"
            ) from error
        raise FailedPrecondition(
            f"cannot write {target}: {error.strerror}; see to its disk and its permissions"
        ) from error


def _read_all(
    reader: ArchiveReader,
    opened: Callable[[File], contextlib.AbstractContextManager[Callable[[bytes], object]]],
    on_progress: Report,
) -> None:
    done, total = 0, reader.manifest.data_bytes
    for file in reader.manifest.files:
        with opened(file) as write:
            reader.read(file, write)
        done += file.bytes
        on_progress(done, total)
    reader.finish()


def _fill(reader: ArchiveReader, folder: Path, on_progress: Report) -> None:
    """Write everything below an empty folder, durably. Raises OSError."""

    @contextlib.contextmanager
    def opened(file: File) -> Iterator[Callable[[bytes], object]]:
        mode = 0o600 if file.path in SECRET_FILES else int(file.mode, 8) | 0o600
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(folder / file.path, "wb", opener=lambda name, _: open_file(name, flags)) as new:
            yield new.write
            new.flush()
            os.fchmod(new.fileno(), mode)
            os.fsync(new.fileno())

    folders = reader.manifest.folders
    for each in folders[1:]:
        (folder / each.path).mkdir(mode=0o700)
    _read_all(reader, opened, on_progress)
    for each in reversed(folders):
        (folder / each.path).chmod(int(each.mode, 8) | 0o700)
        sync_directory(folder / each.path)
