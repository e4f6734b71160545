"""Files that become segments: spares made ahead in the background, and the reserve.

    spare-<n>.tmp --zeros written, synced--> spare-<n>.seg --Segment.adopt--> a segment

A spare that was written once costs less to sync into than one that was only allocated, as the file
system has no more bookkeeping to do; so spares get real zeros. `reserve.seg` is small and is taken
only for control records when no other file can be made.

Files are about four times as large as what the log holds, from `start_bytes` to `segment_bytes`: a log that
holds nothing takes little room, and one that grows has soon files of full size, since small ones cost a roll
each and are removed again when they are too small to be spares. A file never grows: a sync of what is
written in it never waits for the file system to note its new end.

    start 4 MiB:  4  4  32  128  128 ...

The file recycled last is taken first: its pages are most likely in the page cache still, so that writing
costs a copy and no fresh pages. Files of zeros, which were never there, wait behind all of those.

A file that is not needed any more gets a temporary name at once and is removed in the background: to remove 128 MiB
out of the page cache takes tens of milliseconds, and a log that was read to its end has many of them.

The pool belongs to the worker's loop; the thread that makes spares only adds to one deque and takes from
another.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

from danube_fast.descriptors import open_file
from danube_fast.wal.background import Background, Job
from danube_fast.wal.layout import (
    RESERVE_NAME,
    RESERVE_SEGMENT_BYTES,
    SEGMENT_SUFFIX,
    SPARE_PREFIX,
    TEMPORARY_SUFFIX,
)

__all__ = ["SparePool"]

_ZEROS = mmap.mmap(-1, 1024 * 1024)  # page-aligned, as O_DIRECT wants it
_SYNC_EVERY_BYTES = 8 * 1024 * 1024  # small syncs, so that the log's own wait less behind them
_PACE_SECONDS = 0.008
"""Between chunks: at most 128 MB/s, as the disk belongs to the log; without, for a log whose files are
still small and that has none ready."""
_STOP_WAIT_SECONDS = 10.0
_AHEAD = 4
"""A file beyond the first ones has at least so many times what the log holds."""


def _create_direct(path: Path) -> int:
    """Open a new file that bypasses the page cache, where the file system can: zeros would only
    push out what readers need. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return open_file(path, flags | os.O_DIRECT)
    except OSError as fault:
        if fault.errno != errno.EINVAL:
            raise
        return open_file(path, flags)


