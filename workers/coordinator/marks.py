"""The metadata's side of `shard/rollback.py`: it notes how far the logs are, and goes on above what they know."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from danube_fast.broker.messages import CommitCursor, LogMarks
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.errors import DanubeError
from danube_fast.metadata.store import MetadataStore
from danube_fast.workers.process.boot import BootConfig
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.log_marks import LogMark
from danube_fast.workers.process.mailbox import Mailbox

__all__ = ["MarkRegistry"]

SAVE_NS = 10_000_000_000
IDS_SKIPPED = 1 << 20
"""Of ids that metadata put back from a copy may not know of."""


class MarkRegistry:
    """Keeps the marks, and ids and revisions above all that logs know."""

    def __init__(
        self,
        mailbox: Mailbox,
        config: BootConfig,
        environment: Environment,
        store: MetadataStore,
        topics: TopicDirectory,
    ) -> None:
        self._environment = environment
        self._mailbox = mailbox
        self._data_dir = Path(config.data_dir)
        self._accepts = config.accept_rollback
        self._store = store
        self._topics = topics
        self._marks = environment.read_marks(self._data_dir)
        self._saved: dict[int, LogMark] = dict(self._marks)
        self._next_ns = 0
        self._is_behind = False
        """A write was under way when there was news."""
        mailbox.serve(LogMarks, lambda request: self.hear(request.message))
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
            self._is_behind = not self._environment.write_marks(self._data_dir, marks)
            if not self._is_behind:
                self._saved = marks

    def finish(self, now_ns: int) -> None:
        """Hear the last words of workers, and write them down."""
        self._mailbox.do_work(now_ns)
        self._environment.finish_marks()
        self.save()
        self._environment.finish_marks()

    def hear(self, told: LogMarks) -> None:
        """Note how far a worker's logs are, and keep ids and revisions above what they know."""
        for log_id, epoch, position, losses in told.logs:
            self._marks[log_id] = LogMark(log_id, epoch, position, losses)
        self.save()
        with contextlib.suppress(DanubeError):  # what cannot be written now is not given out either
            self._topics.keep_ids_above(told.partition_id_max)
            if self._accepts:
                self._store.raise_revision(told.metadata_revision)
