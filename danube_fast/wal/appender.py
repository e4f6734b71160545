"""The writing end of a log: where the next group goes, rolling to new segments, cutting back.

    reserve(n)  makes sure that a group of n bytes fits the newest segment, else rolls
    append(...) one gathering write; on an error nothing counts as written
    sync()      hands what was written to the sync thread

Rolling: what is unsynced in the old segment is queued first, then the folder (the new name must be
durable before anything in the new file counts), then come the new segment's own groups.

A write that failed half-way may leave whole frames behind at their own positions, which a later,
shorter group would not cover; the epoch then rises by one, so recovery cannot take them.
"""

from __future__ import annotations

import collections
import contextlib
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
)
from danube_fast.frame.layout import HEADER_BYTES, At
from danube_fast.wal.background import Sync
from danube_fast.wal.durable_writes import DURABLE_BYTES_MAX, Way, choose_way
from danube_fast.wal.layout import (
    GROUP_ALIGNMENT,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    group_bytes,
    pad_bytes,
)
from danube_fast.wal.rewrite import Rewrite, restamp
from danube_fast.wal.segment import Chain, Segment
from danube_fast.wal.spares import SparePool
from danube_fast.wal.sync import SyncThread
from danube_fast.wal.writer import PadStamper, WriteFault, write_all

__all__ = ["BACKLOG_MAX", "Appender", "Held", "Lent"]

_LEFT_OPEN = 2  # segments that were left by a roll and stay open for readers
BACKLOG_MAX = 256
"""With so many syncs queued the disk hangs: the next are put off, so that the queue never fills up
and the loop never waits for it; rolls, which must queue theirs, have the rest."""
_BARRIER_WAIT_SECONDS = 0.5
"""Far more than a sound disk needs for one marker, far less than a heartbeat may be late."""
_ZEROS = memoryview(bytes(GROUP_ALIGNMENT))
_POSITION = struct.Struct("<Q")
_EPOCH = struct.Struct("<I")
_FDATASYNC, _DIRECT = Way.FDATASYNC, Way.DIRECT


class Lent(NamedTuple):
    """The means by which kernels write groups, back to back from `written_position` on."""

    fd: int
    delta: int
    """From a position to its place in the file."""
    end_position: int
    """Behind the segment."""
    syncs: int
    """Address of the queue of syncs, and the eventfd of its thread."""
    sync_bell: int
    durable_bytes: int
    """Size up to which a group may be given to the sync thread, which writes it and makes it durable; 0: none."""
    durable_fd: int
    durable_flags: int


Held = tuple[int, memoryview] | None
"""Position and bytes of a group that was given to the sync thread, and may not stand in the file yet."""


