"""Redelivery: what comes back to a subscription, and when. Nacks, ack timeouts, backoff, delayed messages.

The half of a subscription's state machine that deals with time; `subscription.py` has the other,
who gets what. IO-free like that one.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.admission.rates import Rate
from danube_fast.broker.ledger.layout import State
from danube_fast.broker.ledger.ledger import Failed, Ledger, Rows, runs_of
from danube_fast.broker.ledger.page_pool import PAGES, ROUTED_PAGES
from danube_fast.broker.subscription.consumer import (
    UNREPORTED_MESSAGES,
    Consumer,
    Gap,
    Parting,
    Poisoned,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.delays import Delays
from danube_fast.broker.subscription.pending_gaps import PendingGaps
from danube_fast.broker.subscription.policy import FailurePolicy, Poison
from danube_fast.broker.subscription.prefetched import Prefetched, due_times
from danube_fast.broker.subscription.routing import Router
from danube_fast.broker.subscription.timers import NEVER, Timers

__all__ = ["Returns"]

DELAYED, BLOCKED, WAITING = State.DELAYED, State.BLOCKED, State.WAITING
GAP_AT_ONCE = 1 << 16
"""Offsets of a gap in which waiting messages are looked for at once."""
GOLDEN = 2654435761
"""Spreads the jitter of messages that lie side by side."""
TIMER_STEP_NS = 20_000_000
"""Deadlines are looked at together that lie so close: it saves turns."""


class Returns:
    """Base of `Subscription`: its ledger, and what its messages wait for."""

    __slots__ = (
        "__weakref__", "_delayed", "_extended_ns", "_rested_until_ns", "_timers", "armed_ns", "by_message",
        "consumers", "counted_until", "dead_letter_count", "delays", "dropped_count", "expired_count",
        "idle_since_ns", "kind", "ledger", "lost_count", "lost_counted", "name", "next_offset", "partition_id",
        "pending_gaps", "poisoned", "policy", "policy_setter", "prefetched", "rate", "redelivered_count", "router", "tracks", "turn",
    )  # fmt: skip

    def __init__(
        self,
        partition_id: int,
        name: str,
        kind: SubscriptionKind,
        cursor: int,
        *,
        tracks: bool,
        timers: Timers[Any] | None = None,
    ) -> None:
        """`tracks`: deliveries must be acked (reliable topics, not for readers)."""
        self.partition_id = partition_id
        self.name = name
        self.kind = kind
        self.tracks = tracks
        routed = kind is SubscriptionKind.KEY_SHARED
        self.by_message = tracks or routed
        """The ledger knows of each message what is the case with it; else it knows how far it has come."""
        self.ledger = Ledger(ROUTED_PAGES if routed else PAGES, cursor)
        self.router = Router(self.ledger) if routed else None
        self.next_offset = cursor
        """The first message that was never looked at."""
        self.policy = FailurePolicy()
        self.policy_setter = ""
        """Principal that set it: dead letters need its right. Empty: no one was asked who they are."""
        self.rate: Rate | None = None
        """How fast messages may go out; None: as fast as they are taken."""
        self.consumers: list[Consumer] = []
        self.turn = 0
        self.idle_since_ns = 0
        """When its last consumer left, monotonic; 0: not known yet, or there are some."""
        self.poisoned: list[Poisoned] = []
        """Effects: what is to become dead letters; `dead_letter_done` says that it did."""
        self.armed_ns = NEVER
        self.redelivered_count = 0
        self.lost_count = self.lost_counted = 0
        """Messages that it did not get, and how many of them `take_lost` has told."""
        self.expired_count = 0
        """Messages that were too old or too many before they were acked."""
        self.dropped_count = 0
        """Messages that failed too often and were given up."""
        self.dead_letter_count = 0
        self.delays = Delays(self.ledger)
        """Messages whose deliver-at time has not come."""
        self.pending_gaps = PendingGaps()
        """What it lost while it had no consumer."""
        self.prefetched = Prefetched(self.ledger)
        """Some of them, ready to go out."""
        self._timers = timers or Timers()
        self._delayed: list[tuple[int, int, int]] = []
        """Ranges that failed, and when they come again."""
        self._extended_ns = NEVER
        """No deadline of what was extended is over before."""
        self._rested_until_ns = 0
        """The rate is used up until then."""
        self.counted_until = 0
        """Below, attempts of fresh messages may be known, from before the partition came here."""

    @property
    def cursor(self) -> int:
        """All below is acked, or does not exist."""
        return self.ledger.cursor

    def settle(self, start: int, end: int) -> int:
        """Settle [start, end), with a consumer or not: it needs no delivery any more. How much of it did."""
        settled = self.ledger.settle(start, end)
        self.next_offset = max(self.next_offset, self.ledger.cursor)
        return settled

    def forget_returns(self) -> None:
        """Let nothing come back: the ledger starts over."""
        self._delayed.clear()
        self._extended_ns = NEVER
        self.poisoned.clear()
        self.delays.clear()
        self.prefetched.clear()
        self.counted_until = 0

    def all_attempts(self) -> list[int]:
        """How often messages were delivered, for where the partition goes: flat [start, end, entry]."""
        return self.ledger.all_attempts(max(self.ledger.next_offset, self.counted_until))

    def restore_attempts(self, runs: list[int]) -> None:
        """Note how often messages were delivered where the partition comes from: flat [start, end, entry]."""
        self.ledger.set_attempts(runs)
        self.counted_until = max([self.counted_until, *runs[1::3]])

    def _counts(self, base: int, rows: Rows) -> NDArray[np.uint32] | None:
        """How often messages that count as fresh were delivered before; None: none was."""
        known_until = self.counted_until
        if self.router is not None:  # what waited may be fresh again
            known_until = max(known_until, self.ledger.next_offset)
        return self.ledger.attempts(base, rows) if base + int(rows[0]) < known_until else None

    # ------------------------------------------------------------ losses

    def pass_waiting(self, at: int, gap: Gap) -> None:
        """Pass over what waits from `at` on, as it lies in a gap and is never delivered."""
        while at < min(gap.end, self.ledger.next_offset):
            end = min(gap.end, self.ledger.next_offset, at + GAP_AT_ONCE)
            for low, high in runs_of(self.ledger.select(at, at, end, WAITING), at):
                settled = self.settle(low, high)
                self.lost_count += settled if gap.lost else 0
            at = end

    def expire(self, until: int, reason: str) -> Gap | None:
        """Count what was not acked below `until` as acked. The range that is lost so, if there is any."""
        start = self.cursor
        if not self.tracks or until <= start:
            return None
        count = self.settle(start, until)
        self.expired_count += count
        self.lost_count += count
        return Gap(until, reason, lost=True, start=start) if count else None

    def take_lost(self) -> int:
        """Count the messages that were lost since the last call."""
        lost, self.lost_counted = self.lost_count - self.lost_counted, self.lost_count
        return lost

    # ------------------------------------------------------------ failures

    def nack(
        self, consumer: Consumer, pairs: list[int], delay_ns: int | None, now_ns: int, reason: str
    ) -> None:
        """Give flat [start, end) pairs back: they failed. They come again after `delay_ns`, with None
        after what the policy says; those that failed too often are treated as the policy says."""
        if consumer in self.consumers:
            failed = self.ledger.fail(consumer.slot, pairs, self.policy.max_redelivery_count)
            self._failed(failed, delay_ns, now_ns, reason)

    def take_from(self, consumer: Consumer, parting: Parting) -> None:
        """Let what is with a consumer wait for redelivery, before anything newer. What its application had taken
        counts as delivered; if the consumer died, what it had reported failed, too, and may have failed too
        often."""
        ledger, slot, taken = self.ledger, consumer.slot, consumer.taken
        if parting is not Parting.CLOSED and consumer.reports:
            reported, taken = taken, ledger.taken_next(slot, taken, UNREPORTED_MESSAGES)
            if parting is Parting.DIED:
                failed = ledger.fail_taken(slot, reported, self.policy.max_redelivery_count)
                self._failed(failed, 0, 0, "its consumer died")
        before = ledger.waiting
        ledger.give_back(slot, taken)
        self.redelivered_count += ledger.waiting - before

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
                self.ledger.wake(start, end, DELAYED)
            else:
                heapq.heappush(self._delayed, (now_ns + wait_ns, start, end))
        if failed:
            self._rewake()
        self.arm()

    def _poison(self, poisoned: Poisoned) -> None:
        """Do what the policy says with messages that are BLOCKED."""
        if self.policy.poison_policy is Poison.DROP:
            self.dropped_count += self.settle(poisoned.start, poisoned.end)
        elif self.policy.poison_policy is Poison.DEAD_LETTER:
            self.poisoned.append(poisoned)

    def take_poisoned(self) -> list[Poisoned]:
        """Hand over the messages that are to become dead letters."""
        poisoned, self.poisoned = self.poisoned, []
        return poisoned

    def dead_letter_done(self, start: int, end: int) -> None:
        """Blocked messages are in the dead-letter topic, durably."""
        for low, high in runs_of(self.ledger.select(start, start, end, BLOCKED), start):
            self.dead_letter_count += self.settle(low, high)

    def set_rate(self, rate: Rate | None) -> None:
        """Bound how fast messages go out; None: do not."""
        self.rate = rate

    def set_policy(self, policy: FailurePolicy, setter: str = "") -> None:
        """Put another failure policy in force; what is blocked gets another chance. `setter`: the principal that set it."""
        self.policy, self.policy_setter = policy, setter
        self.poisoned.clear()
        if self.ledger.blocked:
            self._wake(self.cursor, self.ledger.next_offset, BLOCKED)
        self.arm()

    def _wake(self, start: int, end: int, state: State) -> None:
        self.ledger.wake(start, end, state)
        self._rewake()

    def _rewake(self) -> None:
        """Messages wait again: they may have to be looked at anew."""
        if self.router is not None and self.router.woken():
            self.next_offset = min(self.next_offset, self.ledger.rewind())

    # ------------------------------------------------------------ time

    def extend(self, consumer: Consumer, pairs: list[int], until_ns: int) -> None:
        """Let the consumer keep what is with it of these pairs until then, whatever the timeout is."""
        if consumer.slot < 0:
            return
        for at in range(0, len(pairs) - 1, 2):
            self.ledger.extend(pairs[at], pairs[at + 1], consumer.slot, until_ns)
        self._extended_ns = min(self._extended_ns, until_ns)
        self.arm()

    def arm(self) -> None:
        """See to it that `on_time` is called when something is due."""
        due = self._delayed[0][0] if self._delayed else NEVER
        if self.delays:
            due = min(due, self.delays.first_ns - self._timers.wall_ahead_ns)
        if self._rested_until_ns:
            due = min(due, self._rested_until_ns)
        timeout_ns = self.policy.ack_timeout_ns
        if timeout_ns and self.tracks:
            oldest = self.ledger.oldest()
            if oldest is not None:
                due = min(due, oldest[1] + timeout_ns + TIMER_STEP_NS)
            due = min(due, self._extended_ns)
        if due < NEVER:
            self._timers.arm(self, due)

    def on_time(self, now_ns: int) -> None:
        """Delayed messages wait from now on if their time has come; what is unacked for too long failed."""
        self._rested_until_ns = 0
        if self.delays and self.delays.wake(now_ns + self._timers.wall_ahead_ns):
            self._rewake()
        while self._delayed and self._delayed[0][0] <= now_ns:
            _, start, end = heapq.heappop(self._delayed)
            self._wake(start, end, DELAYED)
        timeout_ns = self.policy.ack_timeout_ns
        if timeout_ns:
            if self._extended_ns <= now_ns:
                late, next_ns = self.ledger.overdue(now_ns)
                self._extended_ns = NEVER if next_ns is None else next_ns + TIMER_STEP_NS
                for row in late:
                    self._time_out(row, now_ns)
            while (oldest := self.ledger.oldest()) and oldest[1] + timeout_ns <= now_ns:
                self._time_out(oldest[0], now_ns)
        self.arm()

    def _time_out(self, row: int, now_ns: int) -> None:
        slot = self.ledger.slot_of(row)
        for consumer in self.consumers:
            if consumer.slot == slot:
                self.pass_turn(consumer)  # let another one try
        failed = self.ledger.fail_row(row, self.policy.max_redelivery_count)
        self._failed(failed, None, now_ns, "the ack timeout went by")

    def idle_ns(self, now_ns: int) -> int:
        """How long there has been no consumer, as far as it was asked without a break."""
        if self.consumers:
            self.idle_since_ns = 0
            return 0
        self.idle_since_ns = self.idle_since_ns or now_ns
        return now_ns - self.idle_since_ns

    def forget_idle(self) -> None:
        """Begin anew with `idle_ns`."""
        self.idle_since_ns = 0

    def pass_turn(self, consumer: Consumer) -> None:
        """Give the turn to the consumer behind `consumer`."""
        if len(self.consumers) > 1 and self.kind is SubscriptionKind.SHARED:
            self.turn = (self.consumers.index(consumer) + 1) % len(self.consumers)

    def postpone(self, stored: Stored, rows: Rows, now_ns: int) -> Rows:
        """Put messages of a frame aside whose deliver-at time has not come; the others."""
        times = due_times(stored)
        if times is None:
            return rows
        late = times[rows] > now_ns + self._timers.wall_ahead_ns
        self._put_off(stored, rows[late], times)
        return np.ascontiguousarray(rows[~late]) if late.any() else rows

    def set_aside(self, stored: Stored, rows: Rows) -> bool:
        """Put messages of a frame aside that have a deliver-at time, whether it has come or not: those come
        out of their turn. False: the frame cannot be read."""
        times = due_times(stored)
        if times is not None:
            self._put_off(stored, rows[times[rows] > 0], times)
        return times is not None

    def _put_off(self, stored: Stored, rows: Rows, times: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        rows = np.ascontiguousarray(rows)
        if self.router is not None:
            self.router.note(stored, rows)
        self.delays.postpone(stored.base_offset, rows, np.ascontiguousarray(times[rows], np.int64))
        self.arm()

    def must_rest(self, rate: Rate, now_ns: int) -> bool:
        """Whether the rate is used up; it goes on as soon as it is not."""
        wait_ns = rate.wait_ns(now_ns)
        if wait_ns > 0:
            self.rest(now_ns, wait_ns)
        return wait_ns > 0

    def rest(self, now_ns: int, wait_ns: int) -> None:
        """Hand out nothing for so long, as the rate is used up; a burst makes up for looking again a little late."""
        self._rested_until_ns = now_ns + max(wait_ns, TIMER_STEP_NS)
        self.arm()
