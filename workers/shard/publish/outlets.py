"""Outlets: to whom the next frame of a partition goes, told to the kernels of a turn.

A partition has one if all that its next frame needs is what those kernels do: it becomes visible as soon as it is
taken, written or synced, and its one subscription or reader, if consumers are attached, hands it out whole to one of
them.
Outlets are made right before a turn and taken away right behind it. What kernels have shown is entered then, by the
same steps as every other frame.
"""

from __future__ import annotations

import struct

from danube_fast.broker.admission.layout import INT64_MAX, PartitionWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Deliver, Stored, SubscriptionKind
from danube_fast.errors import Internal
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.turn_layout import (
    AT_OUTLETS,
    OUTLET_BYTES,
    OUTLET_WORDS,
    OUTLETS_MAX,
    OutletKind,
)
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.transports import Transports

__all__ = ["Outlets"]

_RECENT_MAX = 4
"""Partitions whose outlets are made before a turn; one that is met in vain costs its making."""
_REFUSED = -1
_WORDS = struct.Struct(f"={OUTLET_WORDS}q")
_OUTLET = int(PartitionWord.OUTLET)
_NEXT_OFFSET = int(PartitionWord.NEXT_OFFSET)
_MEMORY, _OS, _FSYNC = map(int, OutletKind)


