"""Backup of a data directory into one file, while the broker is stopped.

    lock of the directory, of its logs and its metadata
    list and hash all files --> manifest --> .FILE.<hex> written, synced --> its name

What is left out can be made again: locks, spare segments, indexes, pieces of history on this disk. Segments keep their
full size, as recovery takes a shorter one for damage; zeros behind the end of a log cost nothing, they are compressed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from danube_fast.clock import Clock
from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory
from danube_fast.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from danube_fast.metadata.seal import SealFile
from danube_fast.security.audit import shown_time
from danube_fast.version import VERSION
from danube_fast.wal.lock import LogLock
from danube_fast.workers.process.layout import METADATA, METADATA_SEAL
from danube_fast.workers.supervisor.archive import ArchiveWriter, File, Folder, Manifest
from danube_fast.workers.supervisor.contents import LOG_FOLDERS, SECRET_FILES, Kind, kind_of
from danube_fast.workers.supervisor.datadir import DataDirectory

__all__ = ["FULL", "Backup", "Report", "back_up"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that has no room."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems without hard links."""
_LOCK_MS = 5000
"""Processes of a broker that was killed end at once; it takes a moment until the kernel has done so."""

Report = Callable[[int, int], None]


class Backup(NamedTuple):
    """A backup that was made."""

    path: Path
    archive_bytes: int
    manifest: Manifest
    unknown: list[str]
    """What lies in the data directory and was left out, as it is not the broker's."""


class _Found(NamedTuple):
    folders: list[Folder]
    files: list[File]
    """Without their sha256 yet."""
    unknown: list[str]


def back_up(
    data_dir: Path,
    path: Path,
    clock: Clock,
    *,
    with_secrets: bool = True,
    replace: bool = False,
    on_progress: Report = lambda done, total: None,
) -> Backup:
    """Write the backup of a broker that is stopped to a new file; with `replace` in the place of an older one.

    Raises NotFound if there is no data directory, FailedPrecondition if a broker runs there (with its pid) or something
    cannot be read or written, AlreadyExists, InvalidArgument for a path that cannot be a backup, ResourceExhausted if the
    disk is full. Then there is no new file, with one exception: with `replace`, if all is written and the sync of its folder
    fails, the new file is in its place, and the error says so; the older one is gone, and this one is better than none.
    """
    folder, path = data_dir.absolute(), path.absolute()
    _check_target(folder, path, replace=replace)
    with contextlib.closing(DataDirectory.open_existing(folder)), _locked(folder):
        found = _list(folder)
        names = [each.path for each in found.files if each.path in SECRET_FILES]
        files = [each for each in found.files if with_secrets or each.path not in names]
        total = 2 * sum(each.bytes for each in files)
        with _explained(folder):
            hashed = list(_hashed(folder, files, lambda done: on_progress(done, total)))
            seal = SealFile(folder / METADATA_SEAL).read()
        manifest = Manifest(
            broker=seal.identity.hex() if seal else "",
            time=shown_time(clock.wall_ns()),
            danube_fast=VERSION,
            secrets=names if with_secrets else [],
            secrets_left_out=[] if with_secrets else names,
            folders=found.folders,
            files=hashed,
        )
        with _new_file(path, replace=replace) as fd:
            _write(fd, folder, manifest, lambda done: on_progress(total // 2 + done, total))
            size = os.fstat(fd).st_size
    return Backup(path, size, manifest, found.unknown)


def _check_target(folder: Path, path: Path, *, replace: bool) -> None:
    if not path.name or path.is_dir() or (path.exists() and not path.is_file()):
        raise InvalidArgument(f"{path} is no name of a file; give the path of a file to make")
    if path.parent.resolve().is_relative_to(folder.resolve()):
        raise InvalidArgument(
            f"{path} is in the data directory, and would be lost with it; name a file elsewhere, best on another disk"
        )
    if os.path.lexists(path) and not replace:
        raise _taken(path)


def _taken(path: Path) -> AlreadyExists:
    return AlreadyExists(f"{path} exists; choose another name, or add --yes to replace it")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the locks of the broker's processes, too: a supervisor that was killed is gone a moment before them."""
    logs = folder / LOG_FOLDERS
    folders = sorted(logs.iterdir()) if logs.is_dir() else []
    with contextlib.ExitStack() as stack:
        for each in (folder / METADATA, *folders):
            if each.is_dir():  # the lock of the metadata is of the same kind
                stack.callback(LogLock(each, _LOCK_MS).release)
        yield


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FailedPrecondition(
            f"cannot read {error.filename or path}: {error.strerror}; see to its disk and its permissions"
        ) from error


# ---------------------------------------------------------------- what there is


def _list(folder: Path) -> _Found:
    """List what belongs to a broker, in order."""
    found = _Found([Folder("", _mode(folder.stat()))], [], [])
    with _explained(folder):
        _walk(found, folder, "")
    return found


def _walk(found: _Found, folder: str | Path, above: str) -> None:
    """Add what is in a folder. A folder of the broker may be on another disk, behind a link; below the directory itself no
    file is."""
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        path = above + entry.name
        match kind_of(path, is_folder=entry.is_dir()):
            case Kind.FOLDER:
                found.folders.append(Folder(path, _mode(entry.stat())))
                _walk(found, entry.path, f"{path}/")
            case Kind.FILE:
                if not entry.is_file(follow_symlinks=not above):
                    raise FailedPrecondition(
                        f"{entry.path} has the name of a file of the broker and is none; put the file there, or remove it"
                    )
                _take_file(found, entry, path)
            case Kind.UNKNOWN:
                found.unknown.append(path)


def _take_file(found: _Found, entry: os.DirEntry[str], path: str) -> None:
    status = entry.stat()
    found.files.append(File(path, status.st_size, _mode(status), ""))


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode) & 0o777:04o}"


