"""One object on its way to the store: at once if it is small, else in parts, several at a time."""

from __future__ import annotations

import contextlib

from danube_fast.errors import AlreadyExists, DanubeError, NotFound
from danube_fast.history.objects import OutgoingPart
from danube_fast.history.stores.store import ObjectStore, Part, Upload
from danube_fast.workers.process.tasks import Do, Fork, Join, Running, Task

__all__ = ["Sender"]

IN_FLIGHT_MAX = 4
"""Parts that are sent at the same time."""


class Sender:
    """Send the parts of an object as they come.

    An object's key is used by this uploader alone, so one that exists already is the same object, of a try whose
    answer was lost.
    """

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self._upload: Upload | None = None
        self._running: list[Running] = []
        self._parts: list[Part] = []

    def send(self, part: OutgoingPart) -> Task:
        """Begin to send a part; wait while many are on their way. Raises what the store raises."""
        if self._upload is None:
            self._upload = yield Do(lambda: self._store.begin(self._key))
        if len(self._running) >= IN_FLIGHT_MAX:
            yield from self._join()
        self._running.append((yield Fork(self._put(self._upload, part))))

    def finish(self, parts: list[OutgoingPart]) -> Task:
        """Send the last parts, and make the object. Raises what the store raises."""
        size = parts[-1].offset + len(parts[-1].data)
        if self._upload is None and len(parts) == 1:
            yield Do(lambda: self._create(parts[0]))
            return
        for part in parts:
            yield from self.send(part)
        while self._running:
            yield from self._join()
        yield Do(lambda: self._complete(size))

    def abort(self) -> Task:
        """Drop what was sent."""
        for running in self._running:
            with contextlib.suppress(DanubeError):
                yield Join(running)
        upload = self._upload
        if upload is not None:
            with contextlib.suppress(DanubeError):
                yield Do(lambda: self._store.abort(upload))

    def _join(self) -> Task:
        self._parts.append((yield Join(self._running.pop(0))))

    def _put(self, upload: Upload, part: OutgoingPart) -> Task:
        return (yield Do(lambda: self._store.put_part(upload, part.number, part.offset, part.data)))

    def _create(self, part: OutgoingPart) -> None:
        try:
            self._store.create(self._key, part.data)
        except AlreadyExists:
            if not self._is_there(len(part.data)):
                raise

    def _complete(self, size: int) -> None:
        if self._upload is None:
            return
        try:
            self._store.complete(self._upload, self._parts)
        except (AlreadyExists, NotFound):
            if not self._is_there(size):
                raise

    def _is_there(self, size: int) -> bool:
        info = self._store.head(self._key)
        return info is not None and info.size == size
