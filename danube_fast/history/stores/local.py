"""Objects as files of a folder: the store that needs nothing, and every other store's model.

    DIR/<key>                  an object; it has its name only when all of it is durable
    DIR/.uploads/<id>/data     an object that is sent in parts, each at its offset
    DIR/.uploads/<id>/key      its key
    DIR/.uploads/<id>.new      an object that is being made

A file gets its name by a hard link, which the file system refuses if the name is taken: so one of two
writers wins, in this process or in another one. Files are synced before that, folders after it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from danube_fast.clock import Clock
from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory, write_file
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.history.stores.store import (
    ObjectInfo,
    Part,
    Upload,
    check_object_key,
    check_object_prefix,
    check_parts,
    check_range,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LocalStore"]

UPLOADS_NAME = ".uploads"
_NAMING_TRIES = 8
"""A folder that has become empty may be removed between its making and its use."""
_MADV_POPULATE_READ = 22
"""Of Linux 5.14 and newer: fills pages, with an error for those that cannot be read."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class LocalStore:
    """The store of one folder."""

    part_bytes_min = 1

    def __init__(self, directory: Path, clock: Clock, *, must_exist: bool = False) -> None:
        """Make the folder if the one above it exists. Raises FailedPrecondition if that is missing.

        `must_exist`: make nothing, for a caller that only reads; the folder itself has to be there. It
        may be a copy, which has no folder of uploads.
        """
        self.directory = directory.absolute()
        self.url = f"file://{self.directory}"
        self._clock = clock
        self._uploads = self.directory / UPLOADS_NAME
        self._mark = self._uploads
        """A folder that is there as long as the store is."""
        self._needs = (
            "let this user read there" if must_exist else "let the broker's user write there"
        )
        if must_exist:
            with self._explained("the store's folder"):
                os.scandir(self.directory).close()
                if not self._uploads.is_dir():
                    self._mark = self.directory
            return
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
            sync_directory(self.directory.parent)
            self._uploads.mkdir(mode=0o700, exist_ok=True)
            sync_directory(self.directory)
        except OSError as error:
            raise self._explain(error, "the store's folder") from error

    def path_of(self, key: str) -> Path:
        """The file of an object."""
        return self._path(key)

    def create(self, key: str, data: Buffer) -> None:
        """Make an object, durably. Raises AlreadyExists if there is one."""
        path = self._path(key)
        new = self._uploads / f"{self._new_id()}.new"
        with self._explained(key):
            try:
                write_file(new, data)
                self._give_name(new, path, key)
            finally:
                new.unlink(missing_ok=True)

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        with self._explained(key):
            try:
                found = self._path(key).stat()
            except FileNotFoundError:
                self._check_folder()
                return None
        return ObjectInfo(key, found.st_size, found.st_mtime_ns)

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, or DataLoss if the object ends before."""
        with self._explained(key):
            fd = self._open_object(key)
            try:
                wanted = check_range(self.url, key, os.fstat(fd).st_size, start, count)
                data = os.pread(fd, wanted, start)
                while len(data) < wanted:  # a read moves 2 GiB at most
                    more = os.pread(fd, wanted - len(data), start + len(data))
                    if not more:
                        check_range(self.url, key, start + len(data), start, wanted)
                    data += more
            finally:
                os.close(fd)
        return data

    def bring_in(self, key: str, start: int, count: int) -> None:
        """Let the kernel read a range into its page cache, and wait for it. Raises as `read`."""
        with self._explained(key):
            fd = self._open_object(key)
            try:
                check_range(self.url, key, os.fstat(fd).st_size, start, count)
                _bring_in(fd, start, count)
            finally:
                os.close(fd)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in order."""
        with self._explained(prefix):
            self._check_folder()
            yield from self._walk(self.directory / check_object_prefix(prefix), prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, and folders that have become empty."""
        for key in keys:
            path = self._path(key)
            with self._explained(key):
                path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self.directory:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    def begin(self, key: str) -> Upload:
        """Begin an object that is sent in parts."""
        check_object_key(key)
        upload = Upload(key, self._new_id())
        folder = self._uploads / upload.upload_id
        with self._explained(key):
            folder.mkdir(mode=0o700)
            write_file(folder / "key", key.encode())
            write_file(folder / "data")
            sync_directory(folder)
            sync_directory(self._uploads)
        return upload

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Write one part at its place, durably. Raises NotFound if the upload has ended."""
        view = memoryview(data).cast("B")
        with self._explained(upload.key):
            fd = self._open(upload)
            try:
                if os.fstat(fd).st_nlink > 1:
                    raise self._has_ended(upload)
                written = 0
                while written < len(view):
                    written += os.pwrite(fd, view[written:], offset + written)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        return Part(number, offset, len(view), str(number))

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Give the object its name. Raises AlreadyExists, or NotFound if the upload has ended."""
        data, path = self.seal(upload, parts), self._path(upload.key)
        with self._explained(upload.key):
            try:
                self._give_name(data, path, upload.key)
            except AlreadyExists:
                if path.samefile(data):  # a call before was cut short: the upload has ended
                    self.abort(upload)
                raise
        self.abort(upload)

    def seal(self, upload: Upload, parts: Sequence[Part]) -> Path:
        """Cut an upload to these parts, durably, and tell which file has them.

        Raises InvalidArgument if they do not follow each other, NotFound if the upload has ended.
        """
        size = check_parts(upload, parts)
        with self._explained(upload.key):
            fd = self._open(upload)
            try:
                state = os.fstat(fd)
                if state.st_size < size:
                    raise InvalidArgument(
                        f"{upload.key}: parts of {size} bytes were named and {state.st_size} are there"
                    )
                if state.st_nlink == 1:  # else it is an object already, and must not change
                    os.ftruncate(fd, size)  # a longer part may have been sent before its last form
                    os.fsync(fd)
            finally:
                os.close(fd)
        return self._uploads / upload.upload_id / "data"

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts."""
        path = self._uploads / upload.upload_id
        with self._explained(upload.key), contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()  # an object whose maker was killed

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads that have not ended, and objects whose maker was killed: these are named like the prefix."""
        check_object_prefix(prefix)
        with self._explained(UPLOADS_NAME):
            names = sorted(os.listdir(self._uploads))
        for name in names:
            began, _, _ = name.partition("-")
            try:
                key = (self._uploads / name / "key").read_text() or prefix
            except OSError:
                key = prefix
            if key.startswith(prefix) and began.isdigit():
                yield Upload(key, name), int(began)

    def close(self) -> None:
        """Nothing is held."""

    def _new_id(self) -> str:
        return f"{self._clock.wall_ns():020d}-{secrets.token_hex(8)}"

    def _path(self, key: str) -> Path:
        return self.directory / check_object_key(key)

    def _give_name(self, source: Path, path: Path, key: str) -> None:
        """Link a file to its name, and sync all its folders: another writer may have made them, and not
        synced them yet."""
        is_taken = False
        for _ in range(_NAMING_TRIES):
            self._check_folder()
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.link(source, path)
            except FileNotFoundError:  # another has removed a folder that was empty
                if not source.exists():
                    raise
                continue
            except FileExistsError:
                is_taken = True
            for folder in path.parents:
                sync_directory(folder)
                if folder == self.directory:
                    break
            if is_taken:
                raise AlreadyExists(f"{self.url}: there is an object {key} already")
            return
        raise Unavailable(f"{self.url}: the folder of {key} is removed again and again")

    def _walk(self, folder: Path, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(folder) as found:
                entries = sorted(
                    (f"{entry.name}/" if entry.is_dir() else entry.name, entry) for entry in found
                )
        except FileNotFoundError:
            return
        for name, entry in entries:
            if name.startswith("."):
                continue
            if name.endswith("/"):
                yield from self._walk(folder / entry.name, prefix + name)
                continue
            try:
                state = entry.stat()
            except FileNotFoundError:
                continue
            yield ObjectInfo(prefix + name, state.st_size, state.st_mtime_ns)

    def _open_object(self, key: str) -> int:
        try:
            return open_file(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._check_folder()
            raise NotFound(f"{self.url}: there is no object {key}") from None

    def _open(self, upload: Upload) -> int:
        try:
            return open_file(self._uploads / upload.upload_id / "data", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self._check_folder()
            raise self._has_ended(upload) from None

    def _has_ended(self, upload: Upload) -> NotFound:
        return NotFound(f"{self.url}: the upload of {upload.key} has ended")

    def _check_folder(self) -> None:
        """Raise FailedPrecondition if the store itself is gone: no object may then count as missing."""
        if not self._mark.is_dir():
            raise FailedPrecondition(
                f"{self.url}: the folder of the store is not there any more; mount it again or "
                "put it back, it is used again at once"
            )

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, DanubeError):  # Unavailable is a ConnectionError, too
                raise
            raise self._explain(error, what) from error

    def _explain(self, error: OSError, what: str) -> DanubeError:
        cause = f"{self.url}: {what}: {error.strerror or error}"
        if error.errno in _FULL:
            return ResourceExhausted(f"{cause}; make room on that disk")
        if error.errno in _REFUSED:
            return PermissionDenied(f"{cause}; {self._needs}")
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return FailedPrecondition(f"{cause}; make the folder or correct the store's URL")
        return Unavailable(cause)


def _bring_in(fd: int, start: int, count: int) -> None:
    """Fill the page cache with a range of a file. Raises OSError."""
    before = start % mmap.ALLOCATIONGRANULARITY
    try:
        with mmap.mmap(
            fd, before + count, mmap.MAP_SHARED, mmap.PROT_READ, offset=start - before
        ) as pages:
            pages.madvise(_MADV_POPULATE_READ)
    except (
        OSError,
        ValueError,
    ):  # the kernel is older, or the pages cannot be read: then this says why
        os.preadv(fd, [bytearray(count)], start)
