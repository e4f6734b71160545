"""The coordinator's side of `shard/rollback.py`: records how far the logs are, and keeps new ids above theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from danube_fast.broker.messages import CommitCursor, LogMarks
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.errors import DanubeError
from danube_fast.metadata.store import MetadataStore
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.log_marks import LogMark

__all__ = ["MarkRegistry"]

SAVE_NS = 10_000_000_000
IDS_SKIPPED = 1 << 20
"""Of ids that metadata put back from a copy may not know of."""


class MarkRegistry:
    """Keep the marks, and ids and revisions above all that logs know."""

    def __init__(
        self, booted: Boot, environment: Environment, store: MetadataStore, topics: TopicDirectory
    ) -> None:
        self._mailbox, self._environment = booted.mailbox, environment
        self._store, self._topics = store, topics
        self._data_dir = Path(booted.config.data_dir)
        self._accepts = booted.config.accept_rollback
        self._marks = environment.read_marks(self._data_dir)
        self._saved: dict[int, LogMark] = dict(self._marks)
        self._next_ns = 0
        self._is_behind = False
        """Marks changed while a write was under way."""
        booted.mailbox.serve(LogMarks, lambda request: self.hear(request.message))
        if self._accepts:
            topics.skip_ids(IDS_SKIPPED)

    def do_work(self, now_ns: int, cursors: Mapping[int, CommitCursor]) -> None:
        """Record from time to time how far the logs are."""
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
        """Record the marks beside the loop, if they have changed."""
        if self._marks != self._saved:
            marks = dict(self._marks)
            self._is_behind = not self._environment.write_marks(self._data_dir, marks)
            if not self._is_behind:
                self._saved = marks

    def finish(self, now_ns: int) -> None:
        """Record the final reports of workers."""
        self._mailbox.do_work(now_ns)
        self._environment.finish_marks()
        self.save()
        self._environment.finish_marks()

    def hear(self, told: LogMarks) -> None:
        """Note how far a worker's logs are, and keep ids and revisions above those that they know."""
        for log_id, epoch, position, losses in told.logs:
            self._marks[log_id] = LogMark(log_id, epoch, position, losses)
        self.save()
        with contextlib.suppress(
            DanubeError
        ):  # ids that cannot be recorded now are not given out either
            self._topics.keep_ids_above(told.partition_id_max)
            if self._accepts:
                self._store.raise_revision(told.metadata_revision)
