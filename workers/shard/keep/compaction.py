"""Key compaction: passes over partitions with that policy.

    closed segments   | clean: no key twice | dirty: new since the last pass | newest segment
    1 look            |                     |  key -> newest offset          |
    2 write again     |  survivors, in the order of offsets, at the tail     |
    3 durable; a record says how far the partition is clean; the old copies may be trimmed

A pass begins when as much is dirty as the last one left, and a segment at least: so about as much is
written again as is published, at most. Copies that were replaced are not read any more (places.py). A
tombstone goes when it is old enough, was there in the pass before, and no copy of anything that it
removed is left in the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import INT64_MAX
from danube_fast.broker.compaction import NewestOffsets, tombstones
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DataLoss
from danube_fast.frame.view import FrameView
from danube_fast.wal.index import Run
from danube_fast.workers.shard.keep.rewrite import Rewrite
from danube_fast.workers.shard.read.frames import frames_of, part_of
from danube_fast.workers.shard.read.places import live_runs, lowest_position
from danube_fast.workers.shard.state import ShardState

__all__ = ["Compaction"]

LOOK_BYTES = 1 << 18
"""Frames of so many bytes are looked up at a time."""
FAR = 1 << 62


class _Dirt:
    """Count of the bytes of a partition since the last pass."""

    def __init__(self) -> None:
        self.counted = -1
        """Bytes that were counted in the log; -1: none were yet."""
        self.counted_at = 0
        """`byte_count` of the partition then."""
        self.looked_until = -1
        """Where the newest segment began then: no segment is closed until it begins elsewhere."""
        self.tombstone_ns = 0
        """The tombstones for which a pass was made last."""

    def byte_count(self, partition: Partition) -> int:
        """Bytes published since the last pass."""
        return self.counted + partition.byte_count - self.counted_at


class Compaction:
    """Compact partitions of one worker, one at a time."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        state.policy_listeners.append(self._apply)
        state.removal_listeners.append(self._forget)
        self._partitions: dict[int, Partition] = {}
        self._dirt: dict[int, _Dirt] = {}
        self.after_pass: Callable[[Partition], None] = lambda partition: None
        """Called when the old copies of a pass may be given back."""

    def _apply(self, partition: Partition) -> None:
        self._forget(partition)
        if partition.policy.compaction and partition.logged:
            self._partitions[partition.partition_id] = partition
            self._dirt[partition.partition_id] = _Dirt()

    def _forget(self, partition: Partition) -> None:
        self._partitions.pop(partition.partition_id, None)
        self._dirt.pop(partition.partition_id, None)

    # ------------------------------------------------------------ when

    def next_partition(self) -> Partition | None:
        """Find a partition that is due; it goes behind the others then."""
        for number, partition in list(self._partitions.items()):
            if self._is_due(partition):
                self._partitions[number] = self._partitions.pop(number)
                return partition
        return None

    def _is_due(self, partition: Partition) -> bool:
        if partition.is_changing:
            return False
        dirt = self._dirt[partition.partition_id]
        is_new = dirt.tombstone_ns != partition.compacted.tombstone_ns
        if is_new and self._tombstones_due(partition):
            return True
        log = self._state.logs[partition.log_slot]
        if dirt.looked_until == log.position_before(INT64_MAX):
            return False
        return dirt.counted < 0 or dirt.byte_count(partition) >= self._dirt_min(partition)

    def _dirt_min(self, partition: Partition) -> int:
        return max(self._state.settings.segment_bytes, partition.compacted.left_bytes)

    def _tombstones_due(self, partition: Partition) -> bool:
        """Whether the tombstones of the last pass may go without bringing a removed message back."""
        compacted = partition.compacted
        if not compacted.tombstone_ns:
            return False
        log = self._state.logs[partition.log_slot]
        age_ns = self._state.steady_wall_ns - compacted.tombstone_ns
        old = age_ns >= self._state.settings.compaction_tombstone_seconds * SECOND_NS
        return old and log.oldest_position >= compacted.stale_position

    # ------------------------------------------------------------ a pass

    def go_over(self, job: Rewrite, partition: Partition) -> Generator[bool, None, None]:
        """Count what is dirty, and write the partition again if that is enough. Raises Unavailable,
        ResourceExhausted, Internal."""
        dirt = self._dirt[partition.partition_id]
        closed = job.log.position_before(INT64_MAX)
        clean = max(partition.compacted.until, partition.first_offset)
        tombstone_ns = dirt.tombstone_ns
        if self._tombstones_due(partition):
            tombstone_ns = partition.compacted.tombstone_ns
        only_tombstones = tombstone_ns != dirt.tombstone_ns
        if dirt.counted < 0:
            yield from self._count(job, partition, clean, dirt)
        enough = dirt.byte_count(partition) >= self._dirt_min(partition)
        if not enough and not only_tombstones:
            dirt.looked_until = closed
            return
        newest = NewestOffsets(self._state.settings.compaction_keys_max)
        end = clean
        for stored, run in self._frames(job, partition, clean, FAR):
            if run.position + run.byte_count > closed or (newest.is_full and end > clean):
                break
            if stored.end_offset > partition.visible:
                break  # a disk that fails may take it back
            with contextlib.suppress(DataLoss):  # compressed garbage: its keys are unknown
                newest.note(FrameView(stored.memory))
            end = stored.end_offset
            yield True
        if end > partition.first_offset and (end > clean or only_tombstones):
            yield from self._write(job, partition, newest, end)
            yield from self._count(job, partition, end, dirt)
        # Only now: a pass that failed is made again. What stands behind one that ran out of keys is
        # closed already.
        dirt.tombstone_ns = tombstone_ns
        dirt.looked_until = -1 if newest.is_full else closed

    def _count(
        self, job: Rewrite, partition: Partition, offset: int, dirt: _Dirt
    ) -> Generator[bool, None, None]:
        """Count the bytes from an offset on."""
        counted = 0
        while runs := live_runs(job.log, partition, offset, LOOK_BYTES):
            counted += sum(run.byte_count for run in runs)
            offset = runs[-1].end_offset
            yield True
        dirt.counted, dirt.counted_at = counted, partition.byte_count

    def _frames(
        self, job: Rewrite, partition: Partition, offset: int, end: int
    ) -> Iterator[tuple[Stored, Run]]:
        """Read frames from an offset on."""
        while runs := live_runs(job.log, partition, offset, LOOK_BYTES):
            for run in runs:
                if run.base_offset >= end:
                    return
                job.check(partition)
                for stored in frames_of(partition.partition_id, job.log.read_run(run)):
                    yield stored, run
            offset = runs[-1].end_offset

    def _write(
        self, job: Rewrite, partition: Partition, newest: NewestOffsets, end: int
    ) -> Generator[bool, None, None]:
        """Write the survivors below `end` again, and record that."""
        before = partition.compacted
        lowest = lowest_position(job.log, partition, partition.first_offset)
        job.needed_from = job.needed_from if lowest is None else lowest
        tombstone_age_ns = self._state.settings.compaction_tombstone_seconds * SECOND_NS
        old_ns = self._state.steady_wall_ns - tombstone_age_ns
        may_go = before.until if job.log.oldest_position >= before.stale_position else 0
        stale = left = tombstone_ns = 0
        piece = bytearray()
        for stored, run in self._frames(job, partition, partition.first_offset, end):
            changed = _survivors(newest, stored, may_go if run.append_time_ns <= old_ns else 0)
            frame = stored.memory if changed is None else changed
            if changed is not None:
                stale = max(stale, run.position + run.byte_count)
            left += len(frame)
            if len(frame) and _has_tombstones(frame):
                tombstone_ns = max(tombstone_ns, run.append_time_ns)
            if piece and len(piece) + len(frame) > job.piece_bytes:
                job.write(partition, piece)
                piece = bytearray()
                yield from job.wait_for_disk()
            piece += frame
            yield True
        if piece:
            job.write(partition, piece)
        yield from job.wait_durable()
        job.check(partition)
        job.log.note_rewritten(partition.partition_id)
        record = r.Compacted(
            partition.partition_id, end, max(stale, before.stale_position), left, tombstone_ns
        )
        partition.note_compacted(record)
        self._state.journals[job.slot].record(record)
        self.after_pass(partition)


def _has_tombstones(frame: bytearray | memoryview) -> bool:
    try:
        return tombstones(FrameView(frame)) is not None
    except DataLoss:
        return False


def _survivors(newest: NewestOffsets, stored: Stored, tombstones_below: int) -> bytearray | None:
    """Cut out what stays of a frame, as a frame; empty if nothing does, None if all of it does."""
    view = FrameView(stored.memory)
    try:
        stay = newest.survivors(view, tombstones_below)
    except DataLoss:
        stay = None
    if stay is None:
        return None
    if not len(stay):
        return bytearray()
    return part_of(view, stay)
