"""Logs that are opened and closed while the worker runs: with all their partitions.

open:  load -> begin its epoch -> the partitions are served when the metadata says that they are here
close: send clients away -> all that is written is durable -> end it in order -> forget its partitions
"""

from __future__ import annotations

from danube_fast.broker.admission.gate import Cause
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError, FailedPrecondition
from danube_fast.workers.shard.deliver.lookahead import Lookahead
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.checkpoints import Checkpoints
from danube_fast.workers.shard.keep.cursors import Cursors
from danube_fast.workers.shard.keep.segments import Segments
from danube_fast.workers.shard.logs import Logs
from danube_fast.workers.shard.move.ownership import Ownership
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.rollback import Restored
from danube_fast.workers.shard.state import ShardState

__all__ = ["LogChanges"]


class LogChanges(Job):
    """Begin the logs of one worker, and open and close more of them while it runs."""

    def __init__(
        self, state: ShardState, logs: Logs, restored: Restored, ownership: Ownership,
        cursors: Cursors, checkpoints: Checkpoints, segments: Segments, lookahead: Lookahead,
        reader: LogReader,
    ) -> None:  # fmt: skip
        self._state, self._logs, self._restored = state, logs, restored
        self._ownership, self._cursors, self._checkpoints = ownership, cursors, checkpoints
        self._segments, self._lookahead, self._reader = segments, lookahead, reader
        self._closing: dict[int, Done] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a log is being closed."""
        return bool(self._closing)

    def begin(self, *slots: int) -> None:
        """Begin the epoch of logs that were just loaded, and take up their partitions. Raises DataLoss for an
        older copy of a log."""
        state = self._state
        self._restored.look_at(*slots)
        partitions = [each for each in state.catalog.by_id.values() if each.log_slot in slots]
        for slot in slots:
            older_since_ns = self._restored.older_since_ns.get(slot, 0)
            skipped = state.catalog.finish_restore(slot, state.boot_id, older_since_ns)
            self._logs.begin_epoch(slot, skipped)
            self._segments.find_first_offsets(slot)
        for partition in partitions:
            state.apply_policy(partition)
        self._lookahead.look_at(*partitions)

    def open(self, log_id: int, path: str) -> None:
        """Open a log. Its partitions are served when they are assigned: ask for that afterwards. Raises
        FailedPrecondition for a log that is open, DataLoss for one that is damaged, or an older copy."""
        before = set(self._state.logs)
        try:
            self.begin(self._logs.load(log_id, path))
        except DanubeError:
            for slot in set(self._state.logs) - before:
                self._state.logs[slot].abandon()
                self._forget(slot)
            raise

    def close(self, log_id: int, done: Done) -> None:
        """Close a log; `done` when another process may open it, which a disk that fails puts off. Its clients look
        its topics up again; what topics of durability memory hold is gone, as at a restart. Raises NotOwner,
        FailedPrecondition while it is being closed or one of its partitions moves."""
        slot = self._ownership.slot_of(log_id)
        partitions = self._state.catalog.of_log(slot)
        if slot in self._closing:
            raise FailedPrecondition(f"log {log_id} is being closed already; wait for its end")
        moving = [partition.topic for partition in partitions if partition.moving]
        if moving or slot in self._state.catalog.others:
            raise FailedPrecondition(
                f"partitions of log {log_id} are on their way to or from another log just now "
                f"({', '.join(moving[:5])}); close it when they have arrived"
            )
        for partition in partitions:
            self._state.leaving.add(partition.partition_id)
            text = f"{partition.topic} is being moved to another worker; look it up again"
            self._state.gate.close(partition, Cause.MOVE, text)
            self._ownership.send_consumers_away(partition)
        self._cursors.write()
        self._closing[slot] = done

    def do_work(self, now_ns: int) -> None:
        """End the logs of which all is durable."""
        state = self._state
        for slot, done in list(self._closing.items()):
            log, journal = state.logs[slot], state.journals[slot]
            if log.synced_position < log.written_position:
                journal.sync_now()
            elif (
                journal.busy or slot in self._reader.fetches or state.pins.lowest(slot) is not None
            ):
                continue  # it is read, or written to
            else:
                del self._closing[slot]
                self._logs.save(slot, self._checkpoints)
                self._forget(slot)
                done(None)

    def _forget(self, slot: int) -> None:
        """Keep nothing of a log that has ended."""
        state = self._state
        for partition in state.catalog.of_log(slot):
            self._ownership.forget(partition)
            state.leaving.discard(partition.partition_id)
        state.catalog.forget_log(slot)
        self._restored.forget(slot)
        del state.logs[slot], state.journals[slot]
