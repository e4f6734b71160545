"""One subscription on one partition: who gets which offsets, what is held, what is acked.

IO-free: it takes events (attach, detach, ack, nack, dispatch) and returns or appends effects; the
worker turns a `Deliver` into frames on a socket. The same engine serves exclusive, shared and
readers; a type differs only in who may attach and how a frame is divided.

    acked below | acked ranges | held by consumers / waiting for redelivery | not yet delivered
    ------------^ cursor                                                     ^ next_offset   ^ visible
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from typing import NamedTuple

from danube_fast.broker.attempts import Attempts
from danube_fast.broker.intervals import IntervalSet, sorted_set
from danube_fast.broker.records import Acked, Cursor
from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = ["Consumer", "Deliver", "Flow", "Gap", "Stored", "Subscription", "SubscriptionKind"]

MANY_RANGES = 256
"""From here on a sweep over everything is cheaper than changes one by one."""
RANGES_PER_RECORD_MAX = 1024
"""Acked ranges in one record: a group of the smallest segment holds it."""
CREDIT_MAX = 1 << 30
"""Bytes, and messages, that one flow can be granted ahead."""


class SubscriptionKind(enum.StrEnum):
    """What a subscription does with several consumers."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    READER = "reader"


class Stored:
    """A frame that can be delivered: its offsets, and where its bytes lie."""

    __slots__ = (
        "base_offset", "bundle_frames", "end_offset", "frame_bytes", "holder", "index",
        "message_count", "partition_id", "producer_id", "start",
    )  # fmt: skip

    def __init__(
        self,
        partition_id: int,
        base_offset: int,
        end_offset: int,
        message_count: int,
        frame_bytes: int,
        producer_id: int,
        holder: object,
        start: int,
        index: int = 0,
        bundle_frames: int = 0,
    ) -> None:
        """`holder` owns the bytes, the frame begins at `start`; if the holder is a whole bundle,
        this is its frame number `index` of `bundle_frames`."""
        self.partition_id = partition_id
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.message_count = message_count
        self.frame_bytes = frame_bytes
        self.producer_id = producer_id
        self.holder = holder
        self.start = start
        self.index = index
        self.bundle_frames = bundle_frames


class Gap(NamedTuple):
    """Offsets up to `end` do not exist or are gone; `lost`: there were messages."""

    end: int
    reason: str
    lost: bool = False


class Flow:
    """Credit that one or more consumers of a session draw on."""

    __slots__ = ("byte_credit", "message_credit", "paused", "ran_out", "users")

    def __init__(self) -> None:
        self.byte_credit = 0
        self.message_credit = 0
        self.paused = False
        """The session does not take what was sent already."""
        self.ran_out = False
        """Credit was used up since the last grant: somebody may wait for more."""
        self.users: set[Consumer] = set()

    @property
    def willing(self) -> bool:
        """One more frame may be sent."""
        return self.byte_credit > 0 and self.message_credit > 0 and not self.paused

    def grant(self, byte_count: int, message_count: int) -> None:
        """Add credit, up to a bound that no honest consumer needs."""
        self.byte_credit = min(self.byte_credit + max(0, byte_count), CREDIT_MAX)
        self.message_credit = min(self.message_credit + max(0, message_count), CREDIT_MAX)


class Consumer:
    """A consumer attached to one subscription of one partition."""

    __slots__ = ("announced", "consumer_id", "flow", "held", "name", "session", "subscription")

    def __init__(
        self, subscription: Subscription, session: int, consumer_id: int, flow: Flow, name: str
    ) -> None:
        self.subscription = subscription
        self.session = session
        self.consumer_id = consumer_id
        self.flow = flow
        self.name = name
        self.held = IntervalSet()
        self.announced: set[int] = set()


class Deliver(NamedTuple):
    """Effect: send `stored` to `consumer`; only the `ranges` of offsets when they are given, with
    the redelivery counts of `attempts` (start, end, count) when those are given."""

    consumer: Consumer
    stored: Stored
    ranges: list[tuple[int, int]] | None
    attempts: list[tuple[int, int, int]] | None


Fetch = Callable[["Subscription", int], "Stored | Gap | None"]
"""The frame that holds an offset, a gap there, or None if it is not visible yet."""


