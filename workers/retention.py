"""What a worker keeps and what may go: segments that nobody needs, and room in memory.

A segment goes when no partition needs anything in it; what a partition needs is for its topic's
policy and its subscriptions to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.broker.layout import INT64_MAX, Mode, PartitionWord
from danube_fast.broker.partition import Partition
from danube_fast.errors import ResourceExhausted
from danube_fast.workers.positions import purged_below

if TYPE_CHECKING:
    from danube_fast.workers.shard import ShardWorker

__all__ = ["Retention"]

SECOND_NS = 1_000_000_000


class Retention:
    """Trimming of one worker's logs and memory topics."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker

    def trim(self, slot: int, *, over: bool) -> None:
        """Give back segments whose messages nobody needs any more."""
        worker = self._worker
        log = worker.logs[slot]
        if log.segment_count < 2 or log.snapshot_position == 0:
            return
        keep_ns = worker.settings.retention_seconds_min * SECOND_NS
        limit = log.position_before(INT64_MAX if over else worker.upkeep.steady_wall_ns - keep_ns)
        limit = max(limit, purged_below(worker, slot))
        pin: tuple[Partition, str] | None = None
        for partition in worker.catalog.by_id.values():
            if partition.log_slot != slot:
                continue
            for sub in partition.subscriptions.values():
                if limit <= log.oldest_position:
                    break
                run = log.find(partition.partition_id, sub.cursor)
                if run is not None and run.position < limit:
                    limit, pin = run.position, (partition, sub.name)
        before = log.oldest_position
        moving = worker.moves.needed_position(slot)
        limit = limit if moving is None else min(limit, moving)
        if limit > before:
            log.trim(limit, urgent=over)
            # a snapshot that is due although nothing was written since the last: move the log on
            idle = not worker.journals[slot].has_open_group
            if log.snapshot_due and idle and log.written_position == log.snapshot_position:
                worker.upkeep.write_marker(slot, again=True)
        if log.oldest_position > before:
            self._move_first_offsets(slot)
        self._limit(slot, pin if over and log.oldest_position == before else None)

    def _move_first_offsets(self, slot: int) -> None:
        worker = self._worker
        log = worker.logs[slot]
        for partition in worker.catalog.by_id.values():
            if partition.log_slot == slot and partition.logged:
                run = log.find(partition.partition_id, partition.first_offset)
                first = run.base_offset if run is not None else partition.visible
                partition.first_offset = max(partition.first_offset, first)

    def find_first_offsets(self, slot: int) -> None:
        """At the start: what was trimmed is known to the log, not to the last snapshot."""
        log = self._worker.logs[slot]
        for partition in self._worker.catalog.by_id.values():
            if partition.log_slot == slot and partition.reliable:
                first = max(partition.assigned.first_offset, partition.purged_until)
                run = log.find(partition.partition_id, first)
                partition.first_offset = run.base_offset if run is not None else partition.visible
                partition.first_offset = max(partition.first_offset, first)

    def _limit(self, slot: int, pin: tuple[Partition, str] | None) -> None:
        """At `wal_bytes_max`, refuse the topic whose subscription pins the oldest segment."""
        worker = self._worker
        for partition in worker.catalog.by_id.values():
            if partition.log_slot != slot or not partition.logged or partition.switching:
                continue
            refused = pin is not None and pin[0] is partition
            if refused == bool(partition.refusal):
                continue
            row = worker.tables.partitions[partition.slot]
            row[PartitionWord.MODE] = Mode.CLOSED if refused else Mode.LOGGED
            row[PartitionWord.REFUSAL] = ResourceExhausted.code
            partition.refusal = ""
            if refused and pin is not None:
                partition.refusal = (
                    f"the log reached wal_bytes_max ({worker.quota.allowance_bytes} bytes here) and "
                    f"subscription {pin[1]!r} of {partition.topic} still needs its oldest segment; "
                    "let it consume, or delete it: danube-fast subscriptions delete "
                    f"{partition.topic} {pin[1]}"
                )

    def trim_memory(self, partition: Partition) -> None:
        """Drop frames of a memory topic that everybody acked; refuse publishes above its quota."""
        worker = self._worker
        needed = partition.oldest_needed()
        quota = worker.settings.memory_topic_bytes_max
        oldest = partition.oldest_in_tail()
        while oldest is not None and (
            oldest.end_offset <= needed if partition.subscriptions else partition.tail_bytes > quota
        ):
            partition.evict()
            oldest = partition.oldest_in_tail()
        full = partition.tail_bytes > quota
        if worker.catalog.by_id.get(partition.partition_id) is not partition or partition.switching:
            return
        if full != bool(partition.refusal):
            row = worker.tables.partitions[partition.slot]
            row[PartitionWord.MODE] = Mode.CLOSED if full else Mode.MEMORY
            row[PartitionWord.REFUSAL] = ResourceExhausted.code
            partition.refusal = (
                f"{partition.topic} keeps {partition.tail_bytes} unacked bytes in memory, its limit "
                f"is memory_topic_bytes_max ({quota}); let its subscriptions consume"
                if full
                else ""
            )
