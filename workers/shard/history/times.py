"""From a time to an offset in history: the uploader looks, and what had to know is run again with the offset."""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker import messages as m
from danube_fast.broker.partition import Partition
from danube_fast.errors import DanubeError, FailedPrecondition, NotOwner
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.shard.read.places import first_run
from danube_fast.workers.shard.read.times import offset_at
from danube_fast.workers.shard.state import ShardState

__all__ = ["HistoryTimes"]

FIND_MS = 30_000

Found = Callable[[int, DanubeError | None], None]
"""Called with the offset, or with an error."""


class HistoryTimes:
    """Find times in the history of one worker's partitions."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def may_hold(self, partition: Partition, time_ns: int) -> bool:
        """Whether the first message at a time (wall clock) or later may be in history only."""
        first = partition.first_offset
        if not partition.is_in_history(first):
            return False
        run = first_run(self._state.logs[partition.log_slot], partition, first)
        return run is None or (run.base_offset > first and run.append_time_ns > time_ns)

    def find(self, partition: Partition, time_ns: int, found: Found) -> None:
        """Find the first message at a time or later. Raises FailedPrecondition without an uploader."""
        uploader = self._state.boot.config.processes.uploader
        if uploader is None:
            raise FailedPrecondition(
                f"{partition.topic} has messages in history, and the broker was started without --store"
            )
        number = partition.partition_id

        def answered(reply: Reply) -> None:
            if reply.error is not None:
                found(-1, reply.error)
            elif self._state.partition(number) is not partition:
                found(-1, NotOwner(f"{partition.topic} has moved; look it up again"))
            elif reply.value is not None:
                found(max(int(reply.value), partition.first_offset), None)
            else:  # all of history is older
                log = self._state.logs[partition.log_slot]
                found(offset_at(partition, log, time_ns), None)

        message = m.FindHistoryTime(number, time_ns, partition.uploaded.manifest)
        mailbox = self._state.boot.mailbox
        mailbox.call(uploader, message, on_reply=answered, timeout_ms=FIND_MS)
