"""Metadata on this host's disk: LMDB, one synchronous commit per change, one process at a time.

The coordinator owns it. A kill at any instant leaves the last committed state: LMDB never overwrites a
page that a committed tree uses. No WRITEMAP: with it, a full disk would be a SIGBUS instead of an error.
Layout: metadata/layout.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from danube_fast.clock import Clock
from danube_fast.errors import FailedPrecondition, Internal, ResourceExhausted, Unavailable
from danube_fast.metadata import layout
from danube_fast.metadata.local import LocalStore
from danube_fast.metadata.store import Entry, Event

__all__ = ["LmdbStore"]

MAP_BYTES = 64 * 1024 * 1024
"""Address space at first; doubled when full. A topic takes a few hundred bytes."""

MAP_BYTES_MAX = 16 * 1024 * 1024 * 1024
"""Where doubling ends: far more metadata than one host can serve."""

_DATABASES_MAX = 8


class LmdbStore(LocalStore):
    """A `MetadataStore` in `directory`, which is made if missing.

    Raises FailedPrecondition when another process has it open, or when a newer danube-fast wrote it;
    Unavailable when it cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str], clock: Clock) -> None:
        self._directory = Path(directory)
        with contextlib.ExitStack() as undo:
            with self._translated():
                self._directory.mkdir(parents=True, exist_ok=True)
                self._lock_fd = os.open(
                    self._directory / layout.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
            undo.callback(os.close, self._lock_fd)
            self._take_lock()
            with self._translated():
                self._environment = self._open()
            undo.callback(self._environment.close)
            with self._translated():
                revision = self._prepare()
            undo.pop_all()
        super().__init__(clock, revision)

    def close(self) -> None:
        """Close the environment, then give the lock back."""
        with self.lock:
            if self._closed:
                return
            super().close()
            self._environment.close()
            os.close(self._lock_fd)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(
                f"another process has the metadata in {self._directory} open; stop it first"
            ) from None

    def _open(self) -> lmdb.Environment:
        data_file = self._directory / layout.DATA_FILE
        size = data_file.stat().st_size if data_file.exists() else 0
        environment = lmdb.open(
            str(self._directory),
            map_size=max(MAP_BYTES, 2 * size),
            max_dbs=_DATABASES_MAX,
            mode=0o600,
            max_readers=1,
            lock=False,  # our own flock admits one process, our own lock one thread
            writemap=False,
        )
        # the names of a new directory survive a power cut only once their folder is synced
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return environment

    def _prepare(self) -> int:
        """Check or write the format, drop what stood under leases; returns the newest revision."""
        with self._environment.begin() as probe:
            existing = probe.get(layout.STORE_DATABASE) is not None
        if existing:
            self._store = self._environment.open_db(layout.STORE_DATABASE, create=False)
            with self._environment.begin(db=self._store) as reading:
                written = reading.get(layout.FORMAT_KEY) or b""
            if len(written) != layout.FORMAT.size:
                raise Internal(
                    f"the metadata in {self._directory} does not say its format; restore it from a "
                    "backup"
                )
            (version,) = layout.FORMAT.unpack(written)
            if version > layout.FORMAT_VERSION:
                raise FailedPrecondition(
                    f"the metadata in {self._directory} has format {version}, and this version of "
                    f"danube-fast reads up to {layout.FORMAT_VERSION}: start the newer one again"
                )
        else:
            self._store = self._environment.open_db(layout.STORE_DATABASE)
        self._entries = self._environment.open_db(layout.ENTRIES_DATABASE)
        with self._environment.begin(write=True) as writing:
            stored = writing.get(layout.REVISION_KEY, db=self._store)
            revision: int = layout.REVISION.unpack(stored)[0] if stored else 0
            ended = [
                bytes(key)
                for key, stored in writing.cursor(db=self._entries)
                if layout.ENTRY_HEADER.unpack_from(stored)[1] & layout.FLAG_LEASED
            ]
            for key in ended:
                writing.delete(key, db=self._entries)
            revision += len(ended)
            if not existing or ended:
                version_bytes = layout.FORMAT.pack(layout.FORMAT_VERSION)
                writing.put(layout.FORMAT_KEY, version_bytes, db=self._store)
                writing.put(layout.REVISION_KEY, layout.REVISION.pack(revision), db=self._store)
        return revision

    def _read(self, key: str) -> Entry | None:
        with self._translated(), self._environment.begin(db=self._entries) as reading:
            stored = reading.get(key.encode())
            return None if stored is None else _entry(stored)

    def _scan(self, prefix: str) -> list[tuple[str, Entry]]:
        wanted = prefix.encode()
        found = []
        with self._translated(), self._environment.begin(db=self._entries) as reading:
            cursor = reading.cursor()
            if cursor.set_range(wanted):
                for key, stored in cursor:
                    if not key.startswith(wanted):
                        break
                    found.append((key.decode(), _entry(stored)))
        return found

    def _write(self, events: list[Event], leased: frozenset[str]) -> None:
        with self._translated():
            while True:
                try:
                    self._write_once(events, leased)
                    return
                except lmdb.MapFullError:
                    self._grow()

    def _write_once(self, events: list[Event], leased: frozenset[str]) -> None:
        with self._environment.begin(write=True, db=self._entries) as writing:
            for event in events:
                if event.value is None:
                    writing.delete(event.key.encode())
                    continue
                flags = layout.FLAG_LEASED if event.key in leased else 0
                header = layout.ENTRY_HEADER.pack(event.revision, flags)
                writing.put(event.key.encode(), header + event.value)
            newest = layout.REVISION.pack(events[-1].revision)
            writing.put(layout.REVISION_KEY, newest, db=self._store)

    def _grow(self) -> None:
        size = 2 * self._environment.info()["map_size"]
        if size > MAP_BYTES_MAX:
            raise ResourceExhausted(
                f"the metadata in {self._directory} fills {MAP_BYTES_MAX} bytes; delete topics or "
                "subscriptions that nobody uses"
            )
        self._environment.set_mapsize(size)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of LMDB and of the disk, in our words."""
        try:
            yield
        except lmdb.MapFullError:
            raise
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise Internal(
                f"the metadata in {self._directory} is damaged ({error}); restore it from a backup"
            ) from error
        except (lmdb.Error, OSError) as error:
            number = error.errno if isinstance(error, OSError) else _error_number(error)
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise ResourceExhausted(
                    f"the disk refused a write to the metadata in {self._directory} ({error}); free "
                    "some space there and try again"
                ) from error
            raise Unavailable(
                f"the metadata in {self._directory} cannot be used ({error}); check that the "
                "directory exists and can be written"
            ) from error


def _entry(stored: bytes) -> Entry:
    revision, _ = layout.ENTRY_HEADER.unpack_from(stored)
    return Entry(bytes(stored[layout.ENTRY_HEADER.size :]), revision)


def _error_number(error: lmdb.Error) -> int:
    """LMDB gives system errors as text only; find which of those that a full disk causes it is."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        if os.strerror(number) in text:
            return number
    return 0
