"""Frames that a worker writes again at the end of a log, under their old offsets: one job at a time.

    compaction.py    a pass over one partition: of every key the newest message is written again
    unpinning.py     what somebody still needs of the oldest segment of a full log

A job is a generator that yields wherever it may be interrupted. It gets a few milliseconds of a turn.
Until what it wrote is durable, what it read stays where it is: a kill at any instant finds the one or
the other. A disk that fails ends the job; what it wrote by then is there twice and does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from danube_fast.broker.partition import Partition
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.wal.log import Log
from danube_fast.workers.shard.keep.compaction import Compaction
from danube_fast.workers.shard.keep.unpinning import REWRITES, unpin
from danube_fast.workers.shard.publish.runs import write_again
from danube_fast.workers.shard.state import ShardState

if TYPE_CHECKING:
    from danube_fast.workers.shard.keep.retention import Retention

__all__ = ["Job", "Rewrites", "Steps"]

_log = logging.getLogger(__name__)

STEP_NS_MAX = 5_000_000
"""Of each tick."""
STEPS_MAX = 256
"""The same under a clock that stands still."""
LOOK_NS = 1_000_000_000
"""Partitions are looked at so often."""
REFUSED_NS = 3 * LOOK_NS
"""That too much of a segment is needed, or cannot be moved, is looked at anew, meanwhile it counts."""
RETRY_NS = 10_000_000_000
"""After a failure."""
UNSYNCED_BYTES_MAX = 16 * 1024 * 1024

Steps = Iterator[bool]
"""Yields after each step; False: there is nothing to do before the disk has done something."""


class Job:
    """What the steps of one job share: where it writes, and what must not be trimmed meanwhile."""

    def __init__(self, state: ShardState, slot: int) -> None:
        self.state = state
        self.slot = slot
        self.log: Log = state.logs[slot]
        self.held_position = self.log.oldest_position
        """Nothing from here on is to be trimmed until all that was written is durable."""
        self._epoch = self.log.epoch

    @property
    def piece_bytes(self) -> int:
        """About so much is written as one group."""
        return min(1 << 20, self.state.settings.segment_bytes // 8)

    def check(self, partition: Partition) -> None:
        """Raises Unavailable if the partition is not to be touched, or the log has failed meanwhile."""
        known = self.state.partition(partition.partition_id) is partition
        if not known or not partition.logged or partition.switching or partition.moving:
            raise Unavailable(f"{partition.topic} is being changed")
        self.check_log()

    def check_log(self) -> None:
        """Raises Unavailable if the log has failed meanwhile."""
        if self.log.epoch != self._epoch or self.log.sync_fault is not None:
            raise Unavailable("the disk of the log has failed meanwhile")

    def write(self, partition: Partition, frames: bytearray) -> None:
        """Write frames of a partition again, in a group of their own. Raises ResourceExhausted, Internal."""
        self.check(partition)
        state = self.state
        self.log.note_rewritten(partition.partition_id)
        runs = write_again(state.journals[self.slot], frames, state.now_ns)
        for start, span in zip(
            runs["base_offset"].tolist(), runs["offset_span"].tolist(), strict=True
        ):
            partition.written_again(start, start + span)

    def breathe(self) -> Steps:
        """Wait while too much is on its way to the disk."""
        yield True
        while self.log.written_position - self.log.synced_position > UNSYNCED_BYTES_MAX:
            yield False

    def settle(self) -> Steps:
        """Wait until all that is written is durable."""
        end = self.log.written_position
        while self.log.synced_position < end or self.log.sync_fault is not None:
            if self.log.sync_fault is None:
                self.log.sync()
            yield False
            end = min(end, self.log.written_position)


class Rewrites:
    """The jobs of one worker."""

    def __init__(self, state: ShardState, retention: Retention) -> None:
        self._state = state
        self._retention = retention
        self._compaction = Compaction(state)
        state.pins.add(REWRITES, self.needed_position)
        self._job: Job | None = None
        self._steps: Steps = iter(())
        self._look_at_ns = 0
        self._wanted: list[int] = []
        """Slots of logs whose oldest segment is pinned."""
        self._refused: dict[int, tuple[int, int]] = {}
        """By slot: the oldest position of a log whose segment there cannot be given back, and until when
        that counts."""

    # ------------------------------------------------------------ asked by retention

    def apply(self, partition: Partition) -> None:
        """A partition is new here, or its policy changed."""
        self._compaction.apply(partition)

    def forget(self, partition: Partition) -> None:
        """A partition was removed."""
        self._compaction.forget(partition)

    def needed_position(self, slot: int) -> int | None:
        """What lies behind it in that log is not to be trimmed; None: anything may be."""
        if self._job is None or self._job.slot != slot:
            return None
        return self._job.held_position

    def unpin(self, slot: int) -> bool:
        """Somebody needs something in the oldest segment of a full log: True if it may be moved away."""
        if slot not in self._wanted:
            self._wanted.append(slot)
        position, until_ns = self._refused.get(slot, (-1, 0))
        known = position == self._state.logs[slot].oldest_position
        return not known or self._state.now_ns >= until_ns

    # ------------------------------------------------------------ turns

    @property
    def is_busy(self) -> bool:
        """Something is to be done in the next turns."""
        return self._job is not None

    def do_work(self) -> None:
        """A few steps of the job; a new one, if it is time."""
        now_ns = self._state.now_ns
        if self._job is None:
            if now_ns < self._look_at_ns and not self._wanted:
                return
            self._look_at_ns = now_ns + LOOK_NS
            self._begin()
        clock = self._state.clock
        until_ns = clock.monotonic_ns() + STEP_NS_MAX
        for _ in range(STEPS_MAX):
            if self._job is None or not next(self._steps, False):
                return
            if clock.monotonic_ns() >= until_ns:
                return

    def _begin(self) -> None:
        if self._wanted:
            slot = self._wanted.pop(0)
            self._start(slot, lambda job: self._unpin(job))
            return
        partition = self._compaction.next_partition()
        if partition is not None:
            self._start(partition.log_slot, lambda job: self._compaction.go_over(job, partition))

    def _start(self, slot: int, steps: Callable[[Job], Steps]) -> None:
        job = self._job = Job(self._state, slot)
        self._steps = self._guarded(job, steps(job))

    def _guarded(self, job: Job, steps: Steps) -> Steps:
        """A job's steps, and what follows whether they come to their end or not."""
        try:
            yield from steps
        except DanubeError as error:
            _log.warning("log %d: frames are not written again: %s", job.log.log_id, error)
            self._look_at_ns = self._state.now_ns + RETRY_NS
        yield from job.settle()
        self._job = None

    def _unpin(self, job: Job) -> Steps:
        done = False
        try:
            done = yield from unpin(job, self._retention)
        finally:  # what cannot be read or written pins the log as well: its limit holds
            self._refused.pop(job.slot, None)
            if not done:
                until_ns = self._state.now_ns + REFUSED_NS
                self._refused[job.slot] = job.log.oldest_position, until_ns
        if job.slot in self._wanted:  # asked for again meanwhile: who still wants it asks anew
            self._wanted.remove(job.slot)
