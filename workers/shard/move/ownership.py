"""Steps of a move: consumers are sent away, the partition is opened, dropped, entered."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import SESSION_ARRIVED, PartitionWord, ProducerWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Stored
from danube_fast.errors import NotOwner
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.deliver.lookahead import Lookahead
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.state import ShardState

__all__ = ["Ownership"]

_log = logging.getLogger(__name__)

RESUME_NS = 10_000_000_000
"""How soon consumers of a non_reliable topic must come back to go on where they were."""


class Ownership:
    """Take the steps of moves that both sides need, for one worker."""

    def __init__(
        self, state: ShardState, delivery: Delivery, consumers: Consumers, intake: Intake,
        tails: Tails, lookahead: Lookahead,
    ) -> None:  # fmt: skip
        self._state, self._delivery, self._consumers = state, delivery, consumers
        self._intake, self._tails, self._lookahead = intake, tails, lookahead
        self.exports: dict[int, bytes] = {}
        """State of partitions that leave, by id, until it is known where they are."""

    def slot_of(self, log_id: int) -> int:
        """Find the slot of one of this worker's logs. Raises NotOwner."""
        for slot, log in self._state.logs.items():
            if log.log_id == log_id:
                return slot
        raise NotOwner(f"log {log_id} is not one of this worker")

    def is_second_copy(self, partition: Partition) -> bool:
        """Whether a log of this worker has it beside another that has it too."""
        other = self._state.catalog.others.get(partition.log_slot)
        return other is not None and other.by_id.get(partition.partition_id) is partition

    def send_consumers_away(self, partition: Partition) -> None:
        """Close all consumers: their clients look the topic up and subscribe again."""
        for sub in partition.all_subscriptions():
            for consumer in list(sub.consumers):
                self._send_away(partition, consumer)

    def dismiss_consumers(self, partition: Partition) -> list[Consumer]:
        """Send consumers that ack away. Those with unacked messages stay attached for as long as the caller
        waits, as their acks may be on the way: they are returned."""
        subs = [sub for sub in partition.subscriptions.values() if sub.tracks]
        consumers = [consumer for sub in subs for consumer in sub.consumers]
        holding = [consumer for consumer in consumers if consumer.unacked]
        for consumer in consumers if holding else ():
            self._send_away(partition, consumer, stays=consumer in holding)
        return holding

    def _send_away(self, partition: Partition, consumer: Consumer, *, stays: bool = False) -> None:
        session = self._state.sessions.by_number(consumer.session)
        if session is None:
            return
        text = f"{partition.topic} is being moved to another worker; look it up again"
        self._delivery.tell_closed(session, consumer, {"code": NotOwner.code, "text": text})
        if stays:
            consumer.subscription.dismiss(consumer)
        else:
            self._consumers.detach(session, consumer)

    def release(self, partition: Partition) -> None:
        """Open a partition: it is this log's. Messages stay accepted, whether the record gets durable or not."""
        if not partition.moving:
            return
        self.exports.pop(partition.partition_id, None)
        arrived = partition.moving is r.Moving.ARRIVING
        self._state.catalog.end_move(partition)
        self._state.apply_policy(partition)
        record = r.PartitionMoving(partition.partition_id, r.Moving.NO, partition.moving_epoch)
        self._state.record(partition, record)
        self._intake.reserve_offsets(partition, urgent=True)
        if arrived:
            partition.resume_until(self._state.now_ns + RESUME_NS)
            self._lookahead.look_at(partition)
            _log.info("%s arrived", partition.topic)
        self._state.mark_ready(partition)

    def drop(self, partition: Partition) -> None:
        """Forget a partition: another log has it."""
        partition_id = partition.partition_id
        if self.is_second_copy(partition):
            self._state.catalog.others[partition.log_slot].remove(partition_id, moved=True)
            self.tidy(partition.log_slot)
        elif self._state.partition(partition_id) is partition:
            self.forget(partition)
        else:
            return
        self._state.record_removal(partition, moved=True)

    def forget(self, partition: Partition) -> None:
        """Serve a partition no more: another worker has it, or is about to."""
        self.exports.pop(partition.partition_id, None)
        self.send_consumers_away(partition)
        self._state.catalog.remove(partition.partition_id, moved=True)
        self._state.forget(partition)

    def enter(
        self, records: Sequence[r.Record], slot: int, frames: Sequence[Stored] = ()
    ) -> Partition:
        """Make a partition out of its records; `frames` are those that are kept in memory."""
        catalog = self._state.catalog
        for record in records:
            catalog.apply(record, slot)
        partition = catalog.by_id[records[0].partition_id]  # type: ignore[union-attr]
        row = self._state.tables.partitions[partition.slot]
        for stored in frames:
            if stored.end_offset <= partition.first_offset:
                continue  # acked by all meanwhile
            partition.append(stored)
            if not partition.keeps_memory:
                self._tails.count(partition, stored)
        partition.show_until(int(row[PartitionWord.NEXT_OFFSET]))
        if partition.logged and not partition.is_in_history(partition.first_offset):
            run = self._state.logs[slot].find(partition.partition_id, partition.first_offset)
            partition.begin_at(run.base_offset if run is not None else partition.visible)
        self._state.apply_policy(partition)
        # a producer that has not noticed the move opens again, and is not fenced
        producers = self._state.tables.producers
        mine = producers[:, ProducerWord.PARTITION_ID] == partition.partition_id
        producers[mine, ProducerWord.SESSION] = SESSION_ARRIVED
        return partition

    def tidy(self, slot: int) -> None:
        """Drop the other catalog of a log once it is empty."""
        if not self._state.catalog.others[slot].by_id:
            del self._state.catalog.others[slot]
