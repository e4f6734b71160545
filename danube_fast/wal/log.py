"""The log as a worker sees it: the one object of this folder that others use.

    Log.open -> log.snapshot -> for block in log.replay() -> log.begin_epoch([...]) -> ready
    reserve -> (stamp frames) -> append -> sync -> ... synced_position passes the group -> ack

One thread, the worker's loop, uses a Log; it is not thread-safe. Behind it three threads work: one
syncs, one makes spare segments, one writes a snapshot when asked. The log does not know what its
control records mean: it carries them.

A failed sync: `sync_fault` says so and nothing is synced any more. Read what must be written again,
call `cut_after_fault(frames)`, publish on. After three within a minute the log is `refusing` until
it is opened again; reads go on.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.frame.crc import crc32c
from danube_fast.wal.appender import BACKLOG_MAX, Appender, Held, Lent
from danube_fast.wal.background import Background
from danube_fast.wal.control import make_control_frame, stamp_control_frame
from danube_fast.wal.feed import RunTable
from danube_fast.wal.index import Run, Runs
from danube_fast.wal.layout import GROUP_ALIGNMENT, LOSSES_NAME, SnapshotHeader
from danube_fast.wal.lock import LogLock
from danube_fast.wal.pages import CachedPages
from danube_fast.wal.reader import LogReader
from danube_fast.wal.recovery import Recovery, end_at_cut
from danube_fast.wal.repair import Loss, read_losses
from danube_fast.wal.segment import Chain, usable_segments
from danube_fast.wal.snapshot import SnapshotStore, list_snapshots
from danube_fast.wal.spares import SparePool
from danube_fast.wal.trims import note_trim
from danube_fast.wal.walk import ReplayBlock

__all__ = ["Log"]

_FAULTS_MAX = 3
_FAULT_WINDOW_NS = 60_000_000_000
_REFUSING = "3 syncs failed within a minute; check the disk and restart the broker"
_LOCK_TIMEOUT_MS = 5000


class Log:
    """One write-ahead log. Make it with `Log.open`; use it from one thread."""

    def __init__(
        self, directory: Path, log_id: int, settings: Settings, clock: Clock, wake_fd: int,
        lock: LogLock, background: Background,
    ) -> None:  # fmt: skip
        """Use `Log.open`."""
        self.directory = directory
        self.log_id = log_id
        self._clock = clock
        self._lock = lock
        self._ready = False
        self.refusing = False
        """Three syncs failed within a minute: publishes are refused until the log is reopened."""
        self._marked_position = -1
        self._snapshot_rolls = self._spare_rolls = 0
        self._faults: collections.deque[int] = collections.deque(maxlen=_FAULTS_MAX)
        self._chain = Chain(usable_segments(directory, settings.segment_bytes, log_id))
        named = max((position for position, _ in list_snapshots(directory)), default=0)
        self._snapshots = SnapshotStore(directory, lambda: self.syncs.synced_position, background)
        self._loaded = self._snapshots.load(log_id)
        header = self._loaded.header if self._loaded else None
        self._recovery = Recovery(directory, self._chain, log_id, header, named)
        if (hole := self._recovery.find_hole()) is not None:
            raise DataLoss(str(hole))
        self._spares = SparePool(
            directory, settings.segment_bytes, settings.spare_segments, background,
            settings.segment_start_bytes,
        )  # fmt: skip
        self.syncs = background.make_sync(wake_fd)
        """The queue of syncs: how far all is durable, how many wait, and what failed."""
        self._appender = Appender(
            directory, log_id, self._chain, self._spares, self.syncs, clock.wall_ns, settings.durable_writes
        )  # fmt: skip
        self.reader = LogReader(self._chain, log_id, background)
        self.pages = CachedPages(self._chain, self.reader, background)
        """What of the log stands in the system's page cache."""
        self._runs = RunTable(directory, log_id, settings, clock, self._chain)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], *, log_id: int, settings: Settings, clock: Clock,
        wake_fd: int = -1, lock_timeout_ms: int = _LOCK_TIMEOUT_MS, background: Background | None = None,
    ) -> Log:  # fmt: skip
        """Lock the folder (made if missing) and find what is in it; then `replay`, `begin_epoch`.

        `wake_fd` is an eventfd that is written after every sync, or -1. `background`: what the log does beside the
        loop (threads by default). Raises FailedPrecondition if another process has it, or the format is newer, or it
        is another log's folder; DataLoss if segments that were durable are missing.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        lock = LogLock(path, lock_timeout_ms)
        try:
            return cls(path, log_id, settings, clock, wake_fd, lock, background or Background())
        except BaseException:
            lock.release()
            raise

    # -- starting ----------------------------------------------------------------------------

    @property
    def snapshot(self) -> tuple[int, bytes] | None:
        """(position, state) of the snapshot that replay starts from, or None. Empty state: none."""
        loaded = self._loaded
        return (loaded.header.position, loaded.state) if loaded is not None else None

    def replay(self) -> Iterator[ReplayBlock]:
        """Frames from the snapshot to the cut, checked, in order; exhaust it before writing.

        Raises DataLoss at the end if acknowledged bytes are missing, FailedPrecondition for frames
        of a newer format.
        """
        self._runs.catch_up(self._recovery.start_position)
        for block in self._recovery.blocks():
            self._runs.replayed(block.rows)
            yield block
        if self._recovery.cut is None:
            raise Internal(f"replay of {self.directory} ended without a cut; report this")
        self._runs.finish_replay(self._recovery.cut)

    def begin_epoch(self, payloads: Sequence[bytes], *, base_offset: int = 0) -> int:
        """Start writing: epoch = highest ever seen + 1; a control frame with `payloads`, synced.

        Everything that replay found is made durable before it. Returns the frame's position.
        Raises FailedPrecondition before `replay()` is exhausted, ResourceExhausted, Internal.
        """
        cut = self._recovery.cut
        if cut is None or self._ready:
            raise FailedPrecondition("exhaust log.replay() first, and begin one epoch only")
        end_at_cut(self._chain, self._spares, self._recovery, self._clock.wall_ns())
        self.syncs.start(cut)
        self._appender.start(cut, self._recovery.epoch + 1)
        self._ready = True
        try:
            self._appender.pad_to_group()
            position = self.append_control(payloads, base_offset=base_offset)
            self._appender.sync_and_wait()
        except DanubeError:
            self._ready = False
            raise
        if self._chain.index_of(self._recovery.start_position) == len(self._chain) - 1:
            self._snapshot_rolls = self._appender.rolls  # little to replay: no snapshot is due
        self._spares.refill()
        return position

    # -- where the log is --------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that frames must be stamped with now. Rises after a failed write or sync.

        Before `begin_epoch` it is the highest that replay has seen: the next one is one higher.
        """
        return self._appender.epoch or self._recovery.epoch

    @property
    def written_position(self) -> int:
        """Where the next group starts; before `begin_epoch` the end that replay found."""
        return self._appender.written_position or self._recovery.cut or 0

    def next_stamp(self) -> tuple[int, int, int, int]:
        """The log id, position, epoch and synced position that the next frame is stamped with."""
        appender = self._appender
        if not appender.epoch:
            return self.log_id, self.written_position, self.epoch, self.synced_position
        synced = self.syncs.synced_position
        return self.log_id, appender.written_position, appender.epoch, synced

    @property
    def synced_position(self) -> int:
        """All below is durable."""
        return self.syncs.synced_position

    @property
    def oldest_position(self) -> int:
        """First position that can still be read."""
        return self._chain.oldest_position

    @property
    def bytes_on_disk(self) -> int:
        """Segments and spares, bytes."""
        return self._chain.bytes_on_disk + self._spares.bytes_on_disk

    @property
    def segment_count(self) -> int:
        """Segments that hold frames; spares are not among them."""
        return len(self._chain)

    @property
    def room_bytes(self) -> int:
        """Bytes of frames that a group which was reserved can surely grow to."""
        return self._appender.room_bytes

    def position_before(self, wall_ns: int) -> int:
        """A position below which everything was written before `wall_ns` (wall clock, ns)."""
        return self._chain.position_before(wall_ns)

    @property
    def oldest_end(self) -> int:
        """Position behind the oldest segment: what `trim` must reach to give it back."""
        return self._chain.end_of(0)

    @property
    def losses(self) -> list[Loss]:
        """The losses that an operator accepted (`wal verify --accept-loss`), oldest first."""
        return read_losses(self.directory / LOSSES_NAME)

    # -- writing -----------------------------------------------------------------------------

    def reserve(self, byte_count: int, *, control: bool = False) -> int:
        """Position at which a group of `byte_count` bytes of frames must be stamped and appended.

        `control` groups may use the reserve of a full disk. Raises InvalidArgument if it can never
        fit a segment, ResourceExhausted if no segment can be made, Unavailable while `refusing`.
        """
        if not self._ready:
            raise FailedPrecondition("the log is not started; call begin_epoch() first")
        if self.refusing and not control:
            raise Unavailable(self.refusing_text)
        return self._appender.reserve(byte_count, control=control)

    def append(self, buffers: Sequence[Any], byte_count: int, runs: Runs | None = None) -> int:
        """Write one group, frames back to back, at the reserved position; returns its end.

        `byte_count` is the sum of the buffers. `runs` are copied.
        Raises ResourceExhausted or Internal with nothing counted as written: `written_position` is
        unchanged, `epoch` may be higher: stamp again and retry, or undo.
        """
        end = self._appender.append(buffers, byte_count)
        if runs is not None and len(runs):
            self._runs.appended(runs)
        return end

    def lend(self) -> Lent | None:
        """See `Appender.lend`."""
        return self._appender.lend() if self._ready and not self.refusing else None

    def take_back(self, end: int, queued_end: int, runs: Runs | None, held: Held, *, is_torn: bool) -> None:  # fmt: skip
        """See `Appender.take_back`; `runs` are those of the groups."""
        self._appender.take_back(end, queued_end, held, is_torn=is_torn)
        if runs is not None:
            self._runs.appended(runs)
            self._runs.work(self.synced_position)

    def append_control(self, payloads: Sequence[bytes], *, base_offset: int = 0) -> int:
        """Write a group of one control frame (a marker if there are no payloads); its position."""
        if not payloads:
            position = self.reserve(0, control=True)
            self._appender.append([], 0)
            return position
        frame = make_control_frame(payloads)
        position = self.reserve(len(frame), control=True)
        stamp_control_frame(
            frame, len(payloads), log_id=self.log_id, position=position, base_offset=base_offset,
            append_time_ns=self._clock.wall_ns(), synced_position=self.synced_position,
            epoch=self.epoch,
        )  # fmt: skip
        self._appender.append([frame], len(frame))
        return position

    def sync(self, *, quiet: bool = False, again: bool = False) -> None:
        """Queue a sync of all that was written; `synced_position` and `wake_fd` tell when. `quiet`: the worker need not
        be woken then; `again`: by one that was queued so before it is to be, after all."""
        self._appender.sync(quiet=quiet, again=again)
        self._runs.work(self.synced_position)
        if self._appender.rolls != self._spare_rolls:
            self._spare_rolls = self._appender.rolls
            self._spares.refill()

    @property
    def sync_is_put_off(self) -> bool:
        """Too many syncs were queued for another one, and now there are fewer: `sync` again."""
        return self._appender.is_put_off and self.syncs.backlog < BACKLOG_MAX

    def write_marker(self, *, again: bool = False) -> bool:
        """When idle: write and sync a group that says how far the log is durable. False if not all
        is synced, or the last group is such a marker and this is not `again`; nothing is written."""
        synced = self.synced_position
        self._runs.work(synced, idle=True)  # an index that knows all proves what the log must hold
        if synced != self.written_position or (self._marked_position == synced and not again):
            return False
        self.append_control([])
        self._marked_position = self.written_position
        self.sync()
        return True

    # -- a failed sync -----------------------------------------------------------------------

    @property
    def sync_fault(self) -> tuple[int, int] | None:
        """(errno, position) of a failed sync; cleared by `cut_after_fault`."""
        return self.syncs.fault

    @property
    def refusing_text(self) -> str:
        """Why publishes are refused, and what to do; empty unless `refusing`."""
        return f"log {self.directory} takes no publishes: {_REFUSING}" if self.refusing else ""

    def read_unsynced(self) -> bytearray:
        """All frames behind the last synced position that stand in the file."""
        start = self.synced_position
        return self.read(start, self._appender.filled_position - start)

    def cut_after_fault(self, frames: Sequence[memoryview] = ()) -> int:
        """End the log at the last synced position and go on there, in a new segment, epoch + 1.

        `frames` behind the cut that must not be lost open that segment, stamped again (in place): a
        kill at any moment finds them where they were or there. Returns the cut. Raises
        FailedPrecondition if no sync failed; ResourceExhausted or Internal if no segment can be made
        (all is as before, call again).
        """
        if self.syncs.fault is None:
            raise FailedPrecondition("no sync failed; there is nothing to cut")
        self.syncs.drain()
        cut = self.synced_position
        self._snapshots.cancel()
        gone, rewrite = self._appender.cut_at(cut, frames)
        for segment in gone:
            self.reader.forget(segment)
        self._runs.cut(cut, rewrite.runs)
        now = self._clock.monotonic_ns()
        self._faults.append(now)
        full = len(self._faults) == _FAULTS_MAX
        self.refusing = self.refusing or (full and now - self._faults[0] <= _FAULT_WINDOW_NS)
        self._marked_position = -1
        return cut

    # -- reading -----------------------------------------------------------------------------

    def find(self, partition_id: int, offset: int) -> Run | None:
        """The run that contains `offset`, or the first one behind it; None if there is none."""
        return self._runs.find(partition_id, offset)

    def runs(self, partition_id: int, offset: int, byte_limit: int) -> list[Run]:
        """Runs from `offset` on, in order, at least one if there is any, up to `byte_limit` bytes."""
        return self._runs.runs(partition_id, offset, byte_limit)

    def find_time(self, partition_id: int, time_ns: int) -> int | None:
        """Base offset of the first run appended at `time_ns` or later; None if there is none."""
        return self._runs.find_time(partition_id, time_ns)

    def read(self, position: int, byte_count: int) -> bytearray:
        """Bytes of the log as they are. Raises DataLoss if trimmed, InvalidArgument if not written."""
        return self.reader.read(position, byte_count, self._read_end())

    def read_run(self, run: Run) -> bytearray:
        """The frames of a run, each checked. Raises DataLoss naming the file and the position."""
        return self.reader.read_run(run, self._read_end())

    def read_cached(self, run: Run) -> bytearray | None:
        """`read_run` if it need not wait for the disk, else None."""
        return self.reader.read_cached(run, self._read_end())

    def files(self, run: Run) -> list[tuple[str, int, int]]:
        """Path, place in the file and number of bytes of a run, or of each part of it."""
        return self.reader.files(run.position, run.byte_count)

    def prefetch(self, run: Run, byte_count: int) -> Callable[[], None]:
        """Return work that brings a run, and what follows it, into the page cache: `byte_count` bytes, as far as
        there are. Call it once, in another thread."""
        end = min(run.position + max(run.byte_count, byte_count), self._read_end())
        return self.reader.prefetch(run.position, end - run.position)

    def _read_end(self) -> int:
        return self.written_position if self._ready else self._recovery.cut or 0

    # -- snapshots and trimming --------------------------------------------------------------

    @property
    def snapshot_due(self) -> bool:
        """Whether a segment was begun since the last `save_snapshot`, or `trim` needs a newer one."""
        return self._appender.rolls != self._snapshot_rolls and not self._snapshots.is_saving

    @property
    def snapshot_position(self) -> int:
        """Position of the newest durable snapshot, 0 if there is none."""
        return self._snapshots.position

    def save_snapshot(self, position: int, state: bytes) -> bool:
        """Save what all frames below `position` (a group's start) add up to, in the background.

        It becomes visible as `snapshot_position`, not before the log is durable up to `position`.
        False if one is being saved already. Raises InvalidArgument for a wrong position.
        """
        if position % GROUP_ALIGNMENT or not 0 <= position <= self.written_position:
            raise InvalidArgument(f"{position} is not the start of a group of this log")
        if self._snapshots.is_saving:
            return False
        self._snapshot_rolls = self._appender.rolls
        self._snapshots.save(self._snapshot_header(position, state, clean=False), state)
        return True

    def _snapshot_header(self, position: int, state: bytes, *, clean: bool) -> SnapshotHeader:
        return SnapshotHeader(
            log_id=self.log_id, position=position, state_bytes=len(state),
            created_ns=self._clock.wall_ns(), epoch=self._appender.epoch_at(position), clean=clean,
            state_crc=crc32c(state),
        )  # fmt: skip

    def trim(self, position: int, *, urgent: bool = False) -> int:
        """Recycle segments wholly below `position` that no kept snapshot needs; how many.

        The two newest snapshots are kept: the log stays readable from the older one on. If that
        alone is in the way and it is `urgent`, a snapshot is due."""
        bound = min(position, self._snapshots.oldest_position, self.synced_position)
        count = 0
        while count + 1 < len(self._chain) and self._chain.end_of(count) <= bound:
            count += 1
        if not count:
            if urgent and len(self._chain) > 1 and self._chain.end_of(0) <= position:
                self._snapshot_rolls = -1
            return 0
        try:
            note_trim(self.directory, self._chain[count].first_position)
        except OSError:
            return 0  # the disk cannot take a name; the next trim tries again
        for _ in range(count):
            segment = self._chain.pop_first()
            self.reader.forget(segment)
            with contextlib.suppress(FileNotFoundError):
                self._spares.give(segment.path, segment.file_bytes)
        self._runs.start_sweep(self._chain.oldest_position)
        return count

    def note_rewritten(self, partition_id: int) -> None:
        """Frames of a partition were, or will be, appended again under their old offsets."""
        self._runs.note_rewritten(partition_id)

    def drop_partition(self, partition_id: int) -> None:
        """Forget where a partition's frames are. Before it may come back: `purge_partition`."""
        self._runs.drop_partition(partition_id)

    def purge_partition(self, partition_id: int) -> bool:
        """Do a slice of forgetting all of a partition that is about to come back; True when done."""
        return self._runs.purge_partition(partition_id)

    # -- closing -----------------------------------------------------------------------------

    def close(self, state: bytes | None = None) -> None:
        """Sync what was written, save `state` as a clean snapshot if given, let go of everything.

        Closing twice is harmless. Raises DanubeError if the log could not be made durable; it is
        closed then all the same.
        """
        ready, self._ready = self._ready, False
        error = None
        try:
            error = self._save_last(state) if ready else None
        finally:
            self._spares.stop()
            self.syncs.stop()
            self._runs.close(self.synced_position, clean=ready and error is None)
            self._appender.close()
            self._chain.close()
            self._lock.release()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Let go of everything as a killed process would: nothing is synced or saved."""
        self._ready = False
        self.close()

    def _save_last(self, state: bytes | None) -> DanubeError | None:
        """The last sync and the last snapshot."""
        self._snapshots.cancel()
        try:
            self._appender.sync_and_wait()
            if state is not None:
                header = self._snapshot_header(self.written_position, state, clean=True)
                self._snapshots.save_now(header, state)
        except OSError as fault:
            return ResourceExhausted(f"the last snapshot of {self.directory} failed: {fault}")
        except DanubeError as fault:
            return fault
        return None
