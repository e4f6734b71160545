"""The metadata's answers to the uploader: its epoch, higher than all before, durably; topics that want no history."""

from __future__ import annotations

from danube_fast.broker import messages as m
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.errors import Unavailable
from danube_fast.metadata.store import MetadataStore
from danube_fast.types import Dispatch, Durability
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["UploaderEpochs"]

EPOCH_KEY = "/history/uploader-epoch"


class UploaderEpochs:
    """Give a new uploader its epoch and the identity of the broker."""

    def __init__(self, mailbox: Mailbox, store: MetadataStore, topics: TopicDirectory) -> None:
        self._store, self._topics = store, topics
        mailbox.serve(m.BeginUploader, self._begin)
        mailbox.serve(m.FindWithoutHistory, self._find_without_history)

    def _begin(self, request: Request[m.BeginUploader]) -> None:
        found = self._store.get(EPOCH_KEY)
        epoch = 1 + (int(found.value) if found is not None else 0)
        revision = found.revision if found is not None else 0
        if self._store.cas(EPOCH_KEY, str(epoch).encode(), revision) is None:
            raise Unavailable("another uploader began just now; try again")
        request.reply(m.Uploader(self._store.identity, epoch))

    def _find_without_history(self, request: Request[m.FindWithoutHistory]) -> None:
        asked = request.message.partition_ids
        request.reply([number for number in asked if not self._keeps_history(number)])

    def _keeps_history(self, partition_id: int) -> bool:
        partition = self._topics.partition(partition_id)
        topic = self._topics.topic(partition.topic) if partition is not None else None
        if topic is None or topic.dispatch != Dispatch.RELIABLE:
            return False
        return topic.durability != Durability.MEMORY and self._topics.policy_of(topic).stays
