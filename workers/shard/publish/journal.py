"""One log of a worker and the groups on their way through it.

    admit -> open group -> write (one pwritev) -> queued for sync -> synced -> acks, deliveries
             positions     `os` topics: visible                      `fsync` topics: visible
             are given

While a sync runs, a small open group waits and grows: it goes out with the next sync. Where many
clients publish one by one it waits for more of them, too, 1 ms at most (decision 17). A group that
has frames of an `os` topic never waits. Control records ride at the end of a group.
Used by the worker's loop only.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from danube_fast.broker.admission.layout import LogWord, ResultWord
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.records import Record
from danube_fast.config import Settings
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError, Internal, ResourceExhausted, Unavailable
from danube_fast.wal.appender import Lent
from danube_fast.wal.log import Log
from danube_fast.workers.shard.publish.group import Group, Publication, Written
from danube_fast.workers.shard.publish.record_queue import (
    RECORD_BYTES_PER_GROUP_MAX,
    RecordQueue,
    stamped_frames,
)
from danube_fast.workers.shard.publish.runs import make_runs
from danube_fast.workers.shard.publish.siblings import Siblings

__all__ = ["Group", "Journal", "Publication"]

_log = logging.getLogger(__name__)

GROWING_BYTES_MAX = 256 * 1024
"""An open group of this size no longer waits for the sync before it."""
SPARE_BYTES_MAX = 4 * 1024 * 1024
"""More is not taken at once."""
UNSYNCED_BYTES_MAX = 64 * 1024 * 1024
"""A log of `os` topics is synced after so many bytes, so that a failed sync concerns few of them."""
IN_FLIGHT_BYTES_MAX = 128 * 1024 * 1024
"""Frames that wait in memory for a sync, per log: a disk that hangs must not take all memory. A disk
that keeps up has 32 full groups of work queued by then, so it never waits for more."""
BEHIND_BYTES_MAX = 1024 * 1024 * 1024
"""How far the disk may be behind what was written, per log. `os` frames wait in the page cache, not
here, but after a failed sync they are read and written again at once."""
SYNC_BACKLOG_MAX = 768
"""Syncs that may be queued: the queue has 1,024 places, and a full one would stop the loop."""
RECORDS_RETRY_NS = 100_000_000
"""Pause before records that found no room are tried again."""


class Journal:
    """Write frames and records to a log in groups, and tell when they are durable."""

    def __init__(
        self, log: Log, log_slot: int, tables: AdmissionTables, settings: Settings
    ) -> None:
        self.log, self.log_slot, self._tables, self._settings = log, log_slot, tables, settings
        self._group: Group | None = None
        self._in_flight: deque[Group] = deque()
        self._in_flight_bytes = 0
        self._just_written: list[Group] = []
        self._records = RecordQueue()
        self._now_ns = self._retry_ns = 0
        self.stuck: DanubeError | None = None
        """Why records could not be written the last time, and wait."""
        self.broken = ""
        """Why nothing can be made durable; empty unless a failed sync could not be repaired."""
        self.repair_due_ns = 0
        self.changing = 0
        """Records under way that take effect only when they are durable: no snapshot meanwhile."""
        self.taken_back: set[int] = set()
        """Log positions of the frames that `void_unsynced` took back."""
        self._queued = self._heard = 0
        self.refusal = ""
        """Why the log takes no frames just now; empty when it does."""
        self.last_write_ns = self.group_count = 0
        self.siblings = Siblings()
        self.marked = True
        self.snapshot: tuple[int, bytes] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Tell the kernel where the log stands; only while no group is open."""
        self._spare_bytes: int | None = None
        self._tables.set_log(self.log_slot, *self.log.next_stamp())

    # ------------------------------------------------------------ filling a group

    def reserve(self, byte_count: int) -> None:
        """Make room for up to `byte_count` more bytes of frames in the open group.

        If the log has no room or its disk is too far behind, the kernel is told to refuse frames for
        it, with ResourceExhausted.
        """
        if self.broken:
            self.refuse(self.broken)
            return
        if self._is_behind(byte_count):
            if self._group is not None:
                self.write()
            self.refuse(
                "the disk does not keep up with what is published: "
                f"{self.log.written_position - self.log.synced_position} bytes wait for a sync; "
                "send again later, and check the disk if it goes on"
            )
            return
        group = self._group
        if group is not None:
            needed = group.byte_count + byte_count + self._records.room_bytes()
            if needed <= self.log.room_bytes:
                return
            self.write()
        needed = byte_count + min(self._records.room_bytes(), RECORD_BYTES_PER_GROUP_MAX)
        try:
            self.log.reserve(needed)
        except DanubeError as error:
            self.refuse(str(error))
            return
        self.refusal = ""
        self.refresh()

    @property
    def spare_bytes(self) -> int:
        """Bytes of frames that the open group takes without `reserve`; 0 or less if that has to look."""
        if self.refusal or self.broken or self.log.refusing:
            return 0
        spare = self._spare_bytes
        if spare is None:
            behind = self._is_behind(SPARE_BYTES_MAX)
            spare = self._spare_bytes = 0 if behind else min(SPARE_BYTES_MAX, self.log.room_bytes)
        if self._records:
            spare -= self._records.room_bytes()
        return spare if self._group is None else spare - self._group.byte_count

    def _is_behind(self, byte_count: int) -> bool:
        """Whether too much waits for the disk to take `byte_count` more bytes."""
        waiting = self._in_flight_bytes + byte_count
        if self._group is not None:
            waiting += self._group.byte_count
        log = self.log
        return bool(
            (self._in_flight_bytes and waiting > IN_FLIGHT_BYTES_MAX)
            or log.written_position - log.syncs.synced_position > BEHIND_BYTES_MAX
            or log.syncs.backlog > SYNC_BACKLOG_MAX
        )

    def refuse(self, reason: str) -> None:
        """Have the kernel refuse frames for this log until the next successful `reserve`."""
        self.refusal = reason
        self._tables.logs[self.log_slot, LogWord.POSITION] = -ResourceExhausted.code

    @property
    def is_failing(self) -> bool:
        """Whether no frame is taken, because syncs fail."""
        return bool(self.broken) or self.log.refusing

    def check_takes(self) -> None:
        """Raise Internal, with the cause, if `is_failing`."""
        if self.is_failing:
            raise Internal(self.broken or self.log.refusing_text)

    def open_group(self, now_ns: int = 0) -> Group:
        """The group that takes the next frame."""
        if self._group is None:
            self._group = Group(now_ns)
        return self._group

    def last_group(self) -> Group | None:
        """Find the newest group that is not synced yet: a duplicate waits for it."""
        return self._group or (self._in_flight[-1] if self._in_flight else None)

    def has(self, group: Group) -> bool:
        """Whether a group is not durable yet."""
        return group is self._group or group in self._in_flight

    def wait_for_original(self, publication: Publication, place: int) -> None:
        """Ack a duplicate when all before it is durable, or refuse it with its original."""
        group = self.last_group()
        if group is not None:
            self._hear_of_sync()
            group.duplicates.append((publication, place))
            group.on_synced.append(publication)
            publication.pending += 1

    def record(self, record: Record, done: Done | None = None) -> None:
        """Write a state record with the next group; `done` when it is synced."""
        self._records.add(record, done)

    def wait_again(self, done: Done) -> None:
        """Let a `done` that was called with an error wait on: its record is kept."""
        self._records.wait(done)

    def record_again(self, records: list[bytes]) -> None:
        """Queue records of a failed write again, before those that came since."""
        self._records.put_back(records)

    # ------------------------------------------------------------ writing

    @property
    def syncing(self) -> bool:
        """Whether a group is between write and sync."""
        loud = (group.needs_sync for group in reversed(self._in_flight) if not group.is_quiet)
        return next(loud, False)

    def commit(self, now_ns: int) -> None:
        """End a turn: write the open group unless it is better to let it grow."""
        self._now_ns = now_ns
        if self.log.sync_is_put_off:
            self.log.sync()
        group = self._group
        if group is None and (not self._records or now_ns < self._retry_ns):
            return
        if self.syncing and (
            group is None or (not group.on_written and group.byte_count < GROWING_BYTES_MAX)
        ):
            return
        if group is not None and self.siblings.hold_open(group, now_ns):
            return
        self.write(now_ns)

    @property
    def waits(self) -> bool:
        """Whether the open group waits for more publications, `SIBLINGS_WAIT_NS` at most."""
        return self._group is not None and self._group.waits_since_ns > 0

    def write(self, now_ns: int = 0) -> None:
        """Write the open group and the records, and queue the sync."""
        group, self._group = self._group, None
        if group is not None:
            self.siblings.note(group)
            # the frames have their places in this segment; records that came since may not fit
            fits = group.byte_count + self._records.room_bytes() <= self.log.room_bytes
            self._write(group, self._take_records(group) if fits else [], now_ns)
        while self._records and self._write_records(now_ns):
            pass

    def _write_records(self, now_ns: int) -> bool:
        """Write a group of nothing but records, as many as go into one; False if that failed."""
        if self.broken:
            self._fail_records(Internal(self.broken))
            return False
        count = self._records.count_for_group(self._settings.segment_bytes)
        try:
            self.log.reserve(self._records.room_bytes(count), control=True)
        except DanubeError as error:
            self._fail_records(error)
            return False
        self.refresh()
        group = Group()
        return self._write(group, self._take_records(group, count), now_ns)

    def _write(self, group: Group, records: list[memoryview], now_ns: int) -> bool:
        """Write one group, whose frames and records are stamped; False if that failed."""
        views = [
            memoryview(getattr(holder, "buffer", holder))[start:end]
            for holder, start, end in group.buffers
        ]
        try:
            self.log.append(views + records, group.byte_count, self._runs(group))
        except DanubeError as error:
            self._write_failed(group, error)
            return False
        self.refresh()
        if records:
            self.stuck = None
            group.records = []
        self._note_written(group, self.log.written_position, now_ns)
        if group.needs_sync or group.end_position - self._queued > UNSYNCED_BYTES_MAX:
            self._queued = group.end_position
            self.log.sync(quiet=group.is_quiet)
        return True

    def _note_written(self, group: Group, end_position: int, now_ns: int) -> None:
        """Pass a group on that the log has; it is durable with all below `end_position`."""
        group.end_position = end_position
        self.group_count += 1
        self.last_write_ns = now_ns or self.last_write_ns
        self.marked = False
        if group.needs_sync or group.on_synced or group.callbacks:
            self._in_flight.append(group)
            self._in_flight_bytes += group.byte_count
        self._just_written.append(group)

    # ------------------------------------------------------------ written by kernels

    def lend(self) -> Lent | None:
        """Let kernels write groups until `take_back`; None: they may not now."""
        if self.has_frames_under_way or self.is_failing or self.refusal:
            return None
        return self.log.lend()

    @property
    def has_frames_under_way(self) -> bool:
        """Whether frames are on their way to the disk, which are to be shown before those that come behind."""
        groups = self._in_flight
        return self._group is not None or (bool(groups) and any(each.entries for each in groups))

    def take_back(self, written: Written) -> None:
        """Note what kernels have written, before frames that they took and did not write are admitted."""
        runs = None
        if written.frame_count:
            runs = make_runs(self._tables, self.log_slot, written.first_row, written.stop_row)
            if len(runs) != written.frame_count:
                raise Internal(f"{written.frame_count} frames have {len(runs)} index entries")
        self._spare_bytes = None
        self.log.take_back(
            written.end_position,
            written.queued_position,
            runs,
            written.held,
            is_torn=written.is_torn,
        )
        if not written.frame_count:
            return
        self.group_count += written.group_count
        self.last_write_ns = self._now_ns or self.last_write_ns
        self.marked = False
        self._queued = max(self._queued, written.queued_position)
        if written.end_position - self._queued > UNSYNCED_BYTES_MAX:
            self._queued = written.end_position
            self.log.sync()

    def adopt(self, queued_position: int) -> None:
        """Take the open group, whose frames were all admitted again, for one that kernels have written. The sync that
        it waits for is queued up to `queued_position`; what they have written behind that waits for none."""
        group, self._group = self._group, None
        if group is not None:
            self.siblings.note(group)
            self._keep_rows(group)
            self._note_written(group, queued_position, self._now_ns)

    def _take_records(self, group: Group, count: int | None = None) -> list[memoryview]:
        """Turn the first `count` waiting records into stamped control frames behind the group's frames."""
        group.records = self._records.take(count)
        frames = stamped_frames(group.records, self.log, self._tables.logs[self.log_slot])
        group.byte_count += sum(map(len, frames))
        group.needs_sync = group.needs_sync or bool(frames)
        if not self._records:  # callers wait for all of them
            group.callbacks.extend(self._records.take_callbacks())
        return frames

    def _runs(self, group: Group) -> Any:
        """Make the index entries of the group's frames."""
        entries = group.entries
        if not entries:
            return None
        first, stop = self._keep_rows(group)
        runs = make_runs(self._tables, self.log_slot, first, stop)
        if len(runs) != len(entries):  # a frame that is not indexed would be lost later
            raise Internal(f"{len(entries)} frames of a group have {len(runs)} index entries")
        return runs

    def _keep_rows(self, group: Group) -> tuple[int, int]:
        """Keep the result rows of a group's frames until it is durable; from which to which they were."""
        first, stop = group.entries[0][2], group.entries[-1][2] + 1
        group.rows, group.first_row = self._tables.results[first:stop].copy(), first
        return first, stop

    def _fail_records(self, error: DanubeError) -> None:
        """Tell callers that wait. The records stay queued: memory has the state that they describe."""
        self.stuck = error
        self._retry_ns = self._now_ns + RECORDS_RETRY_NS
        self._records.fail(error)

    def _write_failed(self, group: Group, error: DanubeError) -> None:
        """Take back a group that was not written: its offsets and sequences; tell all its publications."""
        self.refusal = str(error)
        _log.error("write to log %d failed: %s", self.log.log_id, error)
        for _, _, index, publication, place in reversed(group.entries):
            self._tables.undo(index)
            publication.refuse(place, ResourceExhausted.code, str(error))
        self.refresh()
        self._void(group, error)
        self._queue_to_answer(group)
        if group.records:
            records, group.records = group.records, []
            self.record_again(records)
            self._fail_records(error)

    def _void(self, group: Group, error: DanubeError) -> None:
        """Show no frame of a group; its publications are answered as they stand."""
        callbacks, group.callbacks = group.callbacks, []
        for done in callbacks:
            done(error)
        for publication, place in group.duplicates:
            # The original may be durable: then the next repetition is acked.
            publication.refuse(
                place, Unavailable.code, f"an earlier copy may be stored; send it again ({error})"
            )
        group.duplicates, group.entries = [], []
        group.written_entries, group.synced_entries = [], []
        group.needs_sync = False
        group.end_position = self.log.written_position

    def _queue_to_answer(self, group: Group) -> None:
        """Let the publications of a void group be answered with the groups before it."""
        self._in_flight.append(group)
        self._in_flight_bytes += group.byte_count
        self._just_written.append(group)

    def void_unsynced(self, error: DanubeError) -> None:
        """Take back, newest first, every frame that waited for a sync that failed.

        Call it when all durable groups were taken with `completed`. Frames that were shown already, those
        of `os` topics, stay (the caller writes them again).
        """
        groups = list(self._in_flight)
        if self._group is not None:
            groups.append(self._group)
            self._queue_to_answer(self._group)
            self._group = None
        for group in reversed(groups):
            self._take_back(group, error)
            self._void(group, error)
        self.snapshot = None  # it knows of frames that were taken back

    def _take_back(self, group: Group, error: DanubeError) -> None:
        """Undo the frames of one group that were not shown; the newest group first."""
        shown = {id(stored) for _, stored in group.written_entries}
        results = self._tables.results
        for number in range(len(group.entries) - 1, -1, -1):
            _, stored, index, publication, place = group.entries[number]
            if group.rows is None:
                self._tables.undo(index)
            elif id(stored) in shown:
                continue
            else:
                # The row may belong to an open group of another log by now.
                row = group.rows[index - group.first_row]
                self.taken_back.add(int(row[ResultWord.LOG_POSITION]))
                borrowed = results[index].copy()
                results[index] = row
                self._tables.undo(index)
                results[index] = borrowed
            publication.refuse(place, error.code, str(error))

    # ------------------------------------------------------------ completion

    @property
    def busy(self) -> bool:
        """Whether anything is on its way to the disk."""
        return self._group is not None or bool(self._records) or bool(self._in_flight)

    @property
    def has_open_group(self) -> bool:
        """Whether result rows of this turn or an earlier one are still needed."""
        return self._group is not None

    def just_written(self) -> list[Group]:
        """Take the groups that were written since the last call."""
        groups, self._just_written = self._just_written, []
        return groups

    def completed(self) -> list[Group]:
        """Take the groups that are durable now, oldest first."""
        if not self._in_flight:
            return []
        synced = self.log.syncs.synced_position
        done = []
        while self._in_flight:
            group = self._in_flight[0]
            if group.needs_sync and group.end_position > synced:
                break
            self._in_flight_bytes -= group.byte_count
            done.append(self._in_flight.popleft())
        return done

    def when_durable(self, done: Done) -> None:
        """Call `done` when everything recorded so far is durable; at once if it is already."""
        if self._records:
            self._records.wait(done)
            return
        groups = [*self._in_flight, self._group] if self._group else list(self._in_flight)
        for group in reversed(groups):
            if group.needs_sync:
                self._hear_of_sync()
                group.callbacks.append(done)
                return
        done(None)

    def _hear_of_sync(self) -> None:
        """Have the end of what is under way wake the loop, if nothing has waited for it so far."""
        written = self.log.written_position
        if self._heard != written and any(group.is_quiet for group in self._in_flight):
            self._heard = written
            self.log.sync(again=True)

    def sync_now(self) -> None:
        """Sync all that is written, for a snapshot or before idling."""
        if self.log.synced_position < self.log.written_position:
            self.log.sync()
