"""Pages of the logs that every consumer has passed leave the page cache (decision 43)."""

from __future__ import annotations

from danube_fast.broker.partition import Partition
from danube_fast.wal.log import Log
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.read.places import lowest_position
from danube_fast.workers.shard.state import ShardState

__all__ = ["STEP_BYTES", "PassedPages"]

STEP_BYTES = 32 << 20
"""A log is looked at whenever it has grown by so much."""


class PassedPages(Job):
    """Look how far the consumers of each log of one worker are, and drop the pages behind them.

    What is in a worker's memory needs no page. What leaves it between two looks is among the newest bytes of the log:
    `tail_bytes_max` and a step, which stay.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._looked: dict[int, int] = {}
        """By id of a log: where it ended at the last look."""

    def do_work(self, now_ns: int) -> None:
        """Look at logs that have grown."""
        for slot, log in self._state.logs.items():
            end = log.written_position
            if end - self._looked.setdefault(log.log_id, end) >= STEP_BYTES:
                self._looked[log.log_id] = end
                self._drop(slot, log)

    def _drop(self, slot: int, log: Log) -> None:
        settings = self._state.settings
        kept_bytes = max(settings.page_cache_bytes, settings.tail_bytes_max) + STEP_BYTES
        position = min(log.written_position - kept_bytes, log.synced_position)
        pinned = self._state.pins.lowest(slot)
        position = position if pinned is None else min(position, pinned)
        for partition in self._state.catalog.of_log(slot):
            if position <= log.oldest_position:
                return
            if partition.logged and not self._is_in_memory(partition):
                lowest = lowest_position(log, partition, self._unread(partition))
                position = position if lowest is None else min(position, lowest)
        log.pages.drop(position)

    def _is_in_memory(self, partition: Partition) -> bool:
        """Whether all that is to be read of a partition is in memory."""
        oldest = partition.oldest_in_tail()
        in_memory = partition.visible if oldest is None else oldest.base_offset
        return self._unread(partition) >= in_memory

    def _unread(self, partition: Partition) -> int:
        """Find the offset from which on a partition's messages are still to be read, by consumers or the uploader."""
        cursors = [sub.cursor for sub in partition.subscriptions.values()]
        if self._state.keeps_history(partition):
            cursors.append(partition.uploaded.until)
        return min(cursors, default=partition.visible)
