"""Partitions that move between the logs of two workers: which log has them when a move was cut short.

    worker with the old log             coordinator              worker with the new log
        <------ ReadPartition ------------------------------ CopyPartition: publishing goes on
    FreezePartition: closed, durable <--    |
        <------ ReadPartition, ReadState ------------------- FinishMove: closed, all durable
                                      compare-and-set
    PartitionMoved: forget it     <----     |       ---->  Assign: open

The metadata decides. A partition that is LEAVING or ARRIVING is closed: a worker that restarts, or
that meets a new coordinator, asks, and keeps or forgets it as it is told. So whichever of the three
dies, and whenever: one log has the partition, with all of its messages. After a restart with fewer workers
one worker may have both logs; the partitions of the later one wait in `Catalog.others` until then.
"""

from __future__ import annotations

import logging

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.partition import Partition
from danube_fast.errors import Internal
from danube_fast.workers.shard.move.arrival import Arrivals
from danube_fast.workers.shard.move.ownership import Ownership
from danube_fast.workers.shard.state import ShardState

__all__ = ["Moves"]

_log = logging.getLogger(__name__)


class Moves:
    """Keep or drop the partitions of one worker whose move was cut short, as the metadata says."""

    def __init__(self, state: ShardState, ownership: Ownership, arrivals: Arrivals) -> None:
        self._state, self._ownership, self._arrivals = state, ownership, arrivals
        state.pins.add("moves", self.needed_position)

    def needed_position(self, slot: int) -> int | None:
        """Find the position from which on that log must not be trimmed; None if moves need nothing of it."""
        if slot in self._state.catalog.others:
            return 0
        return self._arrivals.needed_position(slot)

    # ------------------------------------------------------------ decisions

    def undecided(self) -> dict[int, list[Partition]]:
        """List, by id, the partitions here whose owner the metadata must decide."""
        catalog = self._state.catalog
        moving = [partition for partition in catalog.by_id.values() if partition.moving]
        found = {partition.partition_id: [partition] for partition in moving}
        for other in catalog.others.values():
            for partition in other.by_id.values():
                claims = found.setdefault(partition.partition_id, [])
                if not claims and partition.partition_id in catalog.by_id:
                    claims.append(catalog.by_id[partition.partition_id])
                claims.append(partition)
        return found

    def decide(self, undecided: list[Partition], entry: m.Assignment) -> None:
        """Keep a partition that the metadata gives to a log of this worker."""
        slot = self._ownership.slot_of(entry.log_id)
        kept = [partition for partition in undecided if partition.log_slot == slot]
        if not kept:
            _log.error(
                "partition %d is to be in log %d, which has nothing of it; it stays closed: restore the "
                "metadata that belongs to this data directory",
                entry.partition_id,
                entry.log_id,
            )
            return
        for partition in undecided:
            if partition.log_slot != slot:
                self._ownership.drop(partition)
        _log.info("a move of %s was cut short: it is in log %d", kept[0].topic, entry.log_id)
        if self._ownership.is_second_copy(kept[0]):
            self._adopt(kept[0])
        elif self._state.partition(kept[0].partition_id) is kept[0]:
            self._ownership.release(kept[0])

    def decide_elsewhere(self, undecided: list[Partition]) -> None:
        """Drop a partition that the metadata gives to a log of another worker, or that was deleted."""
        for partition in undecided:
            if partition.moving or self._ownership.is_second_copy(partition):
                _log.info("a move of %s was cut short: it is not here", partition.topic)
                self._ownership.drop(partition)

    def assigned(self, partition: Partition, entry: m.Assignment) -> bool:
        """Open a partition that the coordinator assigns; False if it stays closed."""
        if not partition.moving:
            return True
        arrives = partition.moving is r.Moving.ARRIVING
        if not arrives or entry.owner_epoch < partition.moving_epoch:
            return False
        self._ownership.release(partition)
        return True

    def _adopt(self, partition: Partition) -> None:
        """Enter a partition of `Catalog.others`: that copy counts."""
        catalog, slot = self._state.catalog, partition.log_slot
        other = catalog.others[slot]
        moving = r.PartitionMoving(
            partition.partition_id, r.Moving.ARRIVING, partition.moving_epoch, partition.assigned
        )
        records = [moving, *other.export(partition)]
        if partition.partition_id in catalog.by_id:
            raise Internal(f"{partition.topic} is in two logs, and both have it; report this")
        other.remove(partition.partition_id)
        self._ownership.tidy(slot)
        self._ownership.release(self._ownership.enter(records, slot))
