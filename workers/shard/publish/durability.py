"""Changes of a topic's durability while it is in use, without losing a message.

    asked -> publishes refused ("send again") -> record durable, and with it all that came before
          -> memory to log: frames in memory are written to the log, at the same offsets
          -> log to memory: old messages stay in the log and are read from there
          -> publishes taken again, under the new durability -> answered

So frames of two durabilities are never under way at the same time: each kind becomes visible at another
moment, and consumers must see offsets in order.
"""

from __future__ import annotations

import logging

import msgspec

from danube_fast.broker import records as r
from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.admission.layout import INT64_MAX, PartitionWord
from danube_fast.broker.partition import Partition
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError
from danube_fast.types import Durability
from danube_fast.workers.shard.deliver.dispatcher import Dispatcher
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.publish.copies import append_copies
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.state import ShardState

__all__ = ["DurabilityChanges"]

_log = logging.getLogger(__name__)


class DurabilityChanges:
    """Change the durability of partitions of one worker."""

    def __init__(
        self, state: ShardState, intake: Intake, tails: Tails, dispatcher: Dispatcher
    ) -> None:
        self._state, self._intake = state, intake
        self._tails, self._dispatcher = tails, dispatcher

    def begin(self, partition: Partition, assigned: r.PartitionAssigned, done: Done) -> None:
        """Give a partition its new settings; `done` when they are in force, or with what prevented it."""
        partition.begin_switch()
        text = f"the durability of {partition.topic} is being changed to {assigned.durability}; send again"
        self._state.gate.close(partition, Cause.DURABILITY, text)
        journal = self._state.journals[partition.log_slot]
        journal.changing += 1
        journal.record(assigned)

        def recorded(error: DanubeError | None) -> None:
            partition.end_switch()
            journal.changing -= 1
            if self._state.partition(partition.partition_id) is partition:
                error = error or self._switch(partition, assigned)
                if error is not None:
                    _log.error("%s stays %s: %s", partition.topic, partition.durability, error)
                    self._go_back(partition)
                if not partition.switching:
                    self._state.gate.open(partition, Cause.DURABILITY)
                if not partition.is_changing:
                    self._state.catalog.assign(partition.assigned, partition.log_slot)
                    self._state.apply_policy(partition)
                    self._intake.reserve_offsets(partition, urgent=True)
            done(error)

        journal.record(self._standing(partition, assigned), recorded)

    def _go_back(self, partition: Partition) -> None:
        """Record the old settings again, as the record of the change may be in the log all the same. No offset
        may be shown by the reservation that the change took back."""
        journal = self._state.journals[partition.log_slot]
        state = self._state.catalog.state_of(partition)
        journal.record(partition.assigned)
        journal.record(state)
        if not partition.strict:
            partition.restore_reserved(min(partition.safe_until, state.next_offset))

    def _standing(self, partition: Partition, assigned: r.PartitionAssigned) -> r.PartitionState:
        """Describe where the partition stands: replay must not go back to offsets that no log has."""
        state = self._state.catalog.state_of(partition)
        strict = Partition(assigned, partition.log_slot, partition.slot).strict
        reserved = state.reserved_until
        if strict:
            reserved = INT64_MAX
        elif reserved == INT64_MAX:
            reserved = state.next_offset
        return msgspec.structs.replace(state, reserved_until=reserved)

    def _switch(self, partition: Partition, assigned: r.PartitionAssigned) -> DanubeError | None:
        """Put the new settings in force, now that all that was published so far is durable."""
        self._dispatcher.show_memory_entries()
        was_logged = partition.logged
        becomes_logged = assigned.durability != Durability.MEMORY.value
        if was_logged and not becomes_logged:
            self._tails.empty(partition)
        if becomes_logged and not was_logged:
            try:
                self._write_tail(partition)
            except DanubeError as error:
                return error
        partition.assign(assigned)
        if becomes_logged and partition.strict:
            self._state.tables.partitions[partition.slot, PartitionWord.RESERVED_UNTIL] = INT64_MAX
        return None

    def _write_tail(self, partition: Partition) -> None:
        """Write a memory topic's frames to the log and count them among those that may be evicted.

        Raises ResourceExhausted or Internal; frames written by then are there twice, and do no harm.
        """
        journal = self._state.journals[partition.log_slot]
        journal.write(self._state.now_ns)
        frames = partition.tail_frames()
        try:
            for stored in frames:
                # a copy, for the frame may be on its way to a consumer just now
                append_copies(journal.log, bytearray(stored.memory))
        finally:
            journal.marked = False
            journal.refresh()
        journal.log.sync()
        for stored in frames:
            self._tails.count(partition, stored)