class Subscription:
    """State of one subscription on one partition."""

    def __init__(
        self, partition_id: int, name: str, kind: SubscriptionKind, cursor: int, *, tracks: bool
    ) -> None:
        """`tracks`: deliveries must be acked (reliable topics, not for readers)."""
        self.partition_id = partition_id
        self.name = name
        self.kind = kind
        self.cursor = cursor
        self.next_offset = cursor
        self.tracks = tracks
        self.acked = IntervalSet()
        self.attempts = Attempts()
        self.redeliver = IntervalSet()
        self.delayed: list[tuple[int, int, int]] = []
        self.consumers: list[Consumer] = []
        self.turn = 0
        self.ahead: list[Stored] = []
        """Frames read from the log and not yet delivered; filled by the worker's fetch."""
        self._unrecorded = IntervalSet()
        self._sought: int | None = None
        self.recorded = True
        """Its creation is durable."""
        self.lost_count = 0
        self.lost_counted = 0
        """The same as far as the worker's counter has it."""
        self.redelivered_count = 0

    # ------------------------------------------------------------ consumers

    def attach(self, consumer: Consumer) -> None:
        """Add a consumer. Raises FailedPrecondition if an exclusive subscription is taken."""
        if self.kind is not SubscriptionKind.SHARED and self.consumers:
            holder = self.consumers[0]
            raise FailedPrecondition(
                f"subscription {self.name!r} is exclusive and consumer {holder.name!r} holds it; "
                "close that one, or use type='shared' under another subscription name"
            )
        self.consumers.append(consumer)
        consumer.flow.users.add(consumer)

    def detach(self, consumer: Consumer) -> None:
        """Remove a consumer; what it holds waits for redelivery."""
        if consumer not in self.consumers:
            return
        self.consumers.remove(consumer)
        consumer.flow.users.discard(consumer)
        self._give_back_all(consumer.held)
        consumer.held = IntervalSet()
        if not self.consumers:
            self.ahead = []
        if self.turn >= len(self.consumers):
            self.turn = 0

    def _give_back(self, start: int, end: int) -> None:
        self.attempts.bump(start, end)
        self.redeliver.add(start, end)
        self.redelivered_count += end - start

    def _give_back_all(self, ranges: IntervalSet) -> None:
        if len(ranges) < MANY_RANGES:
            for start, end in ranges:
                self._give_back(start, end)
            return
        self.attempts.bump_all(ranges)
        self.redeliver.add_all(ranges)
        self.redelivered_count += ranges.count

    @staticmethod
    def _take(consumer: Consumer, pairs: list[int]) -> IntervalSet:
        """What a consumer holds of flat [start, end) pairs; it holds that no longer."""
        if len(pairs) < 2 * MANY_RANGES:
            taken = IntervalSet()
            for i in range(0, len(pairs) - 1, 2):
                for start, end in consumer.held.overlap(pairs[i], pairs[i + 1]):
                    consumer.held.remove(start, end)
                    taken.add(start, end)
            return taken
        return consumer.held.split_off(sorted_set(pairs))

    # ------------------------------------------------------------ acks

    def ack(self, consumer: Consumer, pairs: list[int]) -> None:
        """Acknowledge flat [start, end) pairs, as far as the consumer holds them."""
        taken = self._take(consumer, pairs)
        if not taken or len(taken) < MANY_RANGES:
            for start, end in taken:
                self.settle(start, end)
            return
        self.acked.add_all(taken)
        if self.acked.first <= self.cursor:
            self.cursor = max(self.cursor, self.acked.pop_first()[1])
        self.attempts.discard_all(taken)
        if self.tracks:
            self._unrecorded.add_all(taken)

    def settle(self, start: int, end: int) -> None:
        """[start, end) needs no delivery any more: acked, or it does not exist."""
        if start <= self.cursor and not self.acked:
            self.cursor = max(self.cursor, end)
        else:
            self.acked.add(start, end)
            if self.acked.first <= self.cursor:
                self.cursor = max(self.cursor, self.acked.pop_first()[1])
        if self.attempts:
            self.attempts.discard(start, end)
        if self.tracks:
            self._unrecorded.add(start, end)

    def nack(self, consumer: Consumer, pairs: list[int], due_ns: int) -> None:
        """Give flat [start, end) pairs back; they are redelivered at `due_ns` (0: at once)."""
        taken = self._take(consumer, pairs)
        if not due_ns:
            self._give_back_all(taken)
            return
        for start, end in taken:
            heapq.heappush(self.delayed, (due_ns, start, end))

    def release_due(self, now_ns: int) -> None:
        """Move delayed redeliveries that are due to the queue."""
        due: list[int] = []
        while self.delayed and self.delayed[0][0] <= now_ns:
            due.extend(heapq.heappop(self.delayed)[1:])
        self._give_back_all(sorted_set(due))

    def seek(self, offset: int) -> None:
        """Start over at `offset`: everything below counts as acked, everything above as new.
        Consumers stay attached and hold nothing."""
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative; seek to 0 or above")
        for consumer in self.consumers:
            consumer.held.clear()
        self.cursor = self.next_offset = offset
        self.acked.clear()
        self.redeliver.clear()
        self.delayed.clear()
        self.attempts = Attempts()
        self.ahead.clear()
        if self.tracks:
            self._sought = offset
            self._unrecorded.clear()

    # ------------------------------------------------------------ records

    @property
    def cursor_dirty(self) -> bool:
        """Something was acked or sought since the last `cursor_records`."""
        return self._sought is not None or bool(self._unrecorded)

    def cursor_records(self) -> list[Cursor | Acked]:
        """What changed since the last call: however much is acked above the cursor, a record only
        holds what is new."""
        records: list[Cursor | Acked] = []
        if self._sought is not None:
            records.append(Cursor(self.partition_id, self.name, self._sought))
            self._sought = None
        flat = self._unrecorded.flat()
        self._unrecorded.clear()
        for at in range(0, len(flat), 2 * RANGES_PER_RECORD_MAX):
            some = flat[at : at + 2 * RANGES_PER_RECORD_MAX]
            records.append(Acked(self.partition_id, self.name, some))
        return records

    def restore(self, cursor: int, acked: list[int]) -> None:
        """Set what a cursor record says."""
        self.cursor = self.next_offset = cursor
        self.acked = IntervalSet(acked)

    def restore_acked(self, ranges: list[int]) -> None:
        """Add what a record says, maybe not for the first time."""
        for i in range(0, len(ranges) - 1, 2):
            if ranges[i] > self.cursor:
                self.acked.add(ranges[i], ranges[i + 1])
            elif ranges[i + 1] > self.cursor:
                self.cursor = ranges[i + 1]
                self.acked.remove(0, self.cursor)
                if self.acked and self.acked.first <= self.cursor:
                    self.cursor = self.acked.pop_first()[1]
        self.next_offset = self.cursor

    @property
    def held_count(self) -> int:
        """Messages that consumers hold."""
        return sum(consumer.held.count for consumer in self.consumers)

    # ------------------------------------------------------------ dispatch

    def willing(self) -> Consumer | None:
        """Whose turn it is among the consumers with credit; takes no turn."""
        consumers = self.consumers
        for step in range(len(consumers)):
            consumer = consumers[(self.turn + step) % len(consumers)]
            if consumer.flow.willing:
                return consumer
        return None

    def dispatch(self, visible: int, fetch: Fetch, effects: list[Deliver]) -> list[Gap]:
        """Hand out what can be handed out, below offset `visible`; returns gaps that were met."""
        gaps: list[Gap] = []
        while self.redeliver:
            consumer = self.willing()
            if consumer is None:
                return gaps
            start, end = self.redeliver.first, self.redeliver.first_end
            found = fetch(self, start)
            if found is None:
                break
            if isinstance(found, Gap):
                upto = min(end, found.end)
                self.redeliver.remove(start, upto)
                self._pass_over(start, upto, found)
                gaps.append(found)
                continue
            # All that waits of one frame goes to one consumer: a frame is taken apart once.
            wanted = self.redeliver.overlap(start, found.end_offset)
            self.redeliver.remove(start, found.end_offset)
            self._deliver(consumer, found, wanted, effects)
            self.turn = (self.consumers.index(consumer) + 1) % len(self.consumers)
        while self.next_offset < visible:
            if self.willing() is None:
                break
            found = fetch(self, self.next_offset)
            if found is None:
                break
            if isinstance(found, Gap):
                self._pass_over(self.next_offset, found.end, found)
                self.next_offset = max(self.next_offset, found.end)
                gaps.append(found)
                continue
            self._first_delivery(found, effects)
        return gaps

    def pass_on(self, stored: Stored, effects: list[Deliver]) -> bool:
        """Hand out a whole frame that has just become visible, if that is all that `dispatch` would
        do; False: it may be more, and nothing was done."""
        consumers = self.consumers
        if len(consumers) != 1 or self.next_offset != stored.base_offset:
            return False
        if self.redeliver or self.acked or self.attempts:
            return False
        (consumer,) = consumers
        flow = consumer.flow
        if flow.byte_credit <= 0 or flow.message_credit <= 0 or flow.paused:
            return False
        end = self.next_offset = stored.end_offset
        if self.tracks:
            consumer.held.add(stored.base_offset, end)
        else:
            self.cursor = max(self.cursor, end)
        flow.message_credit -= stored.message_count
        flow.byte_credit -= stored.frame_bytes
        if flow.byte_credit <= 0 or flow.message_credit <= 0:
            flow.ran_out = True
        effects.append(Deliver(consumer, stored, None, None))
        return True

    def _pass_over(self, start: int, end: int, gap: Gap) -> None:
        if gap.lost:
            self.lost_count += sum(high - low for low, high in self.acked.missing(start, end))
        self.settle(start, end)

    def _first_delivery(self, stored: Stored, effects: list[Deliver]) -> None:
        start = self.next_offset
        self.next_offset = stored.end_offset
        consumers = [consumer for consumer in self.consumers if consumer.flow.willing]
        if len(consumers) == 1:
            self._deliver(consumers[0], stored, [(start, stored.end_offset)], effects)
            if self.kind is SubscriptionKind.SHARED and len(self.consumers) > 1:
                self.turn = (self.consumers.index(consumers[0]) + 1) % len(self.consumers)
            return
        self._divide(consumers, stored, start, effects)

    def _divide(
        self, consumers: list[Consumer], stored: Stored, start: int, effects: list[Deliver]
    ) -> None:
        """Contiguous blocks of one frame, as equal as they can be, the odd ones in turn: the
        counts are those of round-robin by message, and acks stay ranges."""
        todo = self.acked.missing(start, stored.end_offset) if self.acked else [
            (start, stored.end_offset)
        ]  # fmt: skip
        total = sum(end - low for low, end in todo)
        first = self._next_turn(consumers)
        order = consumers[first:] + consumers[:first]
        share, odd = divmod(total, len(order))
        for place, consumer in enumerate(order):
            wanted = share + (place < odd)
            while wanted:
                low, end = todo[0]
                upto = min(end, low + wanted)
                self._deliver(consumer, stored, [(low, upto)], effects)
                wanted -= upto - low
                todo[0] = (upto, end)
                if upto == end:
                    todo.pop(0)
        last = order[(odd - 1) % len(order)]
        self.turn = (self.consumers.index(last) + 1) % len(self.consumers)

    def _next_turn(self, consumers: list[Consumer]) -> int:
        """Index in `consumers` of the first one at or behind the turn."""
        everyone = self.consumers
        for step in range(len(everyone)):
            consumer = everyone[(self.turn + step) % len(everyone)]
            if consumer in consumers:
                return consumers.index(consumer)
        return 0

    def _deliver(
        self,
        consumer: Consumer,
        stored: Stored,
        ranges: list[tuple[int, int]],
        effects: list[Deliver],
    ) -> None:
        """One consumer gets some offsets of a frame, without what is acked already."""
        if self.acked:
            ranges = [piece for low, high in ranges for piece in self.acked.missing(low, high)]
            if not ranges:
                return
        attempts = None
        if self.attempts:
            attempts = [
                piece for low, high in ranges for piece in self.attempts.segments(low, high)
            ]
            if not any(count for _, _, count in attempts):
                attempts = None
        flow = consumer.flow
        if self.tracks:
            for low, high in ranges:
                consumer.held.add(low, high)
        else:
            self.cursor = max(self.cursor, ranges[-1][1])
        whole = ranges[0] == (stored.base_offset, stored.end_offset) and attempts is None
        count = stored.message_count if whole else sum(high - low for low, high in ranges)
        flow.message_credit -= count
        flow.byte_credit -= (
            stored.frame_bytes if whole else stored.frame_bytes * count // stored.message_count
        )
        if not flow.willing:
            flow.ran_out = True
        effects.append(Deliver(consumer, stored, None if whole else ranges, attempts))
