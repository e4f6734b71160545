"""One job of writing frames again: its log, its checks, its waits. rewrites.py decides when there is one."""

from __future__ import annotations

from collections.abc import Iterator

from danube_fast.broker.partition import Partition
from danube_fast.errors import Unavailable
from danube_fast.wal.log import Log
from danube_fast.workers.shard.publish.copies import write_again
from danube_fast.workers.shard.state import ShardState

__all__ = ["Rewrite", "Steps"]

UNSYNCED_BYTES_MAX = 16 * 1024 * 1024

Steps = Iterator[bool]
"""Yields after each step; False: wait for the disk."""


class Rewrite:
    """Write frames of one log again, and keep the old copies from being trimmed meanwhile."""

    def __init__(self, state: ShardState, slot: int) -> None:
        self.state, self.slot = state, slot
        self.log: Log = state.logs[slot]
        self.needed_from = self.log.oldest_position
        """Nothing from here on may be trimmed until all that was written is durable."""
        self._epoch = self.log.epoch

    @property
    def piece_bytes(self) -> int:
        """Size of a group, about."""
        return min(1 << 20, self.state.settings.segment_bytes // 8)

    def check(self, partition: Partition) -> None:
        """Raise Unavailable if the partition is being changed, or the log has failed meanwhile."""
        known = self.state.partition(partition.partition_id) is partition
        if not known or not partition.logged or partition.is_changing:
            raise Unavailable(f"{partition.topic} is being changed")
        self.check_log()

    def check_log(self) -> None:
        """Raise Unavailable if the log has failed meanwhile."""
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

    def wait_for_disk(self) -> Steps:
        """Wait while too much is on its way to the disk."""
        yield True
        while self.log.written_position - self.log.synced_position > UNSYNCED_BYTES_MAX:
            yield False

    def wait_durable(self) -> Steps:
        """Wait until all that is written is durable."""
        end = self.log.written_position
        while self.log.synced_position < end or self.log.sync_fault is not None:
            if self.log.sync_fault is None:
                self.log.sync()
            yield False
            end = min(end, self.log.written_position)
