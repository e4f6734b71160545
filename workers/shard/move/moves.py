"""Partitions that move between the logs of two workers: whose they are when nobody is sure.

    worker with the old log             coordinator              worker with the new log
        <------ ReadPartition ------------------------------ move_here: copy, publishing goes on
    move_freeze: closed, durable  <----     |
        <------ move_read, move_state -------------------- move_finish: closed, all durable
                                      compare-and-set
    move_away: forget it          <----     |       ---->  assign: open

The metadata decides. A partition that is LEAVING or ARRIVING is closed: a worker that restarts, or
that meets a new coordinator, asks, and keeps or forgets it as it is told. So whichever of the three
dies, and whenever: one log has the partition, with everything in it. After a restart with fewer workers
one worker may have both logs; what the later of them says stands aside (`Catalog.others`) until then.
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
    """Does what the metadata says of partitions of one worker that are being moved."""

    def __init__(self, state: ShardState, ownership: Ownership, arrivals: Arrivals) -> None:
        self._state, self._ownership, self._arrivals = state, ownership, arrivals
        state.pins.add("moves", self.needed_position)

    def needed_position(self, slot: int) -> int | None:
        """What lies behind it in that log is not to be trimmed; None: anything may be."""
        if slot in self._state.catalog.others:
            return 0
        return self._arrivals.needed_position(slot)

    # ------------------------------------------------------------ who decides

    def undecided(self) -> dict[int, list[Partition]]:
        """By id: all that is here of partitions of which the metadata must say where they are."""
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
        """The metadata gives a partition to a log of this worker: keep what that has of it."""
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
        if self._ownership.is_aside(kept[0]):
            self._adopt(kept[0])
        elif self._state.partition(kept[0].partition_id) is kept[0]:
            self._ownership.release(kept[0])

    def decide_elsewhere(self, undecided: list[Partition]) -> None:
        """The metadata gives a partition to a log of another worker, or it was deleted."""
        for partition in undecided:
            if partition.moving or self._ownership.is_aside(partition):
                _log.info("a move of %s was cut short: it is not here", partition.topic)
                self._ownership.drop(partition)

    def assigned(self, partition: Partition, entry: m.Assignment) -> bool:
        """The coordinator hands a partition over that may be closed; False if it stays so."""
        if not partition.moving:
            return True
        arrives = partition.moving is r.Moving.ARRIVING
        if not arrives or entry.owner_epoch < partition.moving_epoch:
            return False
        self._ownership.release(partition)
        return True

    def _adopt(self, partition: Partition) -> None:
        """What stood aside is what counts."""
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
