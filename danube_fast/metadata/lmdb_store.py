"""Metadata on this host's disk: LMDB, one synchronous commit per change, one process at a time.

The coordinator owns it. A kill at any instant leaves the last committed state: LMDB never overwrites a
page that a committed tree uses. No WRITEMAP: with it, a full disk would be a SIGBUS instead of an error.
The file is looked over before LMDB maps it, every value has a checksum of its own, and the seal tells
whether this is the store that was acknowledged here. Layout: metadata/layout.py.
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
from danube_fast.durable import sync_directory
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.lmdb_file import check_lmdb_file
from danube_fast.metadata import layout
from danube_fast.metadata.local import LocalStore
from danube_fast.metadata.seal import Seal, SealFile
from danube_fast.metadata.store import Entry, Event

__all__ = ["LmdbStore"]

MAP_BYTES = 64 * 1024 * 1024
"""Address space at first; doubled when full. A topic takes a few hundred bytes."""

MAP_BYTES_MAX = 16 * 1024 * 1024 * 1024
"""Where doubling ends: far more metadata than one host can serve."""

_DATABASES_MAX = 8


class LmdbStore(LocalStore):
    """A `MetadataStore` in `directory`, which is made if missing.

    `seal`: the store must be the one that this file tells of; a store is only made if the file
    tells of one that is still empty. Raises FailedPrecondition when another process has it open, or
    when a newer danube-fast wrote it; Unavailable when it cannot be read; DataLoss when it is damaged
    or less than what was acknowledged, unless `accept_older`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        clock: Clock,
        seal: Path | None = None,
        *,
        accept_older: bool = False,
    ) -> None:
        self._directory = Path(directory)
        self._seal_file = None if seal is None else SealFile(seal)
        self._seal_fd = -1
        self._sealed = 0
        self._accepts_older = accept_older
        self._identity = b""
        with contextlib.ExitStack() as undo:
            with self._translated():
                self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
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
                self._put_under_seal(revision)
            undo.pop_all()
        super().__init__(clock, revision)

    def close(self) -> None:
        """Close the environment, then give the lock back."""
        with self.lock:
            if self._closed:
                return
            super().close()
            self._environment.close()
            if self._seal_fd >= 0:
                os.close(self._seal_fd)
            os.close(self._lock_fd)

    @property
    def sealed_revision(self) -> int:
        """The newest revision that the seal tells of, durably."""
        return self._sealed if self._seal_file is not None else self.revision

    @property
    def identity(self) -> bytes:
        """16 bytes that no other store has."""
        return self._identity

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(
                f"another process has the metadata in {self._directory} open; stop it first"
            ) from None

    def _open(self) -> lmdb.Environment:
        data_file = self._directory / layout.DATA_FILE
        try:
            check_lmdb_file(data_file)
        except DataLoss as fault:
            raise DataLoss(f"{fault}; {self._remedy}") from None
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
        sync_directory(self._directory)
        return environment

    @property
    def _remedy(self) -> str:
        return f"put {self._directory} back from a backup of this data directory"

    def _prepare(self) -> int:
        """Check or write the format, drop what stood under leases; returns the newest revision."""
        with self._environment.begin() as probe:
            existing = probe.get(layout.STORE_DATABASE) is not None
        seal = self._seal_file.read() if self._seal_file else None
        if not existing:
            self._check_may_be_new(seal)
        version = self._format() if existing else layout.FORMAT_VERSION
        if not existing:
            self._store = self._environment.open_db(layout.STORE_DATABASE)
        self._entries = self._environment.open_db(layout.ENTRIES_DATABASE)
        with self._environment.begin(write=True) as writing:
            if version < layout.FORMAT_VERSION:
                self._convert(writing)
            revision, self._identity = self._origin(writing, seal, existing=existing)
            self._check_seal(seal, revision)
            if seal is not None:
                revision = max(revision, seal.revision)
            ended = [key for key, flags in self._flags(writing) if flags & layout.FLAG_LEASED]
            for key in ended:
                writing.delete(key, db=self._entries)
            revision += len(ended)
            self._note(writing, layout.REVISION_KEY, layout.REVISION.pack(revision))
            self._note(writing, layout.IDENTITY_KEY, self._identity)
            writing.put(
                layout.FORMAT_KEY, layout.FORMAT.pack(layout.FORMAT_VERSION), db=self._store
            )
        return revision

    def _format(self) -> int:
        """The version that an existing store has."""
        self._store = self._environment.open_db(layout.STORE_DATABASE, create=False)
        with self._environment.begin(db=self._store) as reading:
            written = reading.get(layout.FORMAT_KEY) or b""
        if len(written) != layout.FORMAT.size:
            raise DataLoss(f"the metadata in {self._directory} has no format; {self._remedy}")
        version: int = layout.FORMAT.unpack(written)[0]
        if version > layout.FORMAT_VERSION:
            raise FailedPrecondition(
                f"the metadata in {self._directory} has format {version}, and this version of "
                f"danube-fast reads up to {layout.FORMAT_VERSION}: start the newer one again"
            )
        return version

    def _convert(self, writing: lmdb.Transaction) -> None:
        """From version 1, which had no checksums."""
        for key, stored in list(writing.cursor(db=self._entries)):
            revision, flags = layout.ENTRY_HEADER.unpack_from(stored)
            value = bytes(stored[layout.ENTRY_HEADER.size :])
            entry = layout.encode_entry(bytes(key), revision, flags, value)
            writing.put(key, entry, db=self._entries)
        revision_bytes = writing.get(layout.REVISION_KEY, db=self._store)
        self._note(writing, layout.REVISION_KEY, bytes(revision_bytes or layout.REVISION.pack(0)))
        self._note(writing, layout.IDENTITY_KEY, Seal.new().identity)

    def _note(self, writing: lmdb.Transaction, key: bytes, value: bytes) -> None:
        writing.put(key, layout.guard(key, value), db=self._store)

    def _origin(
        self, reading: lmdb.Transaction, seal: Seal | None, *, existing: bool
    ) -> tuple[int, bytes]:
        """(revision, identity) of the store."""
        if not existing:
            return 0, (seal or Seal.new()).identity
        values = [
            layout.unguard(key, reading.get(key, db=self._store))
            for key in (layout.REVISION_KEY, layout.IDENTITY_KEY)
        ]
        revision, identity = values
        if revision is None or identity is None:
            raise DataLoss(
                f"the metadata in {self._directory} is damaged: its revision or identity is not "
                f"what was written; {self._remedy}"
            )
        return layout.REVISION.unpack(revision)[0], identity

    def _flags(self, reading: lmdb.Transaction) -> list[tuple[bytes, int]]:
        """Keys and flags of all entries, each of them checked."""
        return [
            (bytes(key), self._decode(bytes(key), stored)[1])
            for key, stored in reading.cursor(db=self._entries)
        ]

    def _decode(self, key: bytes, stored: bytes | memoryview) -> tuple[int, int, bytes]:
        decoded = layout.decode_entry(key, stored)
        if decoded is None:
            raise DataLoss(
                f"the metadata in {self._directory} is damaged: the value of "
                f"{key.decode(errors='replace')} is not what was written; {self._remedy}"
            )
        return decoded

    # ------------------------------------------------------------ the seal

    def _check_may_be_new(self, seal: Seal | None) -> None:
        """Raise DataLoss if there must have been a store."""
        if self._seal_file is None or self._seal_file.is_empty:
            return
        if seal is not None and seal.revision == 0:
            return
        known = f"was at revision {seal.revision}" if seal else "belongs to the logs beside it"
        raise DataLoss(
            f"the metadata in {self._directory} is missing or empty, although it {known}; "
            f"{self._remedy}, or choose an empty directory with --data-dir"
        )

    def _check_seal(self, seal: Seal | None, revision: int) -> None:
        """Raise DataLoss if this is not the store that was acknowledged here."""
        if seal is None or self._seal_file is None:
            return
        if seal.identity != self._identity:
            raise DataLoss(
                f"the metadata in {self._directory} belongs to another data directory, says "
                f"{self._seal_file.path}; {self._remedy}"
            )
        if seal.revision > revision and not self._accepts_older:
            raise DataLoss(
                f"the metadata in {self._directory} is of revision {revision}, but revision "
                f"{seal.revision} was acknowledged, says {self._seal_file.path}: it is an older "
                f"copy; {self._remedy} that is as new, or go on without what it does not know: "
                "danube-fast serve --accept-rollback"
            )

    def _put_under_seal(self, revision: int) -> None:
        if self._seal_file is not None:
            self._seal_file.create(Seal(self._identity, revision))
            self._seal_fd = self._seal_file.open()
            self._sealed = revision

    def _read(self, key: str) -> Entry | None:
        with self._translated(), self._environment.begin(db=self._entries) as reading:
            stored = reading.get(key.encode())
            return None if stored is None else self._entry(key.encode(), stored)

    def _scan(self, prefix: str) -> list[tuple[str, Entry]]:
        wanted = prefix.encode()
        found = []
        with self._translated(), self._environment.begin(db=self._entries) as reading:
            cursor = reading.cursor()
            if cursor.set_range(wanted):
                for key, stored in cursor:
                    if not key.startswith(wanted):
                        break
                    found.append((key.decode(), self._entry(bytes(key), stored)))
        return found

    def _entry(self, key: bytes, stored: bytes | memoryview) -> Entry:
        revision, _, value = self._decode(key, stored)
        return Entry(value, revision)

    def _write(self, events: list[Event], leased: frozenset[str]) -> None:
        with self._translated():
            while True:
                try:
                    self._write_once(events, leased)
                    break
                except lmdb.MapFullError:
                    self._grow()
        if self._seal_fd >= 0:
            # The change is durable whatever happens to the seal: the next one writes it again.
            with contextlib.suppress(OSError):
                SealFile.write(self._seal_fd, Seal(self._identity, events[-1].revision))
                self._sealed = events[-1].revision

    def _write_once(self, events: list[Event], leased: frozenset[str]) -> None:
        with self._environment.begin(write=True, db=self._entries) as writing:
            for event in events:
                if event.value is None:
                    writing.delete(event.key.encode())
                    continue
                flags = layout.FLAG_LEASED if event.key in leased else 0
                key = event.key.encode()
                writing.put(key, layout.encode_entry(key, event.revision, flags, event.value))
            self._note(writing, layout.REVISION_KEY, layout.REVISION.pack(events[-1].revision))

    def _grow(self) -> None:
        size = 2 * self._environment.info()["map_size"]
        if size > MAP_BYTES_MAX:
            raise ResourceExhausted(
                f"the metadata in {self._directory} fills {MAP_BYTES_MAX} bytes; delete topics or "
                "subscriptions that are not used"
            )
        self._environment.set_mapsize(size)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of LMDB and of the disk, in our words."""
        try:
            yield
        except (lmdb.MapFullError, DanubeError):  # Unavailable is an OSError too
            raise
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise Internal(
                f"the metadata in {self._directory} is damaged ({error}); {self._remedy}"
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


def _error_number(error: lmdb.Error) -> int:
    """LMDB gives system errors as text only; find which of those that a full disk causes it is."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        if os.strerror(number) in text:
            return number
    return 0
