"""What a disk holds after a power cut, computed from the journal that disk.c keeps.

    write  write  sync  write  rename | cut
    +----- durable ----+ +- perhaps -+

Of what no sync has covered, any sector may be there or not; names of a folder change in order, and
how far they came is chance too. Any position of the journal is an instant at which the power may
have failed, so one run of a broker gives as many cuts as one likes.
"""

from __future__ import annotations

import os
import random
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Kind", "Recording"]

_HEAD = struct.Struct("<IIQQQII")
ZEROS, DURABLE, FOLDER = 1, 2, 4
SECTORS = (512, 4096)
"""What reaches the disk as a whole or not at all, bytes."""


class Kind(IntEnum):
    """Records of the journal, as in disk.c."""

    WRITE = 1
    SYNC = 2
    GROW = 3
    TRUNCATE = 4
    CREATE = 5
    RENAME = 6
    UNLINK = 7


class Record(NamedTuple):
    """One of them; `end` is where it ends in the journal."""

    end: int
    kind: Kind
    flags: int
    inode: int
    at: int
    size: int
    path: str
    data: memoryview


class _File:
    """Changes of one file in order; those below `durable` are covered by a sync."""

    def __init__(self) -> None:
        self.changes: list[Record] = []
        self.durable = 0

    def sync(self, covered: int) -> None:
        while self.durable < len(self.changes) and self.changes[self.durable].end <= covered:
            self.durable += 1


class _Folder:
    """Changes of names in one folder: (end, name, file, or None if it went)."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, list[tuple[str, _File | None]]]] = []
        self.durable = 0

    def sync(self, covered: int) -> None:
        while self.durable < len(self.changes) and self.changes[self.durable][0] <= covered:
            self.durable += 1


class Recording:
    """A journal, read to its end."""

    def __init__(self, path: Path) -> None:
        data = memoryview(path.read_bytes())
        self.records: list[Record] = []
        at = 0
        while at + _HEAD.size <= len(data):
            kind, flags, inode, where, size, path_bytes, data_bytes = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            name = bytes(data[at : at + path_bytes]).decode()
            at += path_bytes + data_bytes
            if at > len(data):
                break  # its writer was killed
            content = data[at - data_bytes : at]
            self.records.append(Record(at, Kind(kind), flags, inode, where, size, name, content))

    def build(self, cut: int, root: Path, target: Path, draw: random.Random, *, power: bool) -> str:
        """Make in `target` what `root` holds when the power fails at `cut`; what chance decided.

        Without `power`: when all processes are killed at `cut`, so that nothing is lost.
        """
        folders = self._replay(cut)
        luck = draw.choice((0.0, 0.3, 0.7, 1.0)) if power else 1.0
        sector = draw.choice(SECTORS)
        lost = kept = 0
        for folder, changes in folders.items():
            reached = changes.durable
            pending = len(changes.changes) - reached
            reached += round(luck * pending) if luck in (0.0, 1.0) else draw.randint(0, pending)
            kept += reached
            lost += len(changes.changes) - reached
            place = target / Path(folder).relative_to(root)
            place.mkdir(parents=True, exist_ok=True)
            names: dict[str, _File] = {}
            for _, steps in changes.changes[:reached]:
                for name, file in steps:
                    if file is None:
                        names.pop(name, None)
                    else:
                        names[name] = file
            for name, file in names.items():
                _write(place / name, file, luck, sector, draw)
        return (
            f"luck {luck}, sectors of {sector} bytes, {lost} of {lost + kept} names' changes lost"
        )

    def _replay(self, cut: int) -> dict[str, _Folder]:
        files: dict[int, _File] = {}
        names: dict[str, _File] = {}
        folders: dict[str, _Folder] = {}

        def name_changes(end: int, *changes: tuple[str, _File | None]) -> None:
            folder = folders.setdefault(os.path.dirname(changes[0][0]), _Folder())
            folder.changes.append((end, [(os.path.basename(path), f) for path, f in changes]))
            for path, file in changes:
                if file is None:
                    names.pop(path, None)
                else:
                    names[path] = file

        for record in self.records:
            if record.end > cut:
                break
            kind = record.kind
            if kind == Kind.CREATE:
                file = files[record.inode] = _File()
                name_changes(record.end, (record.path, file))
            elif kind == Kind.RENAME:
                old, _, new = record.path.partition("\0")
                assert os.path.dirname(old) == os.path.dirname(new), record.path
                name_changes(record.end, (old, None), (new, names[old]))
            elif kind == Kind.UNLINK:
                name_changes(record.end, (record.path, None))
            elif kind == Kind.SYNC and record.flags & FOLDER:
                folders.setdefault(record.path, _Folder()).sync(record.at)
            elif kind == Kind.SYNC:
                files.setdefault(record.inode, _File()).sync(record.at)
            else:
                files.setdefault(record.inode, _File()).changes.append(record)
        return folders


def _write(path: Path, file: _File, luck: float, sector: int, draw: random.Random) -> None:
    """The file as the disk has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for index, change in enumerate(file.changes):
            sure = index < file.durable or bool(change.flags & DURABLE)
            if change.kind == Kind.WRITE:
                _write_some(fd, change, 1.0 if sure else luck, sector, draw)
            elif sure or draw.random() < luck:
                grows = change.kind == Kind.GROW
                if not grows or os.fstat(fd).st_size < change.size:
                    os.ftruncate(fd, change.size)
    finally:
        os.close(fd)


def _write_some(fd: int, change: Record, luck: float, sector: int, draw: random.Random) -> None:
    """Those sectors of a write that reached the disk."""
    data: Any = bytes(change.size) if change.flags & ZEROS else change.data
    if luck == 1.0:
        os.pwrite(fd, data, change.at)
        return
    if luck == 0.0:
        return
    start = change.at
    end = start + change.size
    while start < end:
        stop = min(end, (start // sector + 1) * sector)
        if draw.random() < luck:
            os.pwrite(fd, data[start - change.at : stop - change.at], start)
        start = stop