class SparePool:
    """The spare files in a log's folder."""

    def __init__(
        self,
        directory: Path,
        segment_bytes: int,
        spare_segments: int,
        background: Background | None = None,
        start_bytes: int = 0,
    ) -> None:
        """`start_bytes`: size of the first files; 0: all have `segment_bytes`."""
        self._background = background or Background()
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.spare_segments = spare_segments
        self.start_bytes = min(start_bytes or segment_bytes, segment_bytes)
        self.file_bytes = self.start_bytes
        self._ready: collections.deque[tuple[Path, int]] = collections.deque()
        """With the size of each; the last is taken first."""
        self._doomed: collections.deque[Path] = collections.deque()
        self._next_number = 0
        self._number_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: Job | None = None
        self._find()

    def _find(self) -> None:
        """Keep spares of a size that fits, and remove the rest and half-made ones."""
        for name in sorted(os.listdir(self.directory)):
            if not name.startswith(SPARE_PREFIX):
                continue
            path = self.directory / name
            digits = name[len(SPARE_PREFIX) :].partition(".")[0]
            if digits.isdigit():
                self._next_number = max(self._next_number, int(digits) + 1)
            size = path.stat().st_size
            sound = name.endswith(SEGMENT_SUFFIX) and self._fits(size)
            if sound and len(self._ready) < self.spare_segments:
                self._ready.append((path, size))
            else:
                path.unlink()

    def _fits(self, file_bytes: int) -> bool:
        """Whether a file is neither too large nor too small for what the log holds."""
        return self.file_bytes <= file_bytes <= self.segment_bytes

    def expect(self, held_bytes: int) -> None:
        """Make files fit for a log that holds `held_bytes` from now on."""
        doublings = (max(held_bytes - 1, 0) // self.start_bytes).bit_length()
        size = self.start_bytes << doublings
        self.file_bytes = min(size if not doublings else size * _AHEAD, self.segment_bytes)

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def reserve_path(self) -> Path:
        """Where the reserve stands if there is one."""
        return self.directory / RESERVE_NAME

    @property
    def bytes_on_disk(self) -> int:
        """Room taken by the spares, bytes; what is about to be removed counts as gone."""
        return sum(size for _, size in tuple(self._ready))

    def take(self, byte_count: int = 0) -> tuple[Path, int]:
        """A file of at least `byte_count` bytes and its size: a spare, else one made now.

        Raises OSError, e.g. ENOSPC.
        """
        small: list[tuple[Path, int]] = []
        while self._ready and not (small and small[-1][1] >= byte_count):
            small.append(self._ready.pop())
        spare = small.pop() if small and small[-1][1] >= byte_count else None
        self._ready.extend(reversed(small))
        if spare is not None:
            return spare
        size = self.file_bytes
        while size < min(byte_count, self.segment_bytes):
            size *= 2
        size = max(min(size, self.segment_bytes), byte_count)
        try:
            return self.allocate(size), size
        except OSError:
            if not self._doomed:
                raise
            self._remove_doomed()
            return self.allocate(size), size

    def put_back(self, path: Path) -> None:
        """Put back a file that was taken and could not be used after all."""
        size = path.stat().st_size
        if path == self.reserve_path:
            return
        if size <= self.segment_bytes:
            self._ready.append((path, size))
        else:
            path.unlink()

    def give(self, path: Path, file_bytes: int) -> None:
        """Recycle a file that is no segment any more, or remove it. Raises OSError."""
        if self._fits(file_bytes) and len(self._ready) < self.spare_segments:
            spare = self._new_path(SEGMENT_SUFFIX)
            os.rename(path, spare)
            self._ready.append((spare, file_bytes))
        else:
            doomed = self._new_path(TEMPORARY_SUFFIX)
            os.rename(path, doomed)
            self._doomed.append(doomed)
            self.refill()

    def _remove_doomed(self) -> None:
        """Remove files that are not needed. Raises OSError."""
        while self._doomed:
            try:
                path = self._doomed.popleft()
            except IndexError:  # the other thread was quicker
                return
            path.unlink(missing_ok=True)

    def _new_path(self, suffix: str) -> Path:
        with self._number_lock:
            number = self._next_number
            self._next_number += 1
        return self.directory / f"{SPARE_PREFIX}{number}{suffix}"

    def allocate(self, byte_count: int) -> Path:
        """Allocate a file at once, without writing it. Raises OSError."""
        path = self._new_path(TEMPORARY_SUFFIX)
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, byte_count)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        return path

    def refill(self) -> None:
        """Start to make what is missing in the background, unless that is going on already."""
        if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        missing = len(self._ready) < self.spare_segments or not self.reserve_path.exists()
        if missing or self._doomed:
            self._thread = self._background.start("wal-spares", self._make)

    def _make(self) -> None:
        try:
            self._remove_doomed()
            if not self.reserve_path.exists():
                size = min(RESERVE_SEGMENT_BYTES, self.segment_bytes)
                self._write_zeros(self.reserve_path, size)
            while len(self._ready) < self.spare_segments and not self._stop.is_set():
                path = self._new_path(SEGMENT_SUFFIX)
                size = self.file_bytes
                if self._write_zeros(path, size):
                    self._ready.appendleft((path, size))
            self._remove_doomed()
        except OSError:
            pass  # the next roll tries again and tells its caller

    def _write_zeros(self, path: Path, byte_count: int) -> bool:
        """Make a file of zeros under a temporary name, then rename it. False if told to stop."""
        temporary = path.with_suffix(TEMPORARY_SUFFIX)
        fd = _create_direct(temporary)
        done = False
        try:
            os.posix_fallocate(fd, 0, byte_count)
            zeros = memoryview(_ZEROS)
            for offset in range(0, byte_count, len(_ZEROS)):
                if self._stop.is_set():
                    return False
                os.pwrite(fd, zeros[: byte_count - offset], offset)
                self._remove_doomed()
                if self._ready or self.file_bytes == self.segment_bytes:
                    self._background.pause(self._stop, _PACE_SECONDS)
                if offset % _SYNC_EVERY_BYTES == 0:
                    os.fdatasync(fd)
            os.fdatasync(fd)
            done = True
        finally:
            os.close(fd)
            if done:
                os.rename(temporary, path)
            else:
                temporary.unlink()
        return True

    def stop(self) -> None:
        """End the background work; a half-made file is removed, and so is what is not needed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_SECONDS)
        with contextlib.suppress(OSError):  # the next start finds what is left
            self._remove_doomed()
