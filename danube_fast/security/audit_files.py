"""Files of the audit log: appended to, made durable, rotated by size and number; read page by page.

    DATA_DIR/audit/audit.jsonl            the newest records
                   audit-00000001.jsonl   older ones; a larger number is newer
                   published              how far the topic is

A disk that is full takes nothing of what it does not take whole. A kill may leave half a line. It stays, the next line begins on a line of its own, and readers pass over it. A file whose
sync has failed is closed for good, as later syncs of it say nothing about what was lost.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from danube_fast.clock import SECOND_NS
from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory
from danube_fast.errors import InvalidArgument
from danube_fast.security.audit import LINE_BYTES_MAX, AuditRecord, decode_record, shown_time

__all__ = [
    "AuditFile",
    "AuditPage",
    "Published",
    "begun_anew",
    "chosen",
    "last_seq",
    "read_page",
    "read_published",
    "since_text",
    "start_at",
    "write_published",
]

CURRENT = "audit.jsonl"
PUBLISHED = "published"
PAGE_BYTES = 256 * 1024
_TAIL_BYTES = 4 * LINE_BYTES_MAX
_OLDER = re.compile(r"audit-([0-9]{8,})\.jsonl")
_CURSOR = re.compile(r"([0-9]{1,12}):([0-9]{1,18})")
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


def _older_files(folder: Path) -> list[tuple[int, Path]]:
    """List the files that are closed, oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(match, name) for name in names if (match := _OLDER.fullmatch(name))]
    return sorted((int(match[1]), folder / name) for match, name in found)


