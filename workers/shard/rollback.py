"""Whether logs and metadata are of one moment: one of them may have been put back from an older copy.

    log       --> "the metadata was at revision R"        EpochStarted; checked against the seal
    metadata  --> "log i was at position P in epoch E"    its file `logs`; checked against the log

Each of the two promises only what the other has durably, so no kill and no power cut can part them.
Workers check both before they write or serve anything. Who goes on all the same, with
`serve --accept-rollback`, gives out no offset and no id again: all of them go on far above.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.errors import DanubeError, DataLoss
from danube_fast.metadata.store import MetadataStore
from danube_fast.ring.control import ProcessState
from danube_fast.workers.process.boot import COORDINATOR, BootConfig
from danube_fast.workers.process.mailbox import Mailbox, Request

if TYPE_CHECKING:
    from danube_fast.workers.process.outside import Outside
    from danube_fast.workers.reports.quota import CommitCursor
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["LogMark", "MarkKeeper", "Restored", "read_marks", "write_marks"]

_log = logging.getLogger(__name__)

MARKS_NAME = "logs"
SAVE_NS = 10_000_000_000
SEAL_WAIT_NS = 20_000_000_000
"""A seal that seems too old is looked at again until the coordinator has written it anew."""
SEAL_LOOK_SECONDS = 0.02
IDS_SKIPPED = 1 << 20
"""Of ids that metadata put back from a copy may not know of."""
REMEDY = (
    "put logs and metadata back from one backup, or go on without what is missing: danube-fast "
    "serve --accept-rollback"
)


class LogMark(NamedTuple):
    """How far a log was, durably, when the metadata heard of it."""

    log_id: int
    epoch: int
    """The one that its worker had begun."""
    position: int
    losses: int
    """Damages that an operator had accepted by then."""


def read_marks(metadata: Path) -> dict[int, LogMark]:
    """What the metadata knows of logs; nothing, if the file is missing or damaged."""
    try:
        crc, _, data = (metadata / MARKS_NAME).read_bytes().partition(b" ")
        if int(crc, 16) != zlib.crc32(data):
            return {}
        marks = msgspec.json.decode(data, type=list[LogMark])
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}
    return {mark.log_id: mark for mark in marks}


def write_marks(metadata: Path, marks: Mapping[int, LogMark]) -> None:
    """Replace what the metadata knows of logs, durably. Raises OSError."""
    data = msgspec.json.encode(list(marks.values()))
    partial = metadata / f"{MARKS_NAME}.partial"
    with partial.open("wb") as file:
        file.write(b"%08x %s" % (zlib.crc32(data), data))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(metadata / MARKS_NAME)


class Restored:
    """What a worker's start found in its logs, checked. Raises DataLoss unless that is accepted."""

    def __init__(self, worker: ShardWorker, outside: Outside) -> None:
        self._worker = worker
        self._accepts = worker.boot.config.accept_rollback
        self.older_since_ns = [0] * len(worker.logs)
        """By slot: the wall clock, if the log or the metadata is an older copy; else 0."""
        data_dir = Path(worker.boot.config.data_dir)
        marks = outside.read_marks(data_dir)
        for slot, log in enumerate(worker.logs):
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
        revision = worker.catalog.metadata_revision
        sealed = self._sealed(outside, data_dir, revision)
        if sealed is not None and sealed < revision:
            self._found(
                f"the metadata is of revision {sealed}, but logs in {data_dir / 'logs'} were written "
                f"under revision {revision}: the metadata is an older copy",
                *range(len(worker.logs)),
            )
        self.begun = [[log.log_id, log.epoch + 1, len(log.losses)] for log in worker.logs]

    def _sealed(self, outside: Outside, data_dir: Path, revision: int) -> int | None:
        """The seal's revision; None if there is no seal."""
        boot = self._worker.boot
        until_ns = boot.clock.monotonic_ns() + SEAL_WAIT_NS
        sealed = outside.sealed_revision(data_dir)
        while sealed is not None and sealed < revision and boot.clock.monotonic_ns() < until_ns:
            is_written = boot.control.state(COORDINATOR) == ProcessState.READY
            sealed = outside.sealed_revision(data_dir)
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
            self.older_since_ns[slot] = self._worker.clock.wall_ns()

    def first_offset(self, entry: Mapping[str, Any], slot: int) -> int:
        """Where a partition begins that the log does not know: if it should, at the microseconds of the
        clock, which no partition has reached by counting."""
        first = int(entry.get("first_offset", 0))
        return max(first, self.older_since_ns[slot] // 1000) if entry.get("is_old") else first

    def report(self) -> dict[str, Any]:
        """What the coordinator is told with the question for assignments."""
        worker = self._worker
        positions = [log.synced_position for log in worker.logs]
        return {
            "logs": [
                [log_id, epoch, position, losses]
                for (log_id, epoch, losses), position in zip(self.begun, positions, strict=True)
            ],
            "partition_id_max": max(worker.catalog.by_id, default=0),
            "metadata_revision": worker.catalog.metadata_revision,
        }

    def note_revision(self, revision: int, slots: set[int]) -> None:
        """The metadata is at least that new: what is written from now on says so."""
        worker = self._worker
        if revision <= worker.catalog.metadata_revision:
            return
        worker.catalog.metadata_revision = revision
        for slot in slots:
            epoch = worker.logs[slot].epoch
            worker.journals[slot].record(
                worker.catalog.epoch_started(epoch, worker.now_wall_ns, worker.boot_id)
            )

    def last_words(self) -> None:
        """The logs are closed: tell how far they are."""
        with contextlib.suppress(DanubeError):
            self._worker.boot.mailbox.notify(COORDINATOR, "log_marks", self.report())


class MarkKeeper:
    """The coordinator's side: keeps the marks, and ids and revisions above all that logs know."""

    def __init__(
        self,
        mailbox: Mailbox,
        config: BootConfig,
        outside: Outside,
        store: MetadataStore,
        topics: TopicDirectory,
    ) -> None:
        self._outside = outside
        self._mailbox = mailbox
        self._data_dir = Path(config.data_dir)
        self._accepts = config.accept_rollback
        self._store = store
        self._topics = topics
        self._marks = outside.read_marks(self._data_dir)
        self._saved: dict[int, LogMark] = dict(self._marks)
        self._next_ns = 0
        self._is_behind = False
        """A write was under way when there was news."""
        self._answer: Callable[[Request], None] = mailbox.handlers["assignments"]
        mailbox.handlers["assignments"] = self._asked
        mailbox.handlers["log_marks"] = self._hear
        if self._accepts:
            topics.skip_ids(IDS_SKIPPED)

    def do_work(self, now_ns: int, cursors: Mapping[int, CommitCursor]) -> None:
        """Write down from time to time how far the logs are."""
        if now_ns < self._next_ns:
            if self._is_behind:
                self.save()
            return
        self._next_ns = now_ns + SAVE_NS
        for log_id, cursor in cursors.items():
            mark = self._marks.get(log_id)
            if mark is not None and cursor.synced_position > mark.position:
                self._marks[log_id] = mark._replace(position=cursor.synced_position)
        self.save()

    def save(self) -> None:
        """Write the marks down beside the loop, if there is news."""
        if self._marks != self._saved:
            marks = dict(self._marks)
            self._is_behind = not self._outside.write_marks(self._data_dir, marks)
            if not self._is_behind:
                self._saved = marks

    def finish(self, now_ns: int) -> None:
        """Hear the last words of workers, and write them down."""
        self._mailbox.do_work(now_ns)
        self._outside.finish_marks()
        self.save()
        self._outside.finish_marks()

    def _asked(self, request: Request) -> None:
        self._hear(request)
        self._answer(request)

    def _hear(self, request: Request) -> None:
        """{"logs": [[id, epoch, position, losses]], "partition_id_max", "metadata_revision"}"""
        told = request.arguments
        for log_id, epoch, position, losses in told.get("logs", ()):
            self._marks[log_id] = LogMark(log_id, epoch, position, losses)
        self.save()
        with contextlib.suppress(DanubeError):  # what cannot be written now is not given out either
            self._topics.keep_ids_above(told.get("partition_id_max", 0))
            if self._accepts:
                self._store.raise_revision(told.get("metadata_revision", 0))
