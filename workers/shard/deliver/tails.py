"""Recent frames that a worker keeps in memory: of all its partitions together, within one limit."""

from __future__ import annotations

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.config import Settings

__all__ = ["Tails"]

_COMPACT_AT = 1024


class Tails:
    """Remember the order of frames in the tails of partitions, to evict the oldest first."""

    def __init__(self, settings: Settings) -> None:
        self.apply(settings)
        self.byte_count = 0
        self._order: list[Partition] = []
        self._head = 0
        self._stale = 0
        """Upper bound of the entries whose frames are gone already."""

    def apply(self, settings: Settings) -> None:
        """Take over the bound of all tails together."""
        self._bytes_max = settings.tail_bytes_max

    def count(self, partition: Partition, stored: Stored) -> None:
        """Enter a frame of a partition's tail, which may be evicted in its turn."""
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
        """Drop entries without a frame: topics that come and go would leave them for ever."""
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
        """Drop the oldest frames until the rest is within the limit."""
        order = self._order
        while self.byte_count > self._bytes_max and self._head < len(order):
            partition = order[self._head]
            self._head += 1
            if partition.tail_count and not partition.keeps_memory:
                self.byte_count -= partition.evict()
        if self._head > _COMPACT_AT and 2 * self._head > len(order):
            del order[: self._head]
            self._head = 0