class Outlets:
    """Make outlets of the partitions that are published to. Used by the worker's loop only."""

    def __init__(
        self, state: ShardState, transports: Transports, delivery: Delivery, tails: Tails, intake: Intake
    ) -> None:  # fmt: skip
        self._state, self._transports = state, transports
        self._delivery, self._tails = delivery, tails
        self._intake = intake
        self._recent: dict[int, Partition] = {}
        """Partitions by slot whose frames kernels have served, the newest last: their outlets are made before the
        next turn, so that it need not stop for them."""
        self._open: dict[int, Consumer | None] = {}
        """By slot: who gets the frames of the outlets that are there."""
        self.known: set[int] = set()
        """Slots of partitions that have an outlet in this turn, or none for all of it."""
        self._may_open = False
        self._log_slot = -1
        state.removal_listeners.append(self._forget)
        delivery.announced = self.announced

    def _forget(self, partition: Partition) -> None:
        self._recent.pop(partition.slot, None)

    def announced(self, consumer: Consumer, partition_id: int, producer_id: int) -> None:
        """Note for kernels that a consumer was told the name of a producer."""
        tables = self._state.tables
        slot = tables.find_producer(partition_id, producer_id)
        if slot >= 0:
            tables.announce(slot, consumer.number)

    def announce_again(self, partition: Partition, producer_slot: int, producer_id: int) -> None:
        """Note that once more for a frame that was not plain: another consumer may have been told since."""
        consumer = self._open.get(partition.slot)
        if consumer is not None and producer_id in consumer.announced:
            self._state.tables.announce(producer_slot, consumer.number)

    # ------------------------------------------------------------ a turn

    @property
    def are_strict(self) -> bool:
        """Whether kernels have served frames that wait for a sync lately."""
        return any(partition.strict for partition in self._recent.values())

    @property
    def is_busy(self) -> bool:
        """Whether deliveries wait to be sent."""
        return self._delivery.is_busy

    def begin(self, job: memoryview, address: int, log_slot: int) -> None:
        """Begin a turn with the job at `address`, whose words are `job`. `log_slot`: the log that kernels may write
        to, -1: none."""
        self._log_slot, self._may_open = log_slot, not self._delivery.is_busy
        next_offsets = self._state.tables.partitions
        for slot, partition in self._recent.items():
            self.make(job, address, partition, int(next_offsets[slot, _NEXT_OFFSET]))

    def make(self, job: memoryview, address: int, partition: Partition, next_offset: int) -> None:
        """Make the outlet of a partition whose next frame stands at `next_offset`, or refuse it for this turn."""
        slot, number = partition.slot, len(self._open)
        self.known.add(slot)
        outlet = None
        if number < OUTLETS_MAX and self._may_open:
            outlet = self._outlet(partition, next_offset)
        word = _REFUSED
        if outlet is not None:
            self._open[slot], words = outlet
            place = AT_OUTLETS + number * OUTLET_BYTES
            _WORDS.pack_into(job, place, *words)
            word = address + place
        self._state.tables.partitions[slot, _OUTLET] = word

    def close(self) -> None:
        """Take the outlets away."""
        partitions, recent = self._state.tables.partitions, self._recent
        for slot in self.known:
            partitions[slot, _OUTLET] = 0
        if len(recent) > _RECENT_MAX:
            self._recent = dict(list(recent.items())[-_RECENT_MAX:])
        self._open.clear()
        self.known.clear()

    def _outlet(
        self, partition: Partition, next_offset: int
    ) -> tuple[Consumer | None, list[int]] | None:
        """The consumer of a partition's outlet, if there is one, and the outlet's words; None: it has none now."""
        kind = _MEMORY
        if partition.logged:
            kind = _FSYNC if partition.strict else _OS
            if partition.log_slot != self._log_slot:
                return None
        if partition.switching or partition.moving or partition.rate is not None:
            return None
        visible = partition.visible
        # a frame that was admitted and is not visible yet goes before
        if next_offset != visible or (kind == _OS and partition.strict_end > visible):
            return None
        if not (partition.subscriptions or partition.readers):
            return None, [kind, partition.safe_until, 0, 0, 0, 0, 0, 0]
        sub = partition.only_subscription()
        if sub is None or not sub.consumers:
            if any(each.consumers for each in partition.all_subscriptions()):
                return None
            return None, [kind, partition.safe_until, 0, 0, 0, 0, 0, 0]
        consumer = sub.next_taker(visible)
        side = self._side(consumer)
        if consumer is None or not side:
            return None
        flow = consumer.flow
        bytes_left, messages_left = flow.byte_credit, flow.message_credit
        covers = sub.kind is SubscriptionKind.SHARED
        if len(flow.users) > 1:  # several outlets may draw on it
            bytes_left, messages_left = bytes_left // OUTLETS_MAX, messages_left // OUTLETS_MAX
            covers = True
        return consumer, [
            kind, partition.safe_until, side, consumer.consumer_id, bytes_left, messages_left,
            int(covers), consumer.number,
        ]  # fmt: skip

    def _side(self, consumer: Consumer | None) -> int:
        """Address of the words of a consumer's client; 0 if a kernel may not send it anything now, or not that number."""
        if consumer is None or not 0 <= consumer.consumer_id <= INT64_MAX:
            return 0
        session = self._state.sessions.by_number(consumer.session)
        if session is None or session.closed or session.outbox:
            return 0
        return self._transports.free_row(session.identity)

    # ------------------------------------------------------------ what kernels have shown

    def show(self, slot: int, partition: Partition, stored: Stored, *, is_delivered: bool) -> None:
        """Enter a frame that a kernel has shown, and maybe delivered. Raises Internal if it went to another consumer
        than it should."""
        self._recent[slot] = partition
        partition.append(stored)
        self._intake.messages_in += stored.message_count
        if not partition.strict:
            self._intake.touched[partition.partition_id] = partition
        if not partition.keeps_memory:
            self._tails.count(partition, stored)
        consumer = self._open.get(slot)
        if (
            consumer is None
        ):  # a consumer that attaches later reads from where its subscription stands
            return
        state, effects = self._state, list[Deliver]()
        if not partition.pass_on(stored, state.now_ns, effects):
            state.mark_ready(partition)
        if not is_delivered:
            if effects:
                self._delivery.add(state.catalog.by_id, effects)
            return
        if not effects or effects[0].consumer is not consumer:
            raise Internal(f"a frame of {partition.topic} went to another consumer than it should")
        self._delivery.count(stored)
