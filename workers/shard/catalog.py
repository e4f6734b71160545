"""The partitions of one worker: made, removed, restored from a log, written into a snapshot.

State comes from two places that must agree: records of the reserved partition (assignments,
producers, cursors, reservations) and the data frames themselves (offsets, sequences). Replaying both
from the newest snapshot on gives the state at the end of the log; the same records make a snapshot.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np

from danube_fast.broker import records as r
from danube_fast.broker.admission.gate import Cause, Gate
from danube_fast.broker.admission.layout import INT64_MAX, Mode, PartitionWord, ProducerWord
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import SubscriptionKind
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.broker.subscription.timers import Timers
from danube_fast.clock import SECOND_NS
from danube_fast.frame.layout import CONTROL_PARTITION_ID, Flag
from danube_fast.frame.view import FrameView
from danube_fast.types import Durability

__all__ = ["Catalog"]

_log = logging.getLogger(__name__)

ACKED_PER_RECORD_MAX = 1 << 16
ATTEMPTS_PER_RECORD_MAX = 1 << 14
"""Numbers in one record of acked ranges; even."""


LOST_OFFSETS = 1 << 32
LOST_OFFSETS_PER_SECOND = 20_000
"""Offsets that a partition may have given out, at most, and that an older copy of its log does not have; a
subscription passes so many in some milliseconds."""


SubscriptionRecord = (
    r.SubscriptionCreated | r.SubscriptionDeleted | r.Cursor | r.Acked | r.PolicySet | r.PendingGapsSet | r.Attempts
)  # fmt: skip


def _raise_word(row: Any, word: int, value: int) -> None:
    row[word] = max(int(row[word]), value)


class Catalog:
    """Make, restore and describe the partitions of one worker, by id and by slot."""

    def __init__(self, tables: AdmissionTables) -> None:
        self.tables = tables
        self.gate = Gate(tables)
        self.by_id: dict[int, Partition] = {}
        self.by_slot: dict[int, Partition] = {}
        self.owners: dict[str, str] = {}
        """Principals that made reply topics, by topic."""
        self.timers: Timers[Subscription] = Timers()
        """Times at which subscriptions have work to do."""
        self.others: dict[int, Catalog] = {}
        """By slot: partitions of a log that a log before it has as well, because a move between them was cut
        short. See `moves.py`."""
        self._last_epoch: dict[int, r.EpochStarted] = {}
        self.metadata_revision = 0
        """The highest revision of the metadata under which these logs were written."""

    # ------------------------------------------------------------ assignments

    def assign(self, assigned: r.PartitionAssigned, log_slot: int) -> Partition:
        """Make a partition, or give an existing one new settings."""
        partition = self.by_id.get(assigned.partition_id)
        if partition is None:
            slot = self.tables.add_partition(assigned.partition_id, log_slot, Mode.CLOSED)
            partition = Partition(assigned, log_slot, slot, self.timers)
            self.tables.partitions[slot, PartitionWord.NEXT_OFFSET] = assigned.first_offset
            self.by_id[assigned.partition_id] = partition
            self.by_slot[slot] = partition
        partition.assign(assigned)
        if assigned.owner:
            self.owners[assigned.topic] = assigned.owner
        self.gate.update(partition)
        row = self.tables.partitions[partition.slot]
        if not partition.strict and row[PartitionWord.RESERVED_UNTIL] == INT64_MAX:
            row[PartitionWord.RESERVED_UNTIL] = row[PartitionWord.NEXT_OFFSET]
            partition.restore_reserved(int(row[PartitionWord.NEXT_OFFSET]))
        return partition

    def remove(self, partition_id: int, *, moved: bool = False) -> Partition | None:
        """Forget a partition; publishes to it are refused as TopicDeleted from here on, or, if it
        `moved`, as those of a partition that is elsewhere."""
        partition = self.by_id.pop(partition_id, None)
        if partition is None:
            return None
        self.by_slot.pop(partition.slot, None)
        self.owners.pop(partition.topic, None)
        self.gate.close(partition, Cause.DELETED, f"{partition.topic} was deleted")
        if moved:
            self.tables.unlist_partition(partition_id)
        self.tables.remove_producers_of(partition_id)
        partition.forget_clients()
        return partition

    def begin_move(self, partition: Partition, moving: r.Moving, owner_epoch: int) -> None:
        """Close a partition: the metadata decides whether this log has it."""
        partition.begin_move(moving, owner_epoch)
        text = f"{partition.topic} is being moved to another worker; send again"
        self.gate.close(partition, Cause.MOVE, text)

    def end_move(self, partition: Partition) -> None:
        """Take publishes again, now that this log has the partition."""
        partition.end_move()
        self.gate.open(partition, Cause.MOVE)
        self.assign(partition.assigned, partition.log_slot)

    # ------------------------------------------------------------ restoring

    def _home(self, partition_id: int, log_slot: int) -> Catalog:
        """Find the catalog for a partition of that log: one of the others, if another log has it too."""
        known = self.by_id.get(partition_id)
        if known is None or known.log_slot == log_slot:
            return self
        if log_slot not in self.others:
            self.others[log_slot] = Catalog(AdmissionTables())
        return self.others[log_slot]

    def apply(self, record: r.Record, log_slot: int) -> None:
        """Apply one record of a log or of its snapshot."""
        if isinstance(record, r.EpochStarted):
            self._last_epoch[log_slot] = record
            self.metadata_revision = max(self.metadata_revision, record.metadata_revision)
            return
        home = self._home(record.partition_id, log_slot)
        if home is not self:
            home.apply(record, log_slot)
            return
        if isinstance(record, r.PartitionAssigned):
            self.assign(record, log_slot)
            return
        if isinstance(record, r.PartitionMoving):
            self._apply_moving(record, log_slot)
            return
        partition = self.by_id.get(record.partition_id)
        if partition is None:
            return
        row = self.tables.partitions[partition.slot]
        if isinstance(record, r.PartitionRemoved):
            self.remove(record.partition_id, moved=record.moved)
        elif isinstance(record, r.Reserved):
            row[PartitionWord.RESERVED_UNTIL] = record.until
            partition.restore_reserved(record.until)
        elif isinstance(record, r.PartitionState):
            # After a failed sync such a record stands behind frames that it does not know of.
            _raise_word(row, PartitionWord.NEXT_OFFSET, record.next_offset)
            _raise_word(row, PartitionWord.APPEND_TIME_NS, record.append_time_ns)
            row[PartitionWord.RESERVED_UNTIL] = record.reserved_until
            partition.restore_reserved(record.reserved_until)
            partition.begin_at(record.first_offset)
            if partition.moving:  # its frames stand in this log before anything is said of it
                partition.note_replayed(record.next_offset)
        elif isinstance(record, r.Compacted):
            partition.note_compacted(record)
        elif isinstance(record, r.Uploaded):
            partition.note_uploaded(record)
        elif isinstance(record, r.Purged):
            partition.purge(record.until, restoring=True)
        elif isinstance(record, r.ProducerOpened):
            slot = self.open_producer(partition, record.producer_id, record.name, record.epoch)
            # the record names no time; without any it would expire at once if it never published
            begun = self._last_epoch.get(log_slot)
            used = self.tables.producers[slot, ProducerWord.LAST_USED_NS]
            if begun is not None and used < begun.wall_ns:
                self.tables.producers[slot, ProducerWord.LAST_USED_NS] = begun.wall_ns
        elif isinstance(record, r.ProducerState):
            slot = self.tables.find_producer(record.partition_id, record.producer_id)
            if slot >= 0:
                self.tables.restore_window(slot, record.window, record.next_sequence)
                self.tables.producers[slot, ProducerWord.LAST_USED_NS] = record.last_used_ns
        elif isinstance(record, r.ProducerExpired):
            slot = self.tables.find_producer(record.partition_id, record.producer_id)
            if slot >= 0:
                self.tables.remove_producers([slot])
                partition.producer_names.pop(record.producer_id, None)
        else:
            self._apply_subscription(partition, record)

    def _apply_moving(self, record: r.PartitionMoving, log_slot: int) -> None:
        if record.assigned is not None:
            self.assign(record.assigned, log_slot)
        partition = self.by_id.get(record.partition_id)
        if partition is None:
            return
        if record.moving:
            self.begin_move(partition, record.moving, record.owner_epoch)
        else:
            self.end_move(partition)

    @staticmethod
    def _apply_subscription(partition: Partition, record: SubscriptionRecord) -> None:
        if isinstance(record, r.SubscriptionCreated):
            # a snapshot may know of a subscription whose earlier records stand behind it
            partition.forget_subscription(record.name)
            sub, _ = partition.subscribe(record.name, SubscriptionKind(record.type), 0)
            sub.restore(record.cursor, [])
        elif isinstance(record, r.SubscriptionDeleted):
            partition.forget_subscription(record.name)
        else:
            existing = partition.subscriptions.get(record.name)
            if existing is None:
                return
            if isinstance(record, r.PolicySet):
                existing.set_policy(record.policy, record.setter)
            elif isinstance(record, r.PendingGapsSet):
                existing.pending_gaps.restore(record)
            elif isinstance(record, r.Attempts):
                existing.restore_attempts(record.runs)
            elif isinstance(record, r.Cursor):
                existing.restore(record.cursor, record.acked)
            else:
                existing.restore_acked(record.ranges)

    def apply_block(self, block: Any, log_slot: int) -> None:
        """Apply rows of `Log.replay`: data frames move offsets and sequences, control frames are records."""
        for row in block.rows.tolist():
            fields = dict(zip(block.rows.dtype.names, row, strict=True))
            if fields["partition_id"] == CONTROL_PARTITION_ID:
                if fields["flags"] & Flag.PAD:
                    continue
                view = FrameView(block.view, fields["position"] - block.base_position)
                for payload in view.payloads():
                    self.apply(r.decode_record(payload or b""), log_slot)
                continue
            self._apply_frame(fields, log_slot)

    def _apply_frame(self, fields: dict[str, int], log_slot: int) -> None:
        partition = self.by_id.get(fields["partition_id"])
        if partition is None:
            return
        if partition.log_slot != log_slot:
            if log_slot in self.others:
                self.others[log_slot]._apply_frame(fields, log_slot)
            return
        row = self.tables.partitions[partition.slot]
        # A frame of a memory topic that was written to the log later may come behind its successors.
        end = fields["base_offset"] + fields["offset_span"]
        _raise_word(row, PartitionWord.NEXT_OFFSET, end)
        _raise_word(row, PartitionWord.APPEND_TIME_NS, fields["append_time_ns"])
        if not partition.replay(fields["base_offset"], end):
            return
        slot = self.tables.find_producer(fields["partition_id"], fields["producer_id"])
        if slot < 0:
            return
        self.tables.remember(
            slot, fields["base_sequence"], fields["message_count"], fields["base_offset"]
        )
        self.tables.producers[slot, ProducerWord.LAST_USED_NS] = fields["append_time_ns"]

    def apply_snapshot(self, records: list[r.Record], log_slot: int) -> None:
        """Apply a log's snapshot. Frames behind it with offsets that it knows were written again."""
        for record in records:
            self.apply(record, log_slot)
        for catalog in (self, *self.others.values()):
            for partition in catalog.of_log(log_slot):
                row = catalog.tables.partitions[partition.slot]
                partition.note_replayed(int(row[PartitionWord.NEXT_OFFSET]))

    def epoch_started(
        self, epoch: int, wall_ns: int, boot_id: str, *, clean: bool = False
    ) -> r.EpochStarted:
        """Make the record of an epoch."""
        return r.EpochStarted(epoch, wall_ns, boot_id, clean, self.metadata_revision)

    def finish_restore(
        self, log_slot: int, boot_id: str, older_since_ns: int = 0
    ) -> list[r.PartitionState]:
        """Set offsets so that none is given out twice, once all of a log was applied.

        After an unclean end, offsets that consumers may have seen without their being in the log
        (memory and non_reliable; `os` when the host went down too) are skipped. `older_since_ns`: the
        wall clock, if the log is an older copy: offsets go on far above what it may have lost.
        Returns what must be recorded, so that the next start does not take them back.
        """
        skipped: list[r.PartitionState] = []
        last = self._last_epoch.get(log_slot)
        other = self.others.get(log_slot)
        if other is not None and not other.by_id:
            del self.others[log_slot]  # it left that log long ago
        elif other is not None:
            other._last_epoch = self._last_epoch
            skipped += other.finish_restore(log_slot, boot_id, older_since_ns)
        clean = last is None or last.clean
        same_boot = last is None or last.boot_id == boot_id
        for partition in self.by_id.values():
            if partition.log_slot != log_slot:
                continue
            row = self.tables.partitions[partition.slot]
            reserved = int(row[PartitionWord.RESERVED_UNTIL])
            skip = not clean and not partition.logged
            skip = skip or (
                not same_boot and partition.logged and partition.durability is Durability.OS
            )
            start = reserved if skip and reserved != INT64_MAX else 0
            if older_since_ns:
                told_ns = max(int(row[PartitionWord.APPEND_TIME_NS]), last.wall_ns if last else 0)
                seconds = max(older_since_ns - told_ns, 0) // SECOND_NS
                leap = LOST_OFFSETS + seconds * LOST_OFFSETS_PER_SECOND
                start = max(start, int(row[PartitionWord.NEXT_OFFSET])) + leap
            if start > row[PartitionWord.NEXT_OFFSET]:
                row[PartitionWord.NEXT_OFFSET] = start
                row[PartitionWord.RESERVED_UNTIL] = max(reserved, start)
                partition.skip_to(start)
                partition.restore_reserved(max(reserved, start))
                skipped.append(self.state_of(partition))
            partition.show_until(int(row[PartitionWord.NEXT_OFFSET]))
            if not partition.logged:
                partition.begin_at(partition.visible)
            for sub in partition.subscriptions.values():
                if not sub.tracks:
                    sub.start_over(partition.visible)
            partition.purge(partition.purged_until, restoring=True)
        return skipped

    # ------------------------------------------------------------ producers

    def open_producer(self, partition: Partition, producer_id: int, name: str, epoch: int) -> int:
        """Enter a producer, or its new epoch; returns its slot."""
        slot = self.tables.find_producer(partition.partition_id, producer_id)
        if slot < 0:
            slot = self.tables.add_producer(partition.partition_id, producer_id)
        self.tables.producers[slot, ProducerWord.EPOCH] = epoch
        partition.producer_names[producer_id] = name
        return slot

    # ------------------------------------------------------------ snapshots

    def state_of(self, partition: Partition) -> r.PartitionState:
        """Describe where a partition stands, all records that were written so far included."""
        row = self.tables.partitions[partition.slot]
        reserved = int(row[PartitionWord.RESERVED_UNTIL])
        return r.PartitionState(
            partition.partition_id,
            int(row[PartitionWord.NEXT_OFFSET]),
            int(row[PartitionWord.APPEND_TIME_NS]),
            partition.first_offset,
            max(reserved, partition.reserving_until),
        )

    def snapshot(self, log_slot: int, epoch: r.EpochStarted) -> list[r.Record]:
        """Make the records that give the present state of a log's partitions."""
        records: list[r.Record] = [epoch]
        for partition in self.of_log(log_slot):
            records.append(partition.assigned)
            if partition.moving:
                moving = r.PartitionMoving(
                    partition.partition_id, partition.moving, partition.moving_epoch
                )
                records.append(moving)
            records += self.partition_records(partition)
            if partition.breaks or partition.compacted.until:
                breaks = [at for at in partition.breaks if at > partition.first_offset]
                records.append(msgspec.structs.replace(partition.compacted, breaks=breaks))
        owners = self.tables.producers[: self.tables.producer_count, ProducerWord.PARTITION_ID]
        for slot, partition_id in enumerate(owners.tolist()):
            owner = self.by_id.get(partition_id)
            if owner is not None and owner.log_slot == log_slot:
                records += self._producer_records(owner, slot)
        if log_slot in self.others:
            records += self.others[log_slot].snapshot(log_slot, epoch)[1:]
        return records

    def partition_records(self, partition: Partition) -> list[r.Record]:
        """Make the records of a partition and its subscriptions."""
        records: list[r.Record] = [self.state_of(partition), *partition.subscription_records()]
        if partition.purged_until:
            records.append(r.Purged(partition.partition_id, partition.purged_until))
        if partition.uploaded.until:
            records.append(partition.uploaded)
        return records

    def export(self, partition: Partition) -> list[r.Record]:
        """Make the records of a partition for another log: all but its messages."""
        tables = self.tables
        records: list[r.Record] = []
        for record in self.partition_records(partition):
            if not isinstance(record, r.Cursor):
                records.append(record)
                continue
            records.append(r.Cursor(record.partition_id, record.name, record.cursor))
            for at in range(0, len(record.acked), ACKED_PER_RECORD_MAX):
                some = record.acked[at : at + ACKED_PER_RECORD_MAX]
                records.append(r.Acked(record.partition_id, record.name, some))
            runs = partition.subscriptions[record.name].all_attempts()
            for at in range(0, len(runs), 3 * ATTEMPTS_PER_RECORD_MAX):
                counts = runs[at : at + 3 * ATTEMPTS_PER_RECORD_MAX]
                records.append(r.Attempts(record.partition_id, record.name, counts))
        owners = tables.producers[: tables.producer_count, ProducerWord.PARTITION_ID]
        for slot in np.flatnonzero(owners == partition.partition_id).tolist():
            records += self._producer_records(partition, slot)
        return records

    def _producer_records(self, owner: Partition, slot: int) -> list[r.Record]:
        producer = self.tables.producers[slot]
        producer_id = int(producer[ProducerWord.PRODUCER_ID])
        name = owner.producer_names.get(producer_id, "")
        return [
            r.ProducerOpened(
                owner.partition_id, producer_id, name, int(producer[ProducerWord.EPOCH])
            ),
            r.ProducerState(
                owner.partition_id,
                producer_id,
                int(producer[ProducerWord.NEXT_SEQUENCE]),
                self.tables.window(slot),
                int(producer[ProducerWord.LAST_USED_NS]),
            ),
        ]

    def forget_log(self, log_slot: int) -> None:
        """Keep nothing of a log that is closed, once its partitions are removed."""
        self.others.pop(log_slot, None)
        self._last_epoch.pop(log_slot, None)

    def of_log(self, log_slot: int) -> list[Partition]:
        """List the partitions of a log."""
        return [p for p in self.by_id.values() if p.log_slot == log_slot]
