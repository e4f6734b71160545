"""Markers of an idle log, which prove what is durable, and snapshots of a growing one, for a quick start."""

from __future__ import annotations

import logging

from danube_fast.broker import records as r
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.state import ShardState

__all__ = ["Checkpoints"]

_log = logging.getLogger(__name__)


class Checkpoints(Job):
    """Write markers and snapshots of one worker's logs."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def do_work(self, now_ns: int) -> None:
        """Write the markers that are due, and take the next step of each snapshot."""
        for slot in self._state.logs:
            self._mark(slot, now_ns)
            self._snapshot(slot)

    def _mark(self, slot: int, now_ns: int) -> None:
        """Sync an idle log and write a marker that says so: then damage to the last group can be told from a
        torn write."""
        journal, log = self._state.journals[slot], self._state.logs[slot]
        idle_ns = self._state.settings.idle_marker_ms * MILLISECOND_NS
        if journal.marked or journal.busy or now_ns - journal.last_write_ns < idle_ns:
            return
        if log.synced_position < log.written_position:
            journal.sync_now()
            return
        self.write_marker(slot)

    def write_marker(self, slot: int, *, again: bool = False) -> None:
        """Record in the log how far it is durable. `again`: even if the last group says it already."""
        journal, log = self._state.journals[slot], self._state.logs[slot]
        try:
            log.write_marker(again=again)
        except DanubeError as error:
            _log.warning("no marker in log %d: %s", log.log_id, error)
        journal.marked = True
        journal.refresh()
        log.sync()

    def _snapshot(self, slot: int) -> None:
        """Take a snapshot after a segment is full; save it once all that it describes is durable."""
        journal, log = self._state.journals[slot], self._state.logs[slot]
        if journal.snapshot is not None:
            position, state = journal.snapshot
            if log.synced_position >= position:
                journal.snapshot = None
                log.save_snapshot(position, state)
            else:
                journal.sync_now()
        elif (
            log.snapshot_due
            and log.written_position > log.snapshot_position
            and not journal.has_open_group
            and not journal.changing
        ):
            journal.snapshot = (log.written_position, self.encode(slot, clean=False))

    def encode(self, slot: int, *, clean: bool) -> bytes:
        """Encode the state of a log's partitions at its written position. `clean`: nothing follows it."""
        state = self._state
        number, now_ns = state.logs[slot].epoch, state.now_wall_ns
        epoch = state.catalog.epoch_started(number, now_ns, state.boot_id, clean=clean)
        return r.encode_snapshot(state.catalog.snapshot(slot, epoch))
