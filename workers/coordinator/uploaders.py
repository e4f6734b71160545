"""The epochs of uploaders: each one that begins has a higher one than all before, durably."""

from __future__ import annotations

from danube_fast.broker import messages as m
from danube_fast.errors import Unavailable
from danube_fast.metadata.store import MetadataStore
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["UploaderEpochs"]

EPOCH_KEY = "/history/uploader-epoch"


class UploaderEpochs:
    """Give a new uploader its epoch and the identity of the broker."""

    def __init__(self, mailbox: Mailbox, store: MetadataStore) -> None:
        self._store = store
        mailbox.serve(m.BeginUploader, self._begin)

    def _begin(self, request: Request[m.BeginUploader]) -> None:
        found = self._store.get(EPOCH_KEY)
        epoch = 1 + (int(found.value) if found is not None else 0)
        revision = found.revision if found is not None else 0
        if self._store.cas(EPOCH_KEY, str(epoch).encode(), revision) is None:
            raise Unavailable("another uploader began just now; try again")
        request.reply(m.Uploader(self._store.identity, epoch))
