"""Partitions that move between the logs of two workers: whose they are when nobody is sure.

    worker with the old log             coordinator              worker with the new log
        <------ move_read -------------------------------- move_here: copy, publishing goes on
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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import SESSION_ARRIVED, PartitionWord, ProducerWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Stored
from danube_fast.errors import Internal, NotOwner
from danube_fast.workers.shard.move.arrival import Arrivals
from danube_fast.workers.shard.move.departure import Departures

if TYPE_CHECKING:
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["Moves"]

_log = logging.getLogger(__name__)

RESUME_NS = 10_000_000_000
"""Consumers of a non_reliable topic that come back so soon go on where they were."""


class Moves:
    """Both sides of a move, for one worker."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self.departures = Departures(worker, self)
        self.arrivals = Arrivals(worker, self)
        worker.state.pins.add("moves", self.needed_position)

    def slot_of(self, log_id: int) -> int:
        """Slot of one of this worker's logs. Raises NotOwner."""
        for slot, log in enumerate(self._worker.state.logs):
            if log.log_id == log_id:
                return slot
        raise NotOwner(f"log {log_id} is not one of this worker")

    def needed_position(self, slot: int) -> int | None:
        """What lies behind it in that log is not to be trimmed; None: anything may be."""
        if slot in self._worker.state.catalog.others:
            return 0
        return self.arrivals.needed_position(slot)

    # ------------------------------------------------------------ who decides

    def undecided(self) -> dict[int, list[Partition]]:
        """By id: all that is here of partitions of which the metadata must say where they are."""
        catalog = self._worker.state.catalog
        moving = [partition for partition in catalog.by_id.values() if partition.moving]
        found = {partition.partition_id: [partition] for partition in moving}
        for other in catalog.others.values():
            for partition in other.by_id.values():
                claims = found.setdefault(partition.partition_id, [])
                if not claims and partition.partition_id in catalog.by_id:
                    claims.append(catalog.by_id[partition.partition_id])
                claims.append(partition)
        return found

    def decide(self, undecided: list[Partition], entry: dict[str, Any]) -> None:
        """The metadata gives a partition to a log of this worker: keep what that has of it."""
        slot = self.slot_of(entry["log_id"])
        kept = [partition for partition in undecided if partition.log_slot == slot]
        if not kept:
            _log.error(
                "partition %d is to be in log %d, which has nothing of it; it stays closed: restore the "
                "metadata that belongs to this data directory",
                entry["partition_id"],
                entry["log_id"],
            )
            return
        for partition in undecided:
            if partition.log_slot != slot:
                self.drop(partition)
        _log.info("a move of %s was cut short: it is in log %d", kept[0].topic, entry["log_id"])
        if self._is_aside(kept[0]):
            self._adopt(kept[0])
        elif self._worker.state.partition(kept[0].partition_id) is kept[0]:
            self.release(kept[0])

    def decide_elsewhere(self, undecided: list[Partition]) -> None:
        """The metadata gives a partition to a log of another worker, or it was deleted."""
        for partition in undecided:
            if partition.moving or self._is_aside(partition):
                _log.info("a move of %s was cut short: it is not here", partition.topic)
                self.drop(partition)

    def assigned(self, partition: Partition, entry: dict[str, Any]) -> bool:
        """The coordinator hands a partition over that may be closed; False if it stays so."""
        if not partition.moving:
            return True
        arrives = partition.moving is r.Moving.ARRIVING
        if not arrives or entry.get("owner_epoch", 0) < partition.moving_epoch:
            return False
        self.release(partition)
        return True

    def _is_aside(self, partition: Partition) -> bool:
        other = self._worker.state.catalog.others.get(partition.log_slot)
        return other is not None and other.by_id.get(partition.partition_id) is partition

    # ------------------------------------------------------------ steps

    def send_consumers_away(self, partition: Partition) -> None:
        """They look the topic up again and subscribe where it is then."""
        for sub in partition.all_subscriptions():
            for consumer in list(sub.consumers):
                self._send_away(partition, consumer)

    def dismiss_consumers(self, partition: Partition) -> list[Consumer]:
        """Send those away that ack. Acks of some are on their way, or will be when they hear of it:
        those that hold something, which stay attached for as long as the caller waits."""
        subs = [sub for sub in partition.subscriptions.values() if sub.tracks]
        consumers = [consumer for sub in subs for consumer in sub.consumers]
        holding = [consumer for consumer in consumers if consumer.unacked]
        for consumer in consumers if holding else ():
            self._send_away(partition, consumer, stays=consumer in holding)
        return holding

    def _send_away(self, partition: Partition, consumer: Consumer, *, stays: bool = False) -> None:
        worker = self._worker
        session = worker.state.sessions.by_number(consumer.session)
        if session is None:
            return
        text = f"{partition.topic} is being moved to another worker; look it up again"
        worker.delivery.tell_closed(session, consumer, {"code": NotOwner.code, "text": text})
        if stays:
            consumer.subscription.dismiss(consumer)
        else:
            worker.detach(session, consumer)

    def release(self, partition: Partition) -> None:
        """It is this log's: open it. What was accepted stays so, whether the record gets durable or not."""
        worker = self._worker
        if not partition.moving:
            return
        self.departures.forget(partition.partition_id)
        arrived = partition.moving is r.Moving.ARRIVING
        worker.state.catalog.unhold(partition)
        worker.limits.apply(partition)
        record = r.PartitionMoving(partition.partition_id, r.Moving.NO, partition.moving_epoch)
        worker.state.journals[partition.log_slot].record(record)
        worker.intake.reserve_offsets(partition, urgent=True)
        if arrived:
            partition.resumes_until_ns = worker.state.now_ns + RESUME_NS
            worker.upkeep.foresight.look_at(partition)
            _log.info("%s arrived", partition.topic)
        worker.state.mark_ready(partition)

    def drop(self, partition: Partition) -> None:
        """Another log has it: forget all of it here."""
        worker, partition_id = self._worker, partition.partition_id
        if self._is_aside(partition):
            worker.state.catalog.others[partition.log_slot].remove(partition_id, moved=True)
            self._tidy(partition.log_slot)
        elif worker.state.partition(partition_id) is partition:
            self.departures.forget(partition_id)
            self.send_consumers_away(partition)
            worker.state.catalog.remove(partition_id, moved=True)
            worker.forget_partition(partition)
        else:
            return
        worker.state.journals[partition.log_slot].record(
            r.PartitionRemoved(partition_id, moved=True)
        )
        worker.state.logs[partition.log_slot].drop_partition(partition_id)

    def enter(
        self, records: Sequence[r.Record], slot: int, frames: Sequence[Stored] = ()
    ) -> Partition:
        """Make a partition out of its records; `frames` are those that are kept in memory."""
        worker, catalog = self._worker, self._worker.state.catalog
        for record in records:
            catalog.apply(record, slot)
        partition = catalog.by_id[records[0].partition_id]  # type: ignore[union-attr]
        row = worker.state.tables.partitions[partition.slot]
        for stored in frames:
            if stored.end_offset <= partition.first_offset:
                continue  # acked by everybody meanwhile
            partition.append(stored)
            if not partition.keeps_memory:
                worker.tails.count(partition, stored)
        partition.visible = int(row[PartitionWord.NEXT_OFFSET])
        if partition.logged:
            run = worker.state.logs[slot].find(partition.partition_id, partition.first_offset)
            partition.first_offset = run.base_offset if run is not None else partition.visible
        worker.limits.apply(partition)
        # who publishes here without having noticed the move opens again, and is not taken for a ghost
        producers = worker.state.tables.producers
        mine = producers[:, ProducerWord.PARTITION_ID] == partition.partition_id
        producers[mine, ProducerWord.SESSION] = SESSION_ARRIVED
        return partition

    def _adopt(self, partition: Partition) -> None:
        """What stood aside is what counts."""
        catalog, slot = self._worker.state.catalog, partition.log_slot
        other = catalog.others[slot]
        moving = r.PartitionMoving(
            partition.partition_id, r.Moving.ARRIVING, partition.moving_epoch, partition.assigned
        )
        records = [moving, *other.export(partition)]
        if partition.partition_id in catalog.by_id:
            raise Internal(f"{partition.topic} is in two logs, and both have it; report this")
        other.remove(partition.partition_id)
        self._tidy(slot)
        self.release(self.enter(records, slot))

    def _tidy(self, slot: int) -> None:
        if not self._worker.state.catalog.others[slot].by_id:
            del self._worker.state.catalog.others[slot]
