"""Snapshots: files that hold what all frames below a position add up to.

    <position>.snap = 64-byte header | state          (drawn in layout.py)

Written in a thread of their own: temporary file, fsync, rename, fsync of the folder; the newest two
are kept. A snapshot is put in place only when the log below its position is durable, so it never
knows more than the log. What the state means is the caller's business.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from danube_fast.durable import replace_file
from danube_fast.errors import DataLoss
from danube_fast.frame.crc import crc32c
from danube_fast.frame.file_header import FILE_HEADER_BYTES
from danube_fast.wal.background import Background, Job
from danube_fast.wal.layout import (
    SNAPSHOT_SUFFIX,
    TEMPORARY_SUFFIX,
    SnapshotHeader,
    position_from_name,
    position_name,
)

__all__ = ["Snapshot", "SnapshotStore", "list_snapshots", "read_snapshot"]

_KEPT = 2
_POLL_SECONDS = 0.002
_STOP_WAIT_SECONDS = 30.0


class Snapshot(NamedTuple):
    """A snapshot that was read and checked."""

    header: SnapshotHeader
    state: bytes


def list_snapshots(directory: Path) -> list[tuple[int, Path]]:
    """(position, path) of every snapshot file, newest first."""
    found = []
    for name in os.listdir(directory):
        position = position_from_name(name, SNAPSHOT_SUFFIX)
        if position is not None:
            found.append((position, directory / name))
    return sorted(found, reverse=True)


def read_snapshot(path: Path) -> Snapshot:
    """Read one. Raises DataLoss if it is damaged, FailedPrecondition if its format is newer."""
    data = path.read_bytes()
    header = SnapshotHeader.decode(data, str(path))
    state = data[FILE_HEADER_BYTES:]
    if len(state) != header.state_bytes or crc32c(state) != header.state_crc:
        raise DataLoss(f"snapshot {path} is damaged; run `danube-fast wal verify`")
    return Snapshot(header, state)


def write_snapshot(directory: Path, header: SnapshotHeader, state: bytes) -> None:
    """Write one durably under its final name. Raises OSError."""
    path = directory / position_name(header.position, SNAPSHOT_SUFFIX)
    temporary = path.with_suffix(TEMPORARY_SUFFIX)
    replace_file(path, header.encode(), state, temporary=temporary)


class SnapshotStore:
    """The snapshots of one log. `position` is read by the worker's loop, set by the thread."""

    def __init__(
        self,
        directory: Path,
        synced_position: Callable[[], int],
        background: Background | None = None,
    ) -> None:
        self._background = background or Background()
        self.directory = directory
        self._synced_position = synced_position
        self._positions: list[int] = [position for position, _ in list_snapshots(directory)]
        self._thread: Job | None = None
        self._cancel = threading.Event()
        for name in os.listdir(directory):
            if position_from_name(name, TEMPORARY_SUFFIX) is not None:
                (directory / name).unlink()

    @property
    def position(self) -> int:
        """Position of the newest durable snapshot, 0 if there is none."""
        return self._positions[0] if self._positions else 0

    @property
    def oldest_position(self) -> int:
        """Position of the oldest one that is kept: the log must be there from here on."""
        return self._positions[-1] if self._positions else 0

    @property
    def is_saving(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def load(self, log_id: int) -> Snapshot | None:
        """The newest sound snapshot of this log. Damaged ones are passed over.

        Raises FailedPrecondition if one is newer than this program.
        """
        for position, path in list_snapshots(self.directory):
            try:
                snapshot = read_snapshot(path)
            except DataLoss:
                self._positions.remove(position)
                continue
            if snapshot.header.log_id == log_id and snapshot.header.position == position:
                return snapshot
        return None

    def save(self, header: SnapshotHeader, state: bytes) -> None:
        """Write one in the background, as soon as the log is durable up to its position."""
        self._cancel.clear()
        self._thread = self._background.start("wal-snapshot", lambda: self._save(header, state))

    def _save(self, header: SnapshotHeader, state: bytes) -> None:
        while self._synced_position() < header.position:
            if self._cancel.wait(_POLL_SECONDS):
                return
        with contextlib.suppress(OSError):  # the next one is written from more, not from this one
            self.save_now(header, state)

    def save_now(self, header: SnapshotHeader, state: bytes) -> None:
        """Write one and wait for it; removes all but the newest two. Raises OSError."""
        write_snapshot(self.directory, header, state)
        kept = sorted({header.position, *self._positions}, reverse=True)
        for position in kept[_KEPT:]:
            (self.directory / position_name(position, SNAPSHOT_SUFFIX)).unlink(missing_ok=True)
        self._positions = kept[:_KEPT]

    def drop_from(self, position: int) -> None:
        """Forget snapshots above `position`: the log there was given up."""
        for above in [at for at in self._positions if at > position]:
            (self.directory / position_name(above, SNAPSHOT_SUFFIX)).unlink(missing_ok=True)
        self._positions = [at for at in self._positions if at <= position]

    def cancel(self) -> None:
        """Give up a save that still waits for the log to become durable; waits for a running one."""
        self._cancel.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_SECONDS)
