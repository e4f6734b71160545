"""The disk of a simulated host: real files whose syncs end, fail or hang as the seed says.

    written bytes   survive the death of a process
    synced bytes    survive a power cut, too: of the rest, each file keeps a beginning, or some
                    sectors, and has what it had before everywhere else

Names of files, and snapshots, are durable at once: `tests/faults` cuts the power there.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from danube_fast.clock import MICROSECOND_NS, MILLISECOND_NS, SECOND_NS
from danube_fast.testing.virtual_clock import Schedule, Trace
from danube_fast.wal.background import Background, Job, StartWork, Sync
from danube_fast.wal.layout import INDEX_NAME, SEGMENT_SUFFIX

__all__ = ["SimulatedDisk", "SimulatedSync"]

SECTOR_BYTES = 512
PAGES_MISSING = 0.2
"""Share of the reads behind the tail whose pages are not in the page cache."""


class _Done:
    """A job that ended as soon as it was begun."""

    def is_alive(self) -> bool:
        """Whether it runs: it has ended."""
        return False

    def join(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""


class SimulatedSync:
    """Stands in for the sync thread of one log."""

    def __init__(self, disk: SimulatedDisk, wake: Callable[[], None]) -> None:
        self._disk = disk
        self._wake = wake
        self._queue: list[tuple[int, int, bool]] = []
        self._wakes = False
        """Whether one of those under way is not quiet."""
        self._under_way: list[tuple[int, int, int, bytes]] = []
        """Descriptor, position, inode, and the file as it was when the sync began."""
        self._turn = 0
        self._synced = 0
        self._fault: tuple[int, int] | None = None

    @property
    def synced_position(self) -> int:
        """All below is durable."""
        return self._synced

    @property
    def backlog(self) -> int:
        """Entries that are queued or under way."""
        return len(self._queue) + len(self._under_way)

    @property
    def times(self) -> list[int]:
        """Not counted."""
        return []

    @property
    def fault(self) -> tuple[int, int] | None:
        """(errno, position) of a failed sync that was not reset."""
        return self._fault

    def start(self, synced_position: int) -> None:
        """Begin; all below is durable already."""
        self._synced = synced_position

    def push(self, fd: int, position: int, *, quiet: bool = False) -> None:
        """Queue a sync of `fd`, whose end wakes the worker unless it is `quiet`."""
        self._queue.append((fd, position, quiet))
        if not self._under_way:
            self._begin()

    def _begin(self) -> None:
        """Take all that is queued, as the sync thread does."""
        queue, self._queue = self._queue, []
        self._wakes = not all(quiet for _, _, quiet in queue)
        for place, (fd, position, _) in enumerate(queue):
            shared = place + 1 < len(queue) and queue[place + 1][0] == fd
            inode, content = (0, b"") if shared else self._disk.read(fd)
            self._under_way.append((fd, position, inode, content))
        self._turn += 1
        turn = self._turn

        def end() -> None:
            if turn == self._turn and self._under_way:
                wakes = self._wakes
                self._end()
                if wakes or self._fault is not None:
                    self._wake()

        self._disk.schedule.call(self._disk.delay_ns(), end)

    def _end(self) -> None:
        batch, self._under_way = self._under_way, []
        self._turn += 1
        for place, (fd, position, inode, content) in enumerate(batch):
            if self._fault is not None:
                break
            if place + 1 < len(batch) and batch[place + 1][0] == fd:
                continue
            if self._disk.fails():
                self._fault = (errno.EIO, position)
                self._disk.trace.note(f"disk: a sync up to {position} failed")
                break
            self._disk.durable[inode] = content
            self._synced = max(self._synced, position)
        if self._queue:
            self._begin()

    def drain(self) -> None:
        """Everything that is queued ends now."""
        while self._under_way:
            self._end()

    def wait(self, position: int, seconds: float) -> bool:
        """The disk does it now, or is slow."""
        if self._synced < position and self._fault is None and self._disk.is_late():
            return False
        self.drain()
        return True

    def reset(self) -> None:
        """Forget a fault."""
        self.drain()
        self._fault = None

    def stop(self) -> bool:
        """End; what is under way does not matter any more."""
        self._queue, self._under_way = [], []
        self._turn += 1
        return True


class SimulatedDisk(Background):
    """The disk of one host. `wake` of each log is called when a sync of it has ended."""

    def __init__(
        self, directory: Path, schedule: Schedule, draw: random.Random, trace: Trace
    ) -> None:
        self.directory = directory
        self.schedule = schedule
        self.trace = trace
        self.durable: dict[int, bytes] = {}
        """Files by inode, as a power cut would leave them."""
        self.wake: Callable[[], None] = lambda: None
        """The process that opens logs next hears of their syncs here."""
        self.slow_until_ns = 0
        self.failures_due = 0
        """So many of the next syncs fail."""
        self.is_sound = False
        """No sync fails, whatever is due."""
        self._draw = draw

    # ------------------------------------------------------------ background of a log

    def make_sync(self, wake_fd: int) -> Sync:
        """A stand-in for the sync thread."""
        return SimulatedSync(self, self.wake)

    def start(self, name: str, work: Callable[[], None]) -> Job:
        """Do it at once."""
        work()
        return _Done()

    def make_fetch(self, wake_fd: int) -> StartWork:
        """Work that ends when the seed says so."""
        wake = self.wake

        def start(work: Callable[[], None], *, is_gentle: bool = False) -> None:
            def end() -> None:
                work()
                wake()

            self.schedule.call(self.delay_ns(), end)

        return start

    def read_cached(self, fd: int, view: memoryview, place: int) -> bool:
        """Find some pages missing, as the seed says."""
        if self._draw.random() < PAGES_MISSING:
            return False
        return os.preadv(fd, [view], place) == len(view)

    def pause(self, stop: threading.Event, seconds: float) -> None:
        """Give way to no other thread: there is none."""

    # ------------------------------------------------------------ syncs

    def delay_ns(self) -> int:
        """How long the next sync takes."""
        late = self.slow_until_ns - self.schedule.clock.now_ns
        if late > 0:
            return self._draw.randrange(
                1 * MILLISECOND_NS, min(late, 3 * SECOND_NS) + 2 * MILLISECOND_NS
            )
        return self._draw.randrange(60 * MICROSECOND_NS, 400 * MICROSECOND_NS)

    def fails(self) -> bool:
        """Whether the sync that ends now fails."""
        if self.failures_due and not self.is_sound:
            self.failures_due -= 1
            return True
        return False

    def is_late(self) -> bool:
        """Whether who waits for a sync waits in vain."""
        return self.slow_until_ns > self.schedule.clock.now_ns and self._draw.random() < 0.5

    def read(self, fd: int) -> tuple[int, bytes]:
        """Inode and content of a file; nothing of a folder."""
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return 0, b""
        return status.st_ino, os.pread(fd, status.st_size, 0)

    # ------------------------------------------------------------ the end of a host

    def _segments(self) -> list[Path]:
        return sorted(self.directory.glob(f"log-*/*{SEGMENT_SUFFIX}"))

    def note_synced(self, log_directory: Path) -> None:
        """Take all of a log as synced: its opener has seen to that."""
        for path in sorted(log_directory.glob(f"*{SEGMENT_SUFFIX}")):
            self.durable[path.stat().st_ino] = path.read_bytes()

    def cut_power(self) -> None:
        """Take back what was not synced, more or less. No process of the host lives."""
        living: dict[int, bytes] = {}
        for path in self._segments():
            inode = path.stat().st_ino
            content = np.fromfile(path, np.uint8)
            before = np.zeros(len(content), np.uint8)
            known = np.frombuffer(self.durable.get(inode, b""), np.uint8)[: len(content)]
            before[: len(known)] = known
            changed = np.flatnonzero(content != before)
            if len(changed):
                low, high = int(changed[0]), int(changed[-1]) + 1
                content = self._torn(content, before, low, high)
                path.write_bytes(content.tobytes())
                inode = path.stat().st_ino
            living[inode] = content.tobytes()
        self.durable = living
        for index in self.directory.glob(f"log-*/{INDEX_NAME}"):
            shutil.rmtree(index)  # it is not believed after another boot

    def _torn(
        self,
        content: np.ndarray[tuple[int], np.dtype[np.uint8]],
        before: np.ndarray[tuple[int], np.dtype[np.uint8]],
        low: int,
        high: int,
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Draw what is left of bytes [low, high) that were written and not synced."""
        if self._draw.random() < 0.3:
            return before
        if self._draw.random() < 0.7:
            cut = self._draw.randrange(low, high + 1)
            self.trace.note(f"disk: torn at byte {cut} of {low} to {high}")
            return np.concatenate((content[:cut], before[cut:]))
        mixed = content.copy()
        for sector in range(low // SECTOR_BYTES, -(-high // SECTOR_BYTES)):
            if self._draw.random() < 0.5:
                place = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
                mixed[place] = before[place]
        return mixed