class Appender:
    """Owns the newest segment. `written_position` is where the next group starts."""

    def __init__(
        self,
        directory: Path,
        log_id: int,
        chain: Chain,
        spares: SparePool,
        sync: Sync,
        wall_ns: Callable[[], int],
        durable_writes: str = Way.FDATASYNC,
    ) -> None:
        """`durable_writes`: the setting, "auto" or a way."""
        self.directory = directory
        self.written_position = 0
        self.epoch = 0
        self.rolls = 0
        self._log_id = log_id
        self._chain = chain
        self._spares = spares
        self._sync = sync
        self._wall_ns = wall_ns
        self._queued_position = 0
        self._barrier_due = False
        self._barrier_end = 0
        self._cut_epoch = 0
        self.is_put_off = False
        """A sync was asked for while too many were queued."""
        self._is_torn = False
        """Kernels may have left a part of a group behind `written_position`."""
        self._durable_writes = durable_writes
        self._held: tuple[Segment, int, memoryview] | None = None
        """The group that the sync thread writes."""
        self._epochs: list[tuple[int, int]] = []
        self._left: collections.deque[Segment] = collections.deque()
        self._pads = PadStamper(log_id)
        self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    # -- starting and stopping ---------------------------------------------------------------

    def start(self, position: int, epoch: int) -> None:
        """Go on at `position` with `epoch`, in the newest segment if there is one."""
        self.written_position = self._queued_position = position
        self._set_epoch(epoch)
        self._spares.expect(self._chain.bytes_on_disk)
        if self._durable_writes == "auto" and isinstance(self._sync, SyncThread):
            self._durable_writes = choose_way(self.directory)
        if not len(self._chain):
            self._roll(0, control=False)

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._epochs.append((self.written_position, epoch))

    def epoch_at(self, position: int) -> int:
        """Frames at or above `position` have at least this epoch; 0 if that is not known here."""
        known = (epoch for start, epoch in reversed(self._epochs) if start <= position)
        return next(known, 0)

    def close(self) -> None:
        """Close the folder's descriptor."""
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    # -- groups ------------------------------------------------------------------------------

    def reserve(self, byte_count: int, *, control: bool) -> int:
        """Position of a group of `byte_count` bytes; rolls if it does not fit.

        Raises InvalidArgument if no segment can hold it, ResourceExhausted if no file can be made.
        """
        if self._barrier_due:
            self._write_barrier()
        need = group_bytes(byte_count)
        newest = self._chain.segments[-1]
        fits = self.written_position + need <= newest.end_position
        if fits and (control or not newest.is_reserve):
            return self.written_position
        room = self._spares.segment_bytes - SEGMENT_HEADER_BYTES
        if need > room:
            raise InvalidArgument(
                f"a group of {byte_count} bytes does not fit a segment ({room} bytes); raise "
                "segment_bytes or send less at once"
            )
        self._roll(need, control=control)
        return self.written_position

    @property
    def room_bytes(self) -> int:
        """Bytes of frames that one group in the newest segment can surely still hold; 0 if `reserve` has to look, behind
        a failed write or sync too."""
        newest = self._chain.segments[-1]
        if newest.is_reserve or self._barrier_due:
            return 0
        worst_pad = GROUP_ALIGNMENT + HEADER_BYTES
        return max(0, newest.end_position - self.written_position - worst_pad)

    def append(self, buffers: Sequence[Any], byte_count: int) -> int:
        """Write one group at `written_position` and close it with a PAD frame; returns its end.

        Raises ResourceExhausted or Internal with nothing counted as written: undo, or reserve,
        stamp and append again. Raises FailedPrecondition if `reserve` was not called.
        """
        if self._barrier_due:
            raise FailedPrecondition("a write or sync failed before; call reserve() and stamp anew")
        return self._append(buffers, byte_count)

    def _append(self, buffers: Sequence[Any], byte_count: int) -> int:
        position = self.written_position
        segment = self._chain.segments[-1]
        pad = pad_bytes(byte_count)
        end = position + byte_count + pad
        if end > segment.end_position:
            raise FailedPrecondition("the group does not fit the segment; call reserve() first")
        self._check_stamp(buffers, position)
        if pad:
            header = self._pads.make(
                pad, position + byte_count, self.epoch, self._sync.synced_position
            )
            # the whole last page: a part of one would first have to be read from the disk if the
            # file has been written before and is not in the page cache any more
            buffers = [*buffers, header, _ZEROS[: pad - HEADER_BYTES]]
            byte_count += pad
        self._write(segment, buffers, byte_count, position)
        self.written_position = end
        return end

    def _write(
        self, segment: Segment, buffers: Sequence[Any], byte_count: int, position: int
    ) -> None:
        offset = segment.file_offset(position)
        try:
            self._write_held()
            write_all(segment.open(), buffers, byte_count, offset, str(segment.path))
        except WriteFault as fault:
            if fault.touched or self._is_torn:
                self._is_torn = False
                self._set_epoch(self.epoch + 1)
                self._barrier_due = True
                self._barrier_end = 0
            raise fault.error from fault
        self._is_torn = False

    @property
    def filled_position(self) -> int:
        """Behind the last group that stands in its file: one that the sync thread has to write does not yet."""
        held = self._held
        if held is None or self._sync.synced_position >= held[1] + len(held[2]):
            return self.written_position
        return held[1]

    def _write_held(self) -> None:
        """Write the group that the sync thread has not made durable yet: what comes behind it must not stand behind a
        gap, for a kill would cut the log there. Raises WriteFault.

        The thread may write it, too, before or afterwards: the bytes are the same.
        """
        if self._held is not None and self.filled_position < self.written_position:
            segment, position, data = self._held
            offset = segment.file_offset(position)
            write_all(segment.open(), [data], len(data), offset, str(segment.path))
        self._held = None

    # -- written by kernels ------------------------------------------------------------------

    def lend(self) -> Lent | None:
        """Let kernels write groups until `take_back`; None: they may not now."""
        sync = self._sync
        newest = self._chain.segments[-1]
        if not isinstance(sync, SyncThread) or self._barrier_due or newest.is_reserve:
            return None
        # one turn of kernels queues far fewer syncs than there is room for behind these
        if self.is_put_off or sync.backlog >= BACKLOG_MAX or sync.fault is not None:
            return None
        position, way, durable = self.written_position, self._durable_writes, (0, -1, 0)
        delta = newest.file_offset(position) - position
        try:
            fd = newest.open()
            # the first group of a segment is synced with the header before it
            if position != newest.first_position and way != _FDATASYNC:
                direct = way == _DIRECT
                durable_fd, flags = (newest.open_direct(), 0) if direct else (fd, os.RWF_DSYNC)
                durable = DURABLE_BYTES_MAX, durable_fd, flags
        except OSError:
            return None  # the next write of the loop says why
        return Lent(fd, delta, newest.end_position, *sync.queue, *durable)

    def take_back(
        self, end_position: int, queued_position: int, held: Held, *, is_torn: bool
    ) -> None:
        """Note that kernels have written up to `end_position` and queued a sync up to `queued_position`, 0: none.
        `held`: the last group, if it was given to the sync thread; its bytes stay as they are until that has no more to
        do. `is_torn`: the write behind that failed; it is to be made again."""
        if held is not None:
            self._held = self._chain.segments[-1], *held
        self.written_position = end_position
        self._queued_position = max(self._queued_position, queued_position)
        self._is_torn = self._is_torn or is_torn

    def _check_stamp(self, buffers: Sequence[Any], position: int) -> None:
        """The first frame must be stamped for right here: anything else would be cut at a restart."""
        if not buffers:
            return
        first = memoryview(buffers[0])
        if first.nbytes < HEADER_BYTES:
            return
        stamped = _POSITION.unpack_from(first, At.LOG_POSITION)[0]
        epoch = _EPOCH.unpack_from(first, At.EPOCH)[0]
        if stamped != position or epoch != self.epoch:
            raise Internal(
                f"a group stamped for position {stamped}, epoch {epoch} cannot be written at "
                f"{position}, epoch {self.epoch}; stamp it again"
            )

    def pad_to_group(self) -> None:
        """Close what a torn group left: a PAD frame up to the next multiple of 4096."""
        position = self.written_position
        pad = pad_bytes(position)
        if not position or not pad:
            return
        segment = self._chain.segments[-1]
        header = self._pads.make(pad, position, self.epoch, self._sync.synced_position)
        self._write(segment, [header], HEADER_BYTES, position)
        self.written_position += pad

    def _write_barrier(self) -> None:
        """Make the new epoch durable, with a marker, before anything new is written in it.

        Raises ResourceExhausted or Internal; the next `reserve` tries again, or looks whether a disk
        that is slow has done it by then.
        """
        if not self._barrier_end:
            if self.written_position + group_bytes(0) > self._chain.segments[-1].end_position:
                self._roll(group_bytes(0), control=True)
            self._append([], 0)
            self.sync(now=True)
            self._barrier_end = self.written_position
            self._sync.wait(self._barrier_end, _BARRIER_WAIT_SECONDS)
        self._raise_fault()
        if self._sync.synced_position < self._barrier_end:
            raise ResourceExhausted(
                f"{self.directory} is being repaired after a failed write or sync, and its disk is "
                "slow to confirm; send again later"
            )
        self._barrier_due = False
        self._barrier_end = 0

    def sync_and_wait(self) -> None:
        """Sync all that was written. Raises Internal if a sync failed."""
        self.sync(now=True)
        self._sync.drain()
        self._raise_fault()

    def _raise_fault(self) -> None:
        fault = self._sync.fault
        if fault is not None:
            raise Internal(
                f"a sync of {self.directory} failed: {os.strerror(fault[0])}; check the disk"
            )

    def sync(self, *, now: bool = False, quiet: bool = False, again: bool = False) -> None:
        """Queue a sync of all that was written; unless `now`, it is put off while the disk hangs. `quiet`: its end need
        not wake the worker; `again`: that of one that was queued so before is to."""
        if self.written_position > self._queued_position or again or self.is_put_off:
            quiet = quiet and not self.is_put_off  # that one may be waited for
            self.is_put_off = not now and self._sync.backlog >= BACKLOG_MAX
            if self.is_put_off:
                return
            newest = self._chain.segments[-1]
            self._sync.push(newest.open(), self.written_position, quiet=quiet)
            self._queued_position = self.written_position

    # -- segments ----------------------------------------------------------------------------

    def _full_text(self, reason: str) -> str:
        return (
            f"no new log segment can be made in {self.directory}: {reason}; free space on its "
            "disk, or lower wal_bytes_max or retention"
        )

    def _roll(self, byte_count: int, *, control: bool) -> None:
        """Go on in a new segment with room for a group of `byte_count` at `written_position`."""
        segment = self._make_segment(byte_count, control=control)
        self.sync(now=True)
        self._enter(segment)

    def _enter(self, segment: Segment) -> None:
        """Make `segment` the newest. Its name becomes durable before what is written in it."""
        self._sync.push(self._directory_fd, 0)
        self._chain.append(segment)
        self._spares.expect(self._chain.bytes_on_disk)
        self.rolls += 1
        self._left.append(segment)
        while len(self._left) > _LEFT_OPEN:
            oldest = self._left[0]
            if oldest.end_position > self._sync.synced_position:
                break
            self._left.popleft().close()

    def _take_file(self, byte_count: int, *, control: bool) -> tuple[Path, int]:
        """A file for a segment with room for `byte_count` bytes, and its size.

        Raises ResourceExhausted.
        """
        try:
            return self._spares.take(SEGMENT_HEADER_BYTES + byte_count)
        except OSError as fault:
            reserve = self._spares.reserve_path
            size = reserve.stat().st_size if control and reserve.exists() else 0
            if SEGMENT_HEADER_BYTES + byte_count <= size:
                return reserve, size
            raise ResourceExhausted(self._full_text(os.strerror(fault.errno or 0))) from fault

    def _make_segment(
        self, byte_count: int, *, control: bool, rewrite: Rewrite | None = None
    ) -> Segment:
        """A segment with room for `byte_count` at `written_position`, with `rewrite` in front.

        Raises ResourceExhausted or Internal.
        """
        here = self.written_position
        source, segment_bytes = self._take_file(byte_count, control=control)
        previous = self._chain.segments[-1].first_position if len(self._chain) else here
        header = SegmentHeader(
            self._log_id, here, previous, segment_bytes, self._wall_ns(), self.epoch
        )
        try:
            segment = Segment.adopt(source, header, () if rewrite is None else rewrite.groups)
        except (OSError, WriteFault) as fault:
            with contextlib.suppress(OSError):
                self._spares.put_back(source)
            if isinstance(fault, WriteFault):
                raise fault.error from fault
            raise ResourceExhausted(self._full_text(os.strerror(fault.errno or 0))) from fault
        segment.is_reserve = source == self._spares.reserve_path
        return segment

    def cut_at(self, position: int, frames: Sequence[memoryview]) -> tuple[list[Segment], Rewrite]:
        """End the log at `position`, go on there in a new segment with the next epoch.

        `frames` are stamped again and open the segment: they are in it when it gets its name. The
        sync thread must be drained; its fault is reset. Returns segments that left the chain, whose
        files are gone, and where the frames stand now. Raises ResourceExhausted or Internal if no
        file can be made; all stays as it was then, and this may be tried again.
        """
        gone: list[Segment] = []
        before = self.written_position, self.epoch
        while len(self._chain) and self._chain.segments[-1].first_position >= position:
            gone.append(self._chain.pop_last())
        # an attempt that fails may leave frames of its epoch behind in a spare file
        self._cut_epoch = max(self._cut_epoch, self.epoch) + 1
        self.written_position, self.epoch = position, self._cut_epoch
        rewrite = restamp(
            frames, self._pads, log_id=self._log_id, position=position, epoch=self.epoch
        )
        try:
            room = rewrite.end_position - position + group_bytes(0)
            segment = self._make_segment(room, control=True, rewrite=rewrite)
        except DanubeError:
            self.written_position, self.epoch = before
            for kept in reversed(gone):
                self._chain.append(kept)
            raise
        self._set_epoch(self.epoch)
        self._held = None
        self._queued_position = position
        self._barrier_due = True
        self._barrier_end = 0
        self._sync.reset()
        self._enter(segment)
        self.written_position = rewrite.end_position
        for lost in gone:
            if lost.path != segment.path:
                lost.path.unlink(missing_ok=True)
        return gone, rewrite
