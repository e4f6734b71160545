"""One subscription on one partition: who gets which messages, what is held, what is acked.

IO-free: it takes events (attach, detach, ack, nack, time, dispatch) and returns or appends effects;
the worker turns a `Deliver` into frames on a socket. One engine serves all types and readers; they
differ in who may attach and in how the messages of a frame are divided (`_share_out`). What is the
case with each message stands in the ledger.

    settled below | settled, held, waiting, delayed, blocked | fresh
    --------------^ cursor                                    ^ next_offset   ^ visible
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from danube_fast.broker.consumer import (
    Consumer,
    Deliver,
    Fetch,
    Gap,
    Poisoned,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.ledger import PAGES, ROUTED_PAGES, Failed, Ledger, Rows, runs_of
from danube_fast.broker.ledger_layout import State
from danube_fast.broker.policy import FailurePolicy, Poison
from danube_fast.broker.records import Acked, Cursor
from danube_fast.broker.routing import Router
from danube_fast.broker.timers import NEVER, Timers
from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = ["Subscription"]

FRESH, WAITING, DELAYED, BLOCKED = State.FRESH, State.WAITING, State.DELAYED, State.BLOCKED
GAP_AT_ONCE = 1 << 16
"""Offsets of a gap in which waiting messages are looked for at once."""
GOLDEN = 2654435761
"""Spreads the jitter of messages that lie side by side."""
EXTENDED_MIN = 1024
"""From here on deadlines of deliveries that are over are looked for."""
TIMER_STEP_NS = 20_000_000
"""Deadlines are looked at together that lie so close: nobody minds, and it saves turns."""

_ONE_CONSUMER = (SubscriptionKind.EXCLUSIVE, SubscriptionKind.READER)


class Subscription:
    """State of one subscription on one partition."""

    def __init__(
        self,
        partition_id: int,
        name: str,
        kind: SubscriptionKind,
        cursor: int,
        *,
        tracks: bool,
        timers: Timers[Subscription] | None = None,
    ) -> None:
        """`tracks`: deliveries must be acked (reliable topics, not for readers)."""
        self.partition_id = partition_id
        self.name = name
        self.kind = kind
        self.tracks = tracks
        routed = kind is SubscriptionKind.KEY_SHARED and tracks
        self.ledger = Ledger(ROUTED_PAGES if routed else PAGES, cursor)
        self.router = Router(self.ledger) if routed else None
        self.next_offset = cursor
        """The first message that was never looked at."""
        self.policy = FailurePolicy()
        self.consumers: list[Consumer] = []
        self.turn = 0
        self.ahead: list[Stored] = []
        """Frames read from the log and not yet delivered; filled by the worker's fetch."""
        self.poisoned: list[Poisoned] = []
        """Effects: what is to become dead letters; `dead_letter_done` says that it did."""
        self.armed_ns = NEVER
        self.recorded = True
        """Its creation is durable."""
        self.lost_count = 0
        self.lost_counted = 0
        """The same as far as the worker's counter has it."""
        self.redelivered_count = 0
        self.dropped_count = 0
        """Messages that failed too often and were given up."""
        self.dead_letter_count = 0
        self._timers = timers or Timers()
        self._delayed: list[tuple[int, int, int]] = []
        self._extended: list[tuple[int, int, int]] = []
        """Deadlines of their own: when, which row of the ledger, which delivery."""
        self._sought: int | None = None
        self._free_slots: list[int] = []

    # ------------------------------------------------------------ consumers

    def attach(self, consumer: Consumer) -> None:
        """Add a consumer. Raises FailedPrecondition if an exclusive subscription is taken."""
        if self.kind in _ONE_CONSUMER and self.consumers:
            holder = self.consumers[0]
            raise FailedPrecondition(
                f"subscription {self.name!r} is exclusive and consumer {holder.name!r} holds it; "
                "close that one, or use type='shared' under another subscription name"
            )
        if not self._free_slots:
            self._free_slots.append(len(self.consumers))
        consumer.slot = self._free_slots.pop()
        self.consumers.append(consumer)
        consumer.flow.users[consumer] = None
        if self.router is not None:
            self._reroute()

    def detach(self, consumer: Consumer) -> None:
        """Remove a consumer; what it holds waits for redelivery."""
        if consumer not in self.consumers:
            return
        self.consumers.remove(consumer)
        consumer.flow.users.pop(consumer, None)
        before = self.ledger.waiting
        self.ledger.give_back(consumer.slot)
        self.redelivered_count += self.ledger.waiting - before
        self._free_slots.append(consumer.slot)
        consumer.slot = -1
        if self.router is not None:
            self._reroute()
        if not self.consumers:
            self.ahead = []
        if self.turn >= len(self.consumers):
            self.turn = 0

    def _reroute(self) -> None:
        """Other consumers: keys have other owners; with other filters everything is looked at anew."""
        if self.router is not None and self.router.set_consumers(self.consumers):
            self.next_offset = min(self.next_offset, self.ledger.rewind())

    # ------------------------------------------------------------ acks

    @property
    def cursor(self) -> int:
        """All below is acked, or does not exist."""
        return self.ledger.cursor

    def ack(self, consumer: Consumer, pairs: list[int]) -> None:
        """Acknowledge flat [start, end) pairs, as far as the consumer holds them."""
        if consumer.slot >= 0:
            self.ledger.ack(consumer.slot, pairs)

    def settle(self, start: int, end: int) -> int:
        """[start, end) needs no delivery any more, whoever holds it; how much of it did."""
        settled = self.ledger.settle(start, end)
        self.next_offset = max(self.next_offset, self.ledger.cursor)
        return settled

    def seek(self, offset: int) -> None:
        """Start over at `offset`: everything below counts as acked, everything above as new.
        Consumers stay attached and hold nothing."""
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative; seek to 0 or above")
        self.start_over(offset)
        if self.tracks:
            self._sought = offset

    def start_over(self, offset: int) -> None:
        """Nobody needs anything below, and nothing above was handed out; no record says so."""
        self.ledger.restart(offset)
        if self.router is not None:
            self.router.restart()
        self.next_offset = offset
        self._delayed.clear()
        self._extended.clear()
        self.poisoned.clear()
        self.ahead.clear()

    # ------------------------------------------------------------ failures

    def nack(
        self, consumer: Consumer, pairs: list[int], delay_ns: int | None, now_ns: int, reason: str
    ) -> None:
        """Give flat [start, end) pairs back: they failed. They come again after `delay_ns`, with None
        after what the policy says; those that failed too often are treated as the policy says."""
        if consumer.slot >= 0:
            failed = self.ledger.fail(consumer.slot, pairs, self.policy.max_redelivery_count)
            self._failed(failed, delay_ns, now_ns, reason)

    def _failed(self, failed: list[Failed], delay_ns: int | None, now_ns: int, reason: str) -> None:
        for start, end, failures, is_poison in failed:
            self.redelivered_count += end - start
            if is_poison:
                self._poison(Poisoned(start, end, failures, reason))
                continue
            wait_ns = delay_ns
            if wait_ns is None:
                draw = (start * GOLDEN & 0xFFFF) / 0x10000
                wait_ns = self.policy.delay_ns(failures, draw)
            if wait_ns <= 0:
                self._wake(start, end, DELAYED)
            else:
                heapq.heappush(self._delayed, (now_ns + wait_ns, start, end))
        self.arm()

    def _poison(self, poisoned: Poisoned) -> None:
        """They are BLOCKED; do what the policy says with them."""
        if self.policy.poison_policy is Poison.DROP:
            self.dropped_count += self.settle(poisoned.start, poisoned.end)
        elif self.policy.poison_policy is Poison.DEAD_LETTER:
            self.poisoned.append(poisoned)

    def dead_letter_done(self, start: int, end: int) -> None:
        """Blocked messages are in the dead-letter topic, durably."""
        for low, high in runs_of(self.ledger.select(start, start, end, BLOCKED), start):
            self.dead_letter_count += self.settle(low, high)

    def set_policy(self, policy: FailurePolicy) -> None:
        """Another failure policy, from now on; what is blocked gets another chance."""
        self.policy = policy
        self.poisoned.clear()
        if self.ledger.blocked:
            self._wake(self.cursor, self.ledger.next_offset, BLOCKED)
        self.arm()

    def _wake(self, start: int, end: int, state: State) -> None:
        self.ledger.wake(start, end, state)
        if self.router is not None and self.router.woken():
            self.next_offset = min(self.next_offset, self.ledger.rewind())

    # ------------------------------------------------------------ time

    def extend(self, consumer: Consumer, pairs: list[int], until_ns: int) -> None:
        """The consumer keeps what it holds of these pairs until then, or whatever the timeout is."""
        if consumer.slot < 0:
            return
        for at in range(0, len(pairs) - 1, 2):
            row = self.ledger.extend(pairs[at], pairs[at + 1], consumer.slot)
            serial = self.ledger.serial(row)
            if serial >= 0:
                heapq.heappush(self._extended, (until_ns, row, serial))
        if len(self._extended) > EXTENDED_MIN and len(self._extended) > 2 * self.ledger.held:
            living = [entry for entry in self._extended if self.ledger.serial(entry[1]) == entry[2]]
            self._extended = living
            heapq.heapify(living)
        self.arm()

    def arm(self) -> None:
        """See to it that `on_time` is called when something is due."""
        due = self._delayed[0][0] if self._delayed else NEVER
        timeout_ns = self.policy.ack_timeout_ns
        if timeout_ns and self.tracks:
            oldest = self.ledger.oldest()
            if oldest is not None:
                due = min(due, oldest[1] + timeout_ns + TIMER_STEP_NS)
            if self._extended:
                due = min(due, self._extended[0][0])
        if due < NEVER:
            self._timers.arm(self, due)

    def on_time(self, now_ns: int) -> None:
        """Delayed messages wait from now on if their time has come; what is held for too long failed."""
        while self._delayed and self._delayed[0][0] <= now_ns:
            _, start, end = heapq.heappop(self._delayed)
            self._wake(start, end, DELAYED)
        timeout_ns = self.policy.ack_timeout_ns
        if timeout_ns:
            while self._extended and self._extended[0][0] <= now_ns:
                _, row, serial = heapq.heappop(self._extended)
                if self.ledger.serial(row) == serial:
                    self._time_out(row, now_ns)
            while (oldest := self.ledger.oldest()) and oldest[1] + timeout_ns <= now_ns:
                self._time_out(oldest[0], now_ns)
        self.arm()

    def _time_out(self, row: int, now_ns: int) -> None:
        slot = self.ledger.slot_of(row)
        for consumer in self.consumers:
            if consumer.slot == slot:
                self._pass_turn(consumer)  # let another one try
        failed = self.ledger.fail_row(row, self.policy.max_redelivery_count)
        self._failed(failed, None, now_ns, "the ack timeout went by")

    # ------------------------------------------------------------ records

    @property
    def cursor_dirty(self) -> bool:
        """Something was acked or sought since the last `cursor_records`."""
        return self.tracks and (self._sought is not None or self.ledger.is_dirty)

    def cursor_records(self) -> list[Cursor | Acked]:
        """What changed since the last call: however much is acked above the cursor, a record only
        holds what is new."""
        records: list[Cursor | Acked] = []
        if not self.tracks:
            return records
        if self._sought is not None:
            records.append(Cursor(self.partition_id, self.name, self._sought))
            self._sought = None
        while pairs := self.ledger.collect():
            records.append(Acked(self.partition_id, self.name, pairs))
        return records

    def restore(self, cursor: int, acked: list[int]) -> None:
        """Set what a cursor record says."""
        self.start_over(cursor)
        self.restore_acked(acked)

    def restore_acked(self, ranges: list[int]) -> None:
        """Add what a record says, maybe not for the first time."""
        for i in range(0, len(ranges) - 1, 2):
            self.ledger.settle(ranges[i], ranges[i + 1])
        while self.ledger.collect():  # a record says so
            pass
        self.next_offset = self.cursor

    # ------------------------------------------------------------ dispatch

    def willing(self) -> Consumer | None:
        """Whose turn it is among the consumers with credit; takes no turn."""
        consumers = self.consumers
        if self.kind is SubscriptionKind.FAILOVER:
            consumers = consumers[:1]
        for step in range(len(consumers)):
            consumer = consumers[(self.turn + step) % len(consumers)]
            if consumer.flow.willing:
                return consumer
        return None

    def dispatch(
        self, visible: int, fetch: Fetch, now_ns: int, effects: list[Deliver]
    ) -> list[Gap]:
        """Hand out what can be handed out, below offset `visible`; returns gaps that were met."""
        gaps: list[Gap] = []
        before = len(effects)
        if self.router is not None:
            self.router.begin_pass(self.consumers)
        if self._hand_out_waiting(fetch, now_ns, effects, gaps):
            self._hand_out_fresh(visible, fetch, now_ns, effects, gaps)
        if self.tracks and len(effects) > before and self.armed_ns == NEVER:
            self.arm()
        return gaps

    def _hand_out_waiting(
        self, fetch: Fetch, now_ns: int, effects: list[Deliver], gaps: list[Gap]
    ) -> bool:
        """What waits goes before what is fresh. False: nobody wants anything."""
        ledger, router = self.ledger, self.router
        find: Callable[[], int | None] = ledger.first_waiting
        if router is not None:
            find = router.next_waiting
        while ledger.waiting:
            consumer = self.willing()
            if consumer is None:
                return False
            at = find()
            found = fetch(self, at) if at is not None else None
            if at is None or found is None:
                break
            if isinstance(found, Gap):
                gaps.append(found._replace(start=at))
                self._pass_waiting(at, found)
                continue
            # All that waits of one frame goes to one consumer: a frame is taken apart once.
            base = found.base_offset
            rows = ledger.select(base, at, found.end_offset, WAITING)
            if router is not None:
                self._route(found, rows, now_ns, effects, waiting=True)
                continue
            self._deliver(consumer, found, rows, now_ns, effects, ledger.attempts(base, rows))
            self._pass_turn(consumer)
        return True

    def _pass_waiting(self, at: int, gap: Gap) -> None:
        """What waits from `at` on lies in a gap: it is never delivered."""
        while at < min(gap.end, self.ledger.next_offset):
            end = min(gap.end, self.ledger.next_offset, at + GAP_AT_ONCE)
            for low, high in runs_of(self.ledger.select(at, at, end, WAITING), at):
                settled = self.settle(low, high)
                self.lost_count += settled if gap.lost else 0
            at = end

    def _hand_out_fresh(
        self, visible: int, fetch: Fetch, now_ns: int, effects: list[Deliver], gaps: list[Gap]
    ) -> None:
        while self.next_offset < visible:
            if self.willing() is None or (self.router is not None and self.router.is_full):
                return
            found = fetch(self, self.next_offset)
            if found is None:
                return
            if isinstance(found, Gap):
                gaps.append(found._replace(start=self.next_offset))
                self._pass_fresh(found)
                continue
            start, self.next_offset = self.next_offset, found.end_offset
            base = found.base_offset
            untouched = start >= self.ledger.next_offset and not self.ledger.settled_ahead
            if not self.tracks or untouched:
                rows = np.arange(start - base, found.end_offset - base, dtype=np.int32)
            else:
                rows = self.ledger.select(base, start, found.end_offset, FRESH)
            if self.router is not None:
                self._route(found, rows, now_ns, effects, waiting=False)
            elif len(rows):
                self._share_out(found, rows, now_ns, effects)

    def _pass_fresh(self, gap: Gap) -> None:
        start, self.next_offset = self.next_offset, max(self.next_offset, gap.end)
        if self.tracks:
            settled = self.settle(start, gap.end)
        else:
            settled = gap.end - start
            self.ledger.restart(self.next_offset)
        self.lost_count += settled if gap.lost else 0

    def pass_on(self, stored: Stored, now_ns: int, effects: list[Deliver]) -> bool:
        """Hand out a whole frame that has just become visible, if that is all that `dispatch` would
        do; False: it may be more, and nothing was done."""
        consumers = self.consumers
        if len(consumers) != 1 and not (consumers and self.kind is SubscriptionKind.FAILOVER):
            return False
        if self.next_offset != stored.base_offset or not self.ledger.is_plain or self.router:
            return False
        consumer, flow = consumers[0], consumers[0].flow
        if flow.byte_credit <= 0 or flow.message_credit <= 0 or flow.paused:
            return False
        end = self.next_offset = stored.end_offset
        if self.tracks:
            self.ledger.hold(stored.base_offset, end, consumer.slot, now_ns)
            if self.armed_ns == NEVER:
                self.arm()
        else:
            self.ledger.move_to(end)
        flow.take(stored.frame_bytes, stored.message_count)
        effects.append(Deliver(consumer, stored, None, None))
        return True

    # ------------------------------------------------------------ dividing

    def _share_out(self, stored: Stored, rows: Rows, now_ns: int, effects: list[Deliver]) -> None:
        """Contiguous blocks of one frame, as equal as they can be, the odd ones in turn: the counts
        are those of round-robin by message, and acks stay ranges. One consumer gets all."""
        everyone = self.consumers
        if self.kind is SubscriptionKind.FAILOVER:
            everyone = everyone[:1]
        turned = everyone[self.turn :] + everyone[: self.turn]
        order = [consumer for consumer in turned if consumer.flow.willing]
        share, odd = divmod(len(rows), len(order))
        at = 0
        for place, consumer in enumerate(order):
            end = at + share + (place < odd)
            if end > at:
                self._deliver(consumer, stored, rows[at:end], now_ns, effects)
            at = end
        self._pass_turn(order[(odd - 1) % len(order)])

    def _pass_turn(self, consumer: Consumer) -> None:
        """It is the turn of who stands behind `consumer`."""
        if len(self.consumers) > 1 and self.kind is SubscriptionKind.SHARED:
            self.turn = (self.consumers.index(consumer) + 1) % len(self.consumers)

    def _route(
        self, stored: Stored, rows: Rows, now_ns: int, effects: list[Deliver], *, waiting: bool
    ) -> None:
        """Every consumer gets the messages of its keys; who has no credit, or waits for what another
        consumer still holds of a key, gets them later."""
        router = self.router
        if router is None or not len(rows):
            return
        base = stored.base_offset
        attempts = None
        if base + int(rows[0]) < self.ledger.next_offset:  # some may have been delivered before
            attempts = self.ledger.attempts(base, rows)
        for consumer, mine in router.route(stored, rows, waiting=waiting):
            counts = None if attempts is None else attempts[np.searchsorted(rows, mine)]
            self._deliver(consumer, stored, mine, now_ns, effects, counts)
        for low, high in router.take_skipped(base):
            self.settle(low, high)

    def _deliver(
        self,
        consumer: Consumer,
        stored: Stored,
        rows: Rows,
        now_ns: int,
        effects: list[Deliver],
        attempts: np.ndarray[tuple[int], np.dtype[np.uint32]] | None = None,
    ) -> None:
        """One consumer gets some messages of a frame."""
        count, base = len(rows), stored.base_offset
        is_whole = count == stored.message_count
        if not self.tracks:
            self.ledger.move_to(base + int(rows[-1]) + 1)
        elif is_whole:
            self.ledger.hold(base, stored.end_offset, consumer.slot, now_ns)
        else:
            self.ledger.hold_rows(base, rows, consumer.slot, now_ns)
        is_whole = is_whole and attempts is None
        share = stored.frame_bytes * count // stored.message_count
        consumer.flow.take(stored.frame_bytes if is_whole else share, count)
        effects.append(Deliver(consumer, stored, None if is_whole else rows, attempts))
