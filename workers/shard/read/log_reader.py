"""Reads of partitions behind their tail: for consumers, delayed messages, moves and administrators."""

from __future__ import annotations

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Gap, Stored
from danube_fast.workers.shard.read.frames import frames_of
from danube_fast.workers.shard.read.places import gap_in_log, live_runs
from danube_fast.workers.shard.state import ShardState

__all__ = ["LogReader"]


class LogReader:
    """Reads the logs of one worker, and counts the bytes."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self.bytes_read = 0

    def read(self, partition: Partition, offset: int, byte_limit: int) -> list[Stored] | Gap | None:
        """Frames of a partition from `offset` on, about `byte_limit` bytes; or the gap there."""
        log = self._state.logs[partition.log_slot]
        runs = live_runs(log, partition, offset, byte_limit)
        if not runs or runs[0].base_offset > offset:
            end = runs[0].base_offset if runs else partition.visible
            return gap_in_log(partition, offset, end) if offset < end else None
        frames: list[Stored] = []
        for run in runs:
            data = log.read_run(run)
            self.bytes_read += len(data)
            frames.extend(frames_of(partition.partition_id, data))
        return [frame for frame in frames if offset < frame.end_offset <= partition.visible] or None

    def read_some(self, partition: Partition, offset: int) -> list[Stored] | Gap | None:
        """The frame that holds an offset, and maybe more."""
        return self.read(partition, offset, 1)