class AuditFile:
    """Append lines to the log. One process has one; all errors are OSError, and the next call tries anew."""

    def __init__(self, folder: Path, *, file_bytes: int, files: int) -> None:
        """`file_bytes`: a file that has grown so large is closed; `files`: so many are kept."""
        self._folder, self._file_bytes, self._files = folder, file_bytes, files
        self._fd = -1
        self._size = 0
        self._is_torn = self._is_suspect = False
        self._is_unnamed = True
        """Whether the names in the folder are not durable yet."""

    @property
    def fd(self) -> int:
        """Descriptor of the newest file; -1: it is not open."""
        return self._fd

    @property
    def is_moved(self) -> bool:
        """Whether the file that is open is not in the folder any more. Raises OSError."""
        if self._fd < 0:
            return False
        try:
            named = os.stat(self._folder / CURRENT)
        except FileNotFoundError:
            return True
        return not os.path.samestat(named, os.fstat(self._fd))

    def append(self, lines: bytes, *, sync: bool) -> None:
        """Write whole lines, and make them durable if `sync`. Raises OSError: then they may be there all the same."""
        if self._fd >= 0 and self._size >= self._file_bytes:
            self.sync()
        if self._fd < 0 or self._size >= self._file_bytes:
            self._open()
        data = b"\n" + lines if self._is_torn else lines
        try:
            self._write(data)
            if sync:
                self.sync()
        except OSError:
            self.close()
            raise

    def _write(self, data: bytes) -> None:
        view, start = memoryview(data), self._size
        self._is_torn = True
        try:
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
        except OSError:
            # lines that are whole are written again, and would be there twice
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise
        self._is_torn = False

    def sync(self) -> None:
        """Make all lines durable. Raises OSError; then no line since the last sync is sure to be there."""
        try:
            os.fdatasync(self._fd)
        except OSError:
            self.distrust()
            raise

    def distrust(self) -> None:
        """Write to another file from now on: a sync of this one has failed."""
        self._is_suspect = True
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Open the newest file, another one if that has grown too large or its sync has failed."""
        path = self._folder / CURRENT
        self.close()
        self._folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        is_full = path.exists() and path.stat().st_size >= self._file_bytes
        if path.exists() and (is_full or self._is_suspect):
            older = _older_files(self._folder)
            number = older[-1][0] + 1 if older else 1
            path.rename(self._folder / f"audit-{number:08}.jsonl")
        self._is_suspect = False
        self._is_unnamed |= not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = open_file(path, flags, _FILE_MODE)
        try:
            self._size = os.fstat(fd).st_size
            self._is_torn = self._size > 0 and os.pread(fd, 1, self._size - 1) != b"\n"
            if self._is_unnamed:
                for _, oldest in _older_files(self._folder)[: -(self._files - 1)]:
                    oldest.unlink(missing_ok=True)
                sync_directory(self._folder)
                sync_directory(self._folder.parent)
                self._is_unnamed = False
        except OSError:
            os.close(fd)
            raise
        self._fd = fd


# ---------------------------------------------------------------- reading


class Published(msgspec.Struct, frozen=True):
    """How far the topic of the audit log has what the files have."""

    seq: int = 0
    cursor: str = ""


def read_published(folder: Path) -> Published | None:
    """Read how far the topic is; None: it was never written, or that is not known any more. Raises OSError."""
    try:
        return msgspec.json.decode((folder / PUBLISHED).read_bytes(), type=Published)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write_published(folder: Path, published: Published) -> None:
    """Record how far the topic is; a power cut may bring an older state back. Raises OSError."""
    temporary = folder / f"{PUBLISHED}.partial"
    temporary.write_bytes(msgspec.json.encode(published))
    temporary.chmod(_FILE_MODE)
    temporary.replace(folder / PUBLISHED)


class AuditPage(NamedTuple):
    """Some records, in their order."""

    records: list[AuditRecord]
    cursor: str
    """Where the next page begins."""
    is_last: bool
    """Whether there is nothing more yet."""
    damaged: int
    """Lines that could not be read."""


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """List all files, oldest first, the newest with the number that it will have."""
    older = _older_files(folder)
    return [*older, (older[-1][0] + 1 if older else 1, folder / CURRENT)]


def read_page(folder: Path, cursor: str = "", bytes_max: int = PAGE_BYTES) -> AuditPage:
    """Read the records behind a cursor; "": from the oldest on. Raises InvalidArgument, OSError."""
    number, offset = _parse_cursor(cursor)
    for found, path in _numbered(folder):
        if found < number:
            continue
        if found > number:
            number, offset = found, 0
        is_newest = path.name == CURRENT
        data = _read(folder, found, path, offset, max(bytes_max, LINE_BYTES_MAX))
        end = data.rfind(b"\n") + 1
        if not end and (len(data) >= LINE_BYTES_MAX or (data and not is_newest)):
            end = len(data)  # no line is so long, and no more is coming to it
        if end or is_newest:
            lines = [line for line in data[:end].split(b"\n") if line]
            records = [record for line in lines if (record := decode_record(line)) is not None]
            place = f"{number}:{offset + end}"
            return AuditPage(records, place, is_newest and not end, len(lines) - len(records))
        number, offset = found + 1, 0
    return AuditPage([], cursor or "1:0", True, 0)


def begun_anew(folder: Path, cursor: str) -> str:
    """Return the cursor to go on from behind a move of the newest file, or of all: files that are there still are not read
    again but the one it is in. Raises InvalidArgument, OSError."""
    number, _ = _parse_cursor(cursor)
    return f"{number}:0" if cursor and number <= _numbered(folder)[-1][0] else ""


def chosen(
    records: Iterable[AuditRecord], *, since: str, principal: str, denied: bool
) -> list[dict[str, Any]]:
    """Choose records of a time or later, of a principal (empty: of all), the denied ones alone; as maps."""
    return [
        msgspec.to_builtins(record)
        for record in records
        if record.time >= since
        and (not principal or record.principal == principal)
        and (not denied or record.event == "denied")
    ]


def since_text(now_ns: int, seconds: int) -> str:
    """Write the time so many seconds ago as records have it; of 0 the empty text, before all."""
    return shown_time(max(now_ns - seconds * SECOND_NS, 0)) if seconds else ""


def _parse_cursor(cursor: str) -> tuple[int, int]:
    if not cursor:
        return 0, 0
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidArgument(f"{cursor!r} is no place in the audit log; begin without one")
    return int(match[1]), int(match[2])


def _read(folder: Path, number: int, path: Path, offset: int, count: int) -> bytes:
    """Read bytes of a file, which may be closed and get its number meanwhile."""
    try:
        fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    try:
        if dict(_numbered(folder)).get(number) != path:
            os.close(fd)
            fd = open_file(folder / f"audit-{number:08}.jsonl", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, count, offset)
    finally:
        os.close(fd)


def start_at(folder: Path, time: str) -> str:
    """Find a cursor with all records since a time behind it: the newest file that begins before."""
    start = ""
    for number, path in _numbered(folder):
        with contextlib.suppress(OSError):
            first = next(iter(_records_in(_read(folder, number, path, 0, _TAIL_BYTES))), None)
            if first is not None and first.time >= time:
                break
            if first is not None:
                start = f"{number}:0"
    return start


def last_seq(folder: Path) -> int:
    """Find the number of the newest record; 0: there is none. Raises OSError."""
    for number, path in reversed(_numbered(folder)):
        size = path.stat().st_size if path.exists() else 0
        data = _read(folder, number, path, max(size - _TAIL_BYTES, 0), _TAIL_BYTES)
        numbers = [record.seq for record in _records_in(data)]
        if numbers:
            return max(numbers)
    return 0


def _records_in(data: bytes) -> list[AuditRecord]:
    return [
        record for line in data.split(b"\n") if line and (record := decode_record(line)) is not None
    ]
