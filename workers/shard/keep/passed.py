"""Pages of the logs that every consumer has passed leave the page cache (decision 43)."""

from __future__ import annotations

from collections.abc import Iterator

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.errors import DataLoss
from danube_fast.frame.layout import At
from danube_fast.wal.log import Log
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.read.places import lowest_position
from danube_fast.workers.shard.state import ShardState

__all__ = ["STEP_BYTES", "PassedPages"]

STEP_BYTES = 32 << 20
"""A log is looked at whenever it has grown by so much."""
SLICE = 256
"""Partitions in one turn of the loop."""
COST_PART = 50
"""Looks take at most this part of a worker's time: with many partitions they come less often."""


class PassedPages(Job):
    """Look how far the consumers of each log of one worker are, and drop the pages behind them."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._looked: dict[int, int] = {}
        """By id of a log: where it ended at the last look."""
        self._look: Iterator[None] | None = None
        self._took_ns = self._next_ns = 0

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way."""
        return self._look is not None

    def do_work(self, now_ns: int) -> None:
        """Go on with a look that is under way, or begin one at a log that has grown."""
        if self._look is None:
            slot = self._grown() if now_ns >= self._next_ns else None
            if slot is None:
                return
            self._took_ns, self._look = 0, self._steps(slot)
        began_ns = self._state.clock.monotonic_ns()
        try:
            is_over = next(self._look, True)
        except DataLoss:
            is_over = True  # the index cannot be read: what has to read the log says so
        self._took_ns += self._state.clock.monotonic_ns() - began_ns
        if is_over:
            self._look = None
            self._next_ns = now_ns + COST_PART * self._took_ns

    def _grown(self) -> int | None:
        for slot, log in self._state.logs.items():
            end = log.written_position
            if end - self._looked.setdefault(log.log_id, end) >= STEP_BYTES:
                self._looked[log.log_id] = end
                return slot
        return None

    def _steps(self, slot: int) -> Iterator[None]:
        settings, log = self._state.settings, self._state.logs[slot]
        kept_bytes = max(settings.page_cache_bytes, settings.tail_bytes_max) + STEP_BYTES
        position = min(log.written_position - kept_bytes, log.synced_position)
        pinned = self._state.pins.lowest(slot)
        position = position if pinned is None else min(position, pinned)
        for number, partition in enumerate(self._state.catalog.of_log(slot), 1):
            if position <= max(log.oldest_position, log.pages.dropped_position):
                return
            if partition.logged and self._state.partition(partition.partition_id) is partition:
                position = min(position, self._needed_from(log, partition, position))
            if number % SLICE == 0:
                yield
                if self._state.logs.get(slot) is not log:
                    return
        log.pages.drop(position)

    def _needed_from(self, log: Log, partition: Partition, position: int) -> int:
        """Find where what is still to be read of a partition begins, if that is below `position`, else that."""
        unread = self._unread(partition)
        if unread >= partition.visible:
            return position
        stored = None if partition.breaks else partition.find_in_tail(unread)
        if isinstance(stored, Stored):  # its place stands in its header: no index is asked
            return int.from_bytes(stored.memory[At.LOG_POSITION :][:8], "little")
        lowest = lowest_position(log, partition, unread)
        return position if lowest is None else lowest

    def _unread(self, partition: Partition) -> int:
        """Find the offset from which on a partition's messages are still to be read: by consumers, the uploader, or
        compaction, which reads a topic from the front."""
        if partition.policy.compaction:
            return partition.first_offset
        cursors = [sub.cursor for sub in partition.subscriptions.values()]
        if self._state.keeps_history(partition):
            cursors.append(partition.uploaded.until)
        return min(cursors, default=partition.visible)
