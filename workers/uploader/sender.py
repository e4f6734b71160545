"""One object on its way to the store: at once if it is small, else in parts, several at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from danube_fast.errors import AlreadyExists, DanubeError, NotFound
from danube_fast.history.layout import OBJECT_HEADER_BYTES, ObjectHeader, object_key
from danube_fast.history.manifest import Section
from danube_fast.history.objects import OutgoingPart
from danube_fast.history.stores.store import ObjectStore, Part, Upload
from danube_fast.workers.process.tasks import Do, Fork, Join, Running, Task
from danube_fast.workers.uploader.checkpoint import Inside, Progress

__all__ = ["Sender", "complete"]

IN_FLIGHT_MAX = 4
"""Parts that are sent at the same time."""
IN_FLIGHT_BYTES = 96 << 20
"""Fewer are if they have more bytes together, but one always is: so memory is bounded, whatever the settings."""


class Sender:
    """Send the parts of an object as they come.

    An object's key is used by this uploader alone, so one that exists already is the same object, of a try whose
    answer was lost.
    """

    def __init__(
        self, store: ObjectStore, key: str, progress: Progress, upload: Upload | None = None
    ) -> None:
        """`upload`: the one to go on with."""
        self._store, self._key = store, key
        self._progress = progress
        self._upload = upload
        self._running: list[Running] = []

    def send(self, part: OutgoingPart) -> Task:
        """Begin to send a part; wait while many are on their way. Raises what the store raises."""
        if self._upload is None:
            self._upload = yield Do(lambda: self._store.begin(self._key))
            self._progress.begin(self._upload)
        if len(self._running) >= max(1, min(IN_FLIGHT_MAX, IN_FLIGHT_BYTES // len(part.data))):
            yield Join(self._running.pop(0))
        self._running.append((yield Fork(self._put(self._upload, part))))

    def finish(
        self,
        parts: Sequence[OutgoingPart],
        sections: Sequence[Section],
        inside: Sequence[Inside],
    ) -> Task:
        """Send the last parts, and make the object. Raises what the store raises."""
        size = parts[-1].offset + len(parts[-1].data)
        upload = self._upload
        if upload is None and len(parts) == 1:
            yield from self._progress.seal(sections, inside, size)
            yield Do(partial(self._create, parts[0]), is_gentle=True)
            return
        for part in parts:
            yield from self.send(part)
        while self._running:
            yield Join(self._running.pop(0))
        yield from self._progress.seal(sections, inside, size)
        if self._upload is not None:
            parts_sent, header = self._progress.parts, self._progress.header
            yield Do(partial(complete, self._store, self._upload, parts_sent, header, size))

    def settle(self) -> Task:
        """Wait for the parts that are on their way, however they end."""
        for running in self._running:
            with contextlib.suppress(DanubeError):
                yield Join(running)
        self._running.clear()

    def abort(self) -> Task:
        """Drop what was sent."""
        yield from self.settle()
        upload = self._upload
        if upload is not None:
            with contextlib.suppress(DanubeError):
                yield Do(lambda: self._store.abort(upload))
        if self._progress.is_kept:
            yield from self._progress.drop()

    def _put(self, upload: Upload, part: OutgoingPart) -> Task:
        put = partial(self._store.put_part, upload, part.number, part.offset, part.data)
        sent = yield Do(put, is_gentle=True)
        yield from self._progress.note_sent(sent)

    def _create(self, part: OutgoingPart) -> None:
        try:
            self._store.create(self._key, part.data)
        except AlreadyExists:
            if not _is_there(self._store, self._progress.header, len(part.data)):
                raise


def complete(
    store: ObjectStore, upload: Upload, parts: Sequence[Part], header: ObjectHeader, size: int
) -> None:
    """Make the object of its parts, unless it was made by a try whose answer was lost. Runs in a thread. Raises
    what the store raises; NotFound, too, if it was to be created at once, and was not."""
    try:
        if not upload.upload_id:
            raise NotFound(f"{store.url}: {upload.key} was not created")
        store.complete(upload, parts)
    except (AlreadyExists, NotFound):
        if not _is_there(store, header, size):
            raise


def _is_there(store: ObjectStore, header: ObjectHeader, size: int) -> bool:
    """Whether an object is there, and is this one: with a store of several brokers it may be of another."""
    key = object_key(header.epoch, header.number)
    info = store.head(key)
    if info is None or info.size != size:
        return False
    return store.read(key, 0, OBJECT_HEADER_BYTES) == header.encode()
