"""Numbers that were never used before, not even before a crash: of partitions and of incarnations."""

from __future__ import annotations

from danube_fast.broker.topics.store import Store
from danube_fast.errors import FailedPrecondition

__all__ = ["Ids"]

ID_BLOCK = 1024
"""Ids reserved by one write; what a stop leaves of a block is skipped."""
PARTITION_ID_MAX = (1 << 32) - 1


class Ids:
    """Ids, taken in blocks from a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next_id = self._reserved_id = 1

    def take(self, count: int) -> list[int]:
        """So many new ones. Raises FailedPrecondition, or what the store raises."""
        if self._next_id + count > self._reserved_id:
            self._reserve(max(count, ID_BLOCK))
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        return ids

    def keep_above(self, used: int) -> None:
        """Never give out an id up to `used`, which was found in a log. Raises what the store raises."""
        entry = self._store.get("/ids/next")
        first = int(entry.value) if entry is not None else 1
        if used >= first:
            self._store.put("/ids/next", str(used + 1).encode())
            self._next_id = self._reserved_id = used + 1

    def skip(self, count: int) -> None:
        """Leave out so many that were given out perhaps. Raises what the store raises."""
        entry = self._store.get("/ids/next")
        self.keep_above((int(entry.value) if entry is not None else 1) + count - 1)

    def _reserve(self, count: int) -> None:
        entry = self._store.get("/ids/next")
        first = int(entry.value) if entry is not None else 1
        if first + count > PARTITION_ID_MAX:
            raise FailedPrecondition("all partition ids were used; take a new data directory")
        revision = entry.revision if entry is not None else 0
        if self._store.cas("/ids/next", str(first + count).encode(), revision) is None:
            raise FailedPrecondition("another process took ids just now; try again")
        self._next_id, self._reserved_id = first, first + count
