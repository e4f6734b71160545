"""Partitions that were published to: their next offsets are reserved, their room in memory is bounded."""

from __future__ import annotations

from danube_fast.clock import MILLISECOND_NS
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.publish.intake import Intake

__all__ = ["TouchedPartitions"]


class TouchedPartitions(PeriodicJob):
    """Reserve offsets and bound memory of partitions that took messages since the last run."""

    interval_ns = 250 * MILLISECOND_NS

    def __init__(self, intake: Intake, retention: Retention) -> None:
        self._intake, self._retention = intake, retention

    def run(self, now_ns: int) -> None:
        """Reserve offsets and drop frames that all subscriptions acked."""
        touched, self._intake.touched = self._intake.touched, {}
        for partition in touched.values():
            if self._intake.needs_reservation(partition):
                self._intake.reserve_offsets(partition)
            if partition.keeps_memory:
                self._retention.trim_memory(partition)
                if partition.tail_count:
                    self._intake.touched[partition.partition_id] = partition
