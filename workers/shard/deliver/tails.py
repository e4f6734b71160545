"""Recent frames that a worker keeps in memory: of all its partitions together, within one bound."""

from __future__ import annotations

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.config import Settings

__all__ = ["Tails"]

_COMPACT_AT = 1024


class Tails:
    """In which order frames came to the tails of partitions, so that the oldest goes first."""

    def __init__(self, settings: Settings) -> None:
        self.apply(settings)
        self.byte_count = 0
        self._order: list[Partition] = []
        self._head = 0
        self._stale = 0
        """Entries at most whose frames went otherwise."""

    def apply(self, settings: Settings) -> None:
        """Take over the bound of all tails together."""
        self._bytes_max = settings.tail_bytes_max

    def count(self, partition: Partition, stored: Stored) -> None:
        """A frame of a partition's tail may be evicted, in its turn."""
        self.byte_count += stored.frame_bytes
        self._order.append(partition)

    def empty(self, partition: Partition) -> None:
        """Drop a partition's whole tail."""
        self._stale += partition.tail_count
        while partition.tail_count:
            freed = partition.evict()
            if not partition.keeps_memory:
                self.byte_count -= freed
        if self._stale > _COMPACT_AT and 2 * self._stale > len(self._order) - self._head:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Forget entries that stand for no frame: topics that come and go would leave them for ever."""
        left: dict[Partition, int] = {}
        kept = []
        for partition in reversed(self._order[self._head :]):
            count = left.setdefault(partition, partition.tail_count)
            if count:
                left[partition] = count - 1
                kept.append(partition)
        kept.reverse()
        self._order, self._head, self._stale = kept, 0, 0

    def trim(self) -> None:
        """Drop the oldest frames until the rest is within the bound."""
        order = self._order
        while self.byte_count > self._bytes_max and self._head < len(order):
            partition = order[self._head]
            self._head += 1
            if partition.tail_count and not partition.keeps_memory:
                self.byte_count -= partition.evict()
        if self._head > _COMPACT_AT and 2 * self._head > len(order):
            del order[: self._head]
            self._head = 0
