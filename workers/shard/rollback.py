"""Whether logs and metadata are of one moment: one of them may have been put back from an older copy.

    log       --> "the metadata was at revision R"        EpochStarted; checked against the seal
    metadata  --> "log i was at position P in epoch E"    its file `logs`; checked against the log

Each of the two promises only what the other has durably, so no kill and no power cut can part them.
Workers check both before they write or serve anything. A broker that goes on all the same, with
`serve --accept-rollback`, gives out no offset and no id again: all of them go on far above.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, DataLoss
from danube_fast.ring.control import ProcessState
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.shard.state import ShardState

__all__ = ["Restored"]

_log = logging.getLogger(__name__)

SEAL_WAIT_NS = 20_000_000_000
"""How long a seal that seems too old is read again: the coordinator may be writing it anew."""
SEAL_LOOK_SECONDS = 0.02
REMEDY = (
    "put logs and metadata back from one backup, or go on without what is missing: danube-fast "
    "serve --accept-rollback"
)


class Restored:
    """Check the logs of a worker that starts. Raises DataLoss for an older copy, unless that is accepted."""

    def __init__(self, state: ShardState, environment: Environment) -> None:
        self._state, self._environment = state, environment
        self.older_since_ns: dict[int, int] = {}
        """By slot: the wall clock, if the log or the metadata is an older copy."""
        self._begun: dict[int, tuple[int, int, int]] = {}
        """By slot: a log's id, the epoch that begins, and how often it lost something."""

    def look_at(self, *slots: int) -> None:
        """Check logs that were just opened. Raises DataLoss."""
        state = self._state
        data_dir = Path(state.boot.config.data_dir)
        marks = self._environment.read_marks(data_dir)
        for slot in slots:
            log = state.logs[slot]
            self._begun[slot] = log.log_id, log.epoch + 1, len(log.losses)
            mark = marks.get(log.log_id)
            if mark is None or len(log.losses) > mark.losses:
                continue
            if log.epoch < mark.epoch or log.written_position < mark.position:
                self._found(
                    f"log {log.log_id} in {log.directory} ends at position {log.written_position} in "
                    f"epoch {log.epoch}, but the metadata knows it at position {mark.position} in "
                    f"epoch {mark.epoch}: it is an older copy",
                    slot,
                )
        revision = state.catalog.metadata_revision
        sealed = self._sealed(data_dir, revision)
        if sealed is not None and sealed < revision:
            self._found(
                f"the metadata is of revision {sealed}, but logs in {data_dir / 'logs'} were written "
                f"under revision {revision}: the metadata is an older copy",
                *slots,
            )

    def forget(self, slot: int) -> None:
        """Keep nothing of a log that is closed."""
        self.older_since_ns.pop(slot, None)
        self._begun.pop(slot, None)

    def _sealed(self, data_dir: Path, revision: int) -> int | None:
        """Read the seal's revision; None if there is no seal."""
        boot, environment = self._state.boot, self._environment
        until_ns = boot.clock.monotonic_ns() + SEAL_WAIT_NS
        sealed = environment.sealed_revision(data_dir)
        while sealed is not None and sealed < revision and boot.clock.monotonic_ns() < until_ns:
            is_written = boot.control.state(COORDINATOR) == ProcessState.READY
            sealed = environment.sealed_revision(data_dir)
            if is_written or boot.stop_requested:
                break
            boot.heartbeat()
            time.sleep(SEAL_LOOK_SECONDS)
        return sealed

    def _found(self, text: str, *slots: int) -> None:
        if not self._state.boot.config.accept_rollback:
            raise DataLoss(f"{text}; {REMEDY}")
        _log.warning("%s; this is accepted, and offsets go on far above", text)
        for slot in slots:
            self.older_since_ns[slot] = self._state.clock.wall_ns()

    def first_offset(self, entry: m.Assignment, slot: int) -> int:
        """Choose the first offset of a partition that the log does not know: if the log should know it, the
        microseconds of the clock, which no partition has reached by counting."""
        first = entry.first_offset
        return max(first, self.older_since_ns.get(slot, 0) // 1000) if entry.is_old else first

    def report(self) -> m.LogMarks:
        """Make the report that goes to the coordinator with the question for assignments."""
        state = self._state
        logs = [
            (log_id, epoch, state.logs[slot].synced_position, losses)
            for slot, (log_id, epoch, losses) in self._begun.items()
        ]
        id_max = max(state.catalog.by_id, default=0)
        return m.LogMarks(logs, id_max, state.catalog.metadata_revision)

    def note_revision(self, revision: int, slots: set[int]) -> None:
        """Record from now on that the metadata is at least that new."""
        state = self._state
        if revision <= state.catalog.metadata_revision:
            return
        state.catalog.metadata_revision = revision
        for slot in slots:
            epoch, now_ns = state.logs[slot].epoch, state.now_wall_ns
            record = state.catalog.epoch_started(epoch, now_ns, state.boot_id)
            state.journals[slot].record(record)

    def send_report(self) -> None:
        """Send the final report, after the logs are closed."""
        with contextlib.suppress(DanubeError):
            self._state.boot.mailbox.notify(COORDINATOR, self.report())
