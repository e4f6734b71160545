"""The logs of a worker: opened with all that they say, and ended in order."""

from __future__ import annotations

import itertools
import logging

from danube_fast.broker import records as r
from danube_fast.errors import DanubeError
from danube_fast.wal.background import Background
from danube_fast.wal.log import Log
from danube_fast.workers.shard.keep.checkpoints import Checkpoints
from danube_fast.workers.shard.publish.journal import Journal
from danube_fast.workers.shard.state import ShardState

__all__ = ["Logs"]

_log = logging.getLogger(__name__)


class Logs:
    """Open and end the logs of one worker."""

    def __init__(self, state: ShardState, background: Background) -> None:
        self._state, self._background = state, background

    def load(self, log_id: int, path: str) -> int:
        """Open a log and restore its partitions; its slot, which is taken even if that fails. Raises DataLoss,
        FailedPrecondition for a log that is open already: then no slot is taken."""
        state = self._state
        slot = next(slot for slot in itertools.count() if slot not in state.logs)
        log = Log.open(
            path, log_id=log_id, settings=state.settings, clock=state.clock,
            wake_fd=state.boot.mailbox.fileno(), background=self._background,
        )  # fmt: skip
        state.tables.add_log(slot)
        state.logs[slot] = log
        state.journals[slot] = Journal(log, slot, state.tables, state.settings)
        if log.snapshot is not None:
            state.catalog.apply_snapshot(r.decode_snapshot(log.snapshot[1]), slot)
        for block in log.replay():
            state.boot.heartbeat()
            state.catalog.apply_block(block, slot)
        return slot

    def begin_epoch(self, slot: int, skipped: list[r.PartitionState]) -> None:
        """Write the epoch's record. `skipped`: where partitions stand that skip offsets. Until that
        is durable too, the log's last boot is unknown, so that the next start skips them again."""
        state = self._state
        log, journal = state.logs[slot], state.journals[slot]
        boot_id, now = "" if skipped else state.boot_id, state.now_wall_ns
        log.begin_epoch([r.encode_record(state.catalog.epoch_started(log.epoch + 1, now, boot_id))])
        for skipping in skipped:
            journal.record(skipping)
        if skipped:
            journal.record(state.catalog.epoch_started(log.epoch, now, state.boot_id))
        journal.refresh()

    def save(self, slot: int, checkpoints: Checkpoints) -> None:
        """End a log in order: sync all that is written, and save a clean snapshot that says so."""
        state = self._state
        log, journal = state.logs[slot], state.journals[slot]
        journal.write(state.now_ns)
        journal.snapshot = None
        try:
            log.close(checkpoints.encode(slot, clean=True))
        except DanubeError as error:
            _log.error("log %d did not end in order: %s", log.log_id, error)
