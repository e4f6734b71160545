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
        self._state, self._accepts = state, state.boot.config.accept_rollback
        self.older_since_ns = [0] * len(state.logs)
        """By slot: the wall clock, if the log or the metadata is an older copy; else 0."""
        data_dir = Path(state.boot.config.data_dir)
        marks = environment.read_marks(data_dir)
        for slot, log in enumerate(state.logs):
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
        sealed = self._sealed(environment, data_dir, revision)
        if sealed is not None and sealed < revision:
            self._found(
                f"the metadata is of revision {sealed}, but logs in {data_dir / 'logs'} were written "
                f"under revision {revision}: the metadata is an older copy",
                *range(len(state.logs)),
            )
        self.begun = [[log.log_id, log.epoch + 1, len(log.losses)] for log in state.logs]

    def _sealed(self, environment: Environment, data_dir: Path, revision: int) -> int | None:
        """Read the seal's revision; None if there is no seal."""
        boot = self._state.boot
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
        if not self._accepts:
            raise DataLoss(f"{text}; {REMEDY}")
        _log.warning("%s; this is accepted, and offsets go on far above", text)
        for slot in slots:
            self.older_since_ns[slot] = self._state.clock.wall_ns()

    def first_offset(self, entry: m.Assignment, slot: int) -> int:
        """Choose the first offset of a partition that the log does not know: if the log should know it, the
        microseconds of the clock, which no partition has reached by counting."""
        first = entry.first_offset
        return max(first, self.older_since_ns[slot] // 1000) if entry.is_old else first

    def report(self) -> m.LogMarks:
        """Make the report that goes to the coordinator with the question for assignments."""
        state = self._state
        logs = [
            (log_id, epoch, log.synced_position, losses)
            for (log_id, epoch, losses), log in zip(self.begun, state.logs, strict=True)
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
