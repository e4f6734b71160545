"""The metadata's answers to the uploader: its epoch, higher than all before, durably; topics that want no history."""

from __future__ import annotations

from danube_fast.broker import messages as m
from danube_fast.broker.answers import HistoryStatus
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.errors import Unavailable
from danube_fast.metadata.store import Entry, MetadataStore
from danube_fast.ring.counters import Counter
from danube_fast.types import Dispatch, Durability
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.mailbox import Request

__all__ = ["Uploads"]

EPOCH_KEY = "/history/uploader-epoch"
DELETED_PREFIX = "/history/deleted/"
"""Ids of partitions that were deleted and may have history."""
DELETED_MAX = 5000
"""Of one answer."""
OLDER_COPY_KEY = "/history/older-copy"
"""URL of the store that has history of newer data than these."""


class Uploads:
    """Give a new uploader its epoch and the identity of the broker, and keep what it reports."""

    def __init__(self, booted: Boot, store: MetadataStore, topics: TopicDirectory) -> None:
        self._boot, self._store, self._topics = booted, store, topics
        self._fault = ""
        mailbox = booted.mailbox
        mailbox.serve(m.HistoryReport, self._hear)
        mailbox.serve(m.BeginUploader, self._begin)
        mailbox.serve(m.NoteOlderCopy, self._note_older_copy)
        mailbox.serve(m.ListDeleted, self._list_deleted)
        mailbox.serve(m.ForgetDeleted, self._forget_deleted)
        if booted.settings.store:
            topics.drop_changes = lambda number: [(_deleted_key(number), b"")]
        mailbox.serve(m.FindWithoutHistory, self._find_without_history)

    def status(self) -> HistoryStatus | None:
        """Describe the upload; None without a store."""
        settings, counters = self._boot.settings, self._boot.counters
        if not settings.store:
            return None
        return HistoryStatus(
            store=settings.store, fault=self._fault,
            lag_bytes=counters.total(Counter.HISTORY_LAG_BYTES),
            lag_seconds=counters.total(Counter.HISTORY_LAG_SECONDS),
        )  # fmt: skip

    def _hear(self, request: Request[m.HistoryReport]) -> None:
        self._fault = request.message.fault

    def _begin(self, request: Request[m.BeginUploader]) -> None:
        found = self._store.get(EPOCH_KEY)
        epoch = 1 + _epoch_in(found)
        revision = found.revision if found is not None else 0
        if self._store.cas(EPOCH_KEY, str(epoch).encode(), revision) is None:
            raise Unavailable("another uploader began just now; try again")
        older = self._store.get(OLDER_COPY_KEY)
        is_older_copy = older is not None and older.value.decode() == self._boot.settings.store
        request.reply(m.Uploader(self._store.identity, epoch, is_older_copy))

    def _note_older_copy(self, request: Request[m.NoteOlderCopy]) -> None:
        if request.message.uploader_epoch == _epoch_in(self._store.get(EPOCH_KEY)):
            self._store.put(OLDER_COPY_KEY, request.message.store.encode())
        request.reply(None)

    def _list_deleted(self, request: Request[m.ListDeleted]) -> None:
        keys = [key for key, _ in self._store.list(DELETED_PREFIX)[:DELETED_MAX]]
        request.reply([int(key.removeprefix(DELETED_PREFIX)) for key in keys])

    def _forget_deleted(self, request: Request[m.ForgetDeleted]) -> None:
        for number in request.message.partition_ids:
            self._store.delete(_deleted_key(number))
        request.reply(None)

    def _find_without_history(self, request: Request[m.FindWithoutHistory]) -> None:
        asked, topics = request.message, self._topics
        request.reply(
            [
                number
                for number in asked.partition_ids
                if not self._keeps_history(number)
                and (asked.are_unknown_told or topics.partition(number) is not None)
            ]
        )

    def _keeps_history(self, partition_id: int) -> bool:
        partition = self._topics.partition(partition_id)
        topic = self._topics.topic(partition.topic) if partition is not None else None
        if topic is None or topic.dispatch != Dispatch.RELIABLE:
            return False
        return topic.durability != Durability.MEMORY and self._topics.policy_of(topic).stays


def _epoch_in(found: Entry | None) -> int:
    """Epoch of the newest uploader; 0: there was none yet."""
    return int(found.value) if found is not None else 0


def _deleted_key(partition_id: int) -> str:
    return f"{DELETED_PREFIX}{partition_id:010}"