def _open(folder: Path, path: str) -> io.BufferedReader:
    """Open a file that was listed, and no other one that has taken its place as a link. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if "/" in path else 0)
    return open(folder / path, "rb", opener=lambda name, _: open_file(name, flags))


def _hashed(folder: Path, files: list[File], report: Callable[[int], None]) -> Iterator[File]:
    done = 0
    for each in files:
        with _open(folder, each.path) as file:
            yield msgspec.structs.replace(
                each, sha256=hashlib.file_digest(file, "sha256").hexdigest()
            )
        done += each.bytes
        report(done)


# ---------------------------------------------------------------- the file


@contextlib.contextmanager
def _new_file(path: Path, *, replace: bool) -> Iterator[int]:
    """Make a file of this user alone, durably: first beside its place, then under its name."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = open_file(beside, flags, 0o600)
        try:
            _make_private(fd)
            yield fd
            os.fsync(fd)
            _give_name(beside, path, replace=replace)
        finally:
            os.close(fd)
            beside.unlink(missing_ok=True)
        _sync_name(path, replace=replace)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        if error.errno in FULL:
            raise ResourceExhausted(
                f"no room for {path}: {error.strerror}; name a file on a larger disk"
            ) from error
        raise FailedPrecondition(
            f"cannot write {path}: {error.strerror}; make its folder writable for this user, or name another one"
        ) from error


def _sync_name(path: Path, *, replace: bool) -> None:
    """Make a name durable; a file that took no other's place is removed if that fails. Raises OSError, FailedPrecondition."""
    try:
        sync_directory(path.parent)
    except OSError as error:
        if not replace:
            path.unlink()
            raise
        raise FailedPrecondition(
            f"{path} is written and in its place, but its folder cannot be synced ({error.strerror}), so behind a power "
            "failure an older file may be there, or none: see to its disk, and repeat this"
        ) from error


def _make_private(fd: int) -> None:
    """Leave no rights to others, whatever a default ACL or the umask say. Raises OSError."""
    try:
        os.fchmod(fd, 0o600)
    except PermissionError:  # modes may be the same for all of a mount
        if os.fstat(fd).st_mode & 0o077:
            raise


def _give_name(beside: Path, path: Path, *, replace: bool) -> None:
    """Give a file its name. Raises FileExistsError if it is taken, unless it may be replaced; OSError."""
    if not replace:
        try:
            os.link(beside, path)  # refuses a name that is taken, with nothing in between
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        if os.path.lexists(path):
            raise FileExistsError
    os.replace(beside, path)


def _read(source: IO[bytes], path: Path, count: int) -> bytes:
    with _explained(path):
        return source.read(count)


def _write(fd: int, folder: Path, manifest: Manifest, report: Callable[[int], None]) -> None:
    done = 0
    with os.fdopen(fd, "wb", closefd=False) as target:
        writer = ArchiveWriter(target, manifest)
        for each in manifest.files:
            with _explained(folder):
                source = _open(folder, each.path)
            with source:
                found = writer.add(each, functools.partial(_read, source, folder / each.path))
            if found != each.sha256:
                raise FailedPrecondition(
                    f"{folder / each.path} changed while it was read; see that nothing writes to {folder}, and try again"
                )
            done += each.bytes
            report(done)
        writer.finish()
