"""Frames that a worker writes again at the end of a log, under their old offsets: one job at a time.

    compaction.py    a pass over one partition: of every key the newest message is written again
    pinned.py        needed frames of the oldest segment of a full log

A job is a generator that yields wherever it may be interrupted. It gets a few milliseconds of a turn.
Until the new copies are durable, the old ones stay: a kill at any instant finds the one or the other. A
disk that fails ends the job; its copies are there twice and do no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from danube_fast.errors import DanubeError
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.compaction import Compaction
from danube_fast.workers.shard.keep.pinned import REWRITES, free_oldest_segment
from danube_fast.workers.shard.keep.rewrite import Rewrite, Steps
from danube_fast.workers.shard.keep.segments import Segments
from danube_fast.workers.shard.state import ShardState

__all__ = ["Rewrites"]

_log = logging.getLogger(__name__)

STEP_NS_MAX = 5_000_000
"""Time in each tick."""
STEPS_MAX = 256
"""The same under a clock that stands still."""
LOOK_NS = 1_000_000_000
"""How often partitions are checked."""
REFUSED_NS = 3 * LOOK_NS
"""How long the refusal to free a segment counts, because too much of it is needed or cannot be moved."""
RETRY_NS = 10_000_000_000
"""After a failure."""


class Rewrites(Job):
    """Run the rewrites of one worker."""

    def __init__(self, state: ShardState, segments: Segments) -> None:
        self._state, self._segments = state, segments
        self.compaction = Compaction(state)
        state.pins.add(REWRITES, self.needed_position)
        self._job: Rewrite | None = None
        self._steps: Steps = iter(())
        self._look_at_ns = 0
        self._wanted: list[int] = []
        """Slots of logs whose oldest segment is pinned."""
        self._refused: dict[int, tuple[int, int]] = {}
        """By slot: the oldest position of a log whose segment there cannot be freed, and until when that counts."""

    # ------------------------------------------------------------ asked by trimming

    def needed_position(self, slot: int) -> int | None:
        """Find the position from which on that log must not be trimmed; None if no job needs it."""
        if self._job is None or self._job.slot != slot:
            return None
        return self._job.needed_from

    def free_oldest_segment(self, slot: int) -> bool:
        """Free the oldest segment of a full log soon; False if that was refused lately."""
        if slot not in self._wanted:
            self._wanted.append(slot)
        position, until_ns = self._refused.get(slot, (-1, 0))
        known = position == self._state.logs[slot].oldest_position
        return not known or self._state.now_ns >= until_ns

    # ------------------------------------------------------------ turns

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None

    def do_work(self, now_ns: int) -> None:
        """Take a few steps of the job; begin a new one, if it is time."""
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
        while self._wanted:
            slot = self._wanted.pop(0)
            if slot in self._state.logs:  # else it was closed meanwhile
                self._start(slot, self._free)
                return
        partition = self.compaction.next_partition()
        if partition is not None:
            self._start(partition.log_slot, lambda job: self.compaction.go_over(job, partition))

    def _start(self, slot: int, steps: Callable[[Rewrite], Steps]) -> None:
        job = self._job = Rewrite(self._state, slot)
        self._steps = self._guarded(job, steps(job))

    def _guarded(self, job: Rewrite, steps: Steps) -> Steps:
        """Take a job's steps, and end the job, whether they fail or not."""
        try:
            yield from steps
        except DanubeError as error:
            _log.warning("log %d: frames are not written again: %s", job.log.log_id, error)
            self._look_at_ns = self._state.now_ns + RETRY_NS
        yield from job.wait_durable()
        self._job = None

    def _free(self, job: Rewrite) -> Steps:
        done = False
        try:
            done = yield from free_oldest_segment(job, self._segments)
        finally:  # frames that cannot be read or written stay needed
            self._refused.pop(job.slot, None)
            if not done:
                until_ns = self._state.now_ns + REFUSED_NS
                self._refused[job.slot] = job.log.oldest_position, until_ns
        if job.slot in self._wanted:  # asked for meanwhile: trimming asks anew
            self._wanted.remove(job.slot)
