"""Partitions that were published to: their next offsets are reserved, their room in memory is bounded."""

from __future__ import annotations

from danube_fast.clock import MILLISECOND_NS
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.publish.intake import Intake

__all__ = ["TouchedPartitions"]

INTERVAL_NS = 250 * MILLISECOND_NS


class TouchedPartitions(Job):
    """Looks after what one worker's intake touched since the last time."""

    def __init__(self, intake: Intake, retention: Retention) -> None:
        self._intake, self._retention = intake, retention
        self._next_ns = 0

    def do_work(self, now_ns: int) -> None:
        """Reserve offsets and drop what everybody acked, if it is time."""
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + INTERVAL_NS
        touched, self._intake.touched = self._intake.touched, {}
        for partition in touched.values():
            if self._intake.needs_reservation(partition):
                self._intake.reserve_offsets(partition)
            if partition.keeps_memory:
                self._retention.trim_memory(partition)
                if partition.tail_count:
                    self._intake.touched[partition.partition_id] = partition
