"""The object store as the uploader uses it: every request that writes is counted, whichever part of it asks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.staged import StagedParts
from danube_fast.history.stores.store import ObjectInfo, ObjectStore, Part, RetryingStore, Upload
from danube_fast.ring.counters import Counter, CounterBlock

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CountedStore"]


class CountedStore:
    """Pass every call on to a store; an ObjectStore itself.

    Counted are calls, those that fail as well: what the store's own client sends again stands in a counter of its own.
    """

    def __init__(self, store: ObjectStore, counters: CounterBlock) -> None:
        self._store, self._counters = store, counters
        self._lock = threading.Lock()
        self._parts_wait_here = isinstance(store, StagedParts)
        self.url, self.part_bytes_min = store.url, store.part_bytes_min
        if isinstance(store, RetryingStore):
            store.on_retry = lambda: self._count(Counter.HISTORY_REQUEST_RETRIES)

    def _count(self, counter: Counter) -> None:
        with self._lock:  # calls come from several threads
            self._counters.add(counter)

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder of this host."""
        return isinstance(self._store, LocalStore)

    def path_of(self, key: str) -> str:
        """The file of an object, if the store is a folder of this host; else empty."""
        return str(self._store.path_of(key)) if isinstance(self._store, LocalStore) else ""

    def bring_in(self, key: str, start: int, count: int) -> None:
        """Let the kernel read a range of an object into its page cache, if the store is a folder of this host."""
        if isinstance(self._store, LocalStore):
            self._store.bring_in(key, start, count)

    # ------------------------------------------------------------ what writes

    def create(self, key: str, data: Buffer) -> None:
        """Make an object."""
        self._count(Counter.HISTORY_PUTS)
        self._store.create(key, data)

    def begin(self, key: str) -> Upload:
        """Begin an object that is sent in parts."""
        if not self._parts_wait_here:
            self._count(Counter.HISTORY_PUTS)
        return self._store.begin(key)

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Send one part."""
        if self._parts_wait_here:
            return self._store.put_part(upload, number, offset, data)
        self._count(Counter.HISTORY_PUTS)
        part = self._store.put_part(upload, number, offset, data)
        self._count(Counter.HISTORY_PARTS)
        return part

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Make the object of its parts."""
        self._count(Counter.HISTORY_PUTS)
        self._store.complete(upload, parts)

    # ------------------------------------------------------------ what reads and removes

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object."""
        return self._store.head(key)

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range."""
        return self._store.read(key, start, count)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`."""
        return self._store.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        self._store.delete(keys)

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts."""
        self._store.abort(upload)

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads that have not ended."""
        return self._store.uploads(prefix)

    def close(self) -> None:
        """Give connections back."""
        self._store.close()
