"""One subscription on one partition: who gets which messages, what is unacked, what is acked.

IO-free: it takes events (attach, detach, ack, nack, time, dispatch) and returns or appends effects;
the worker turns a `Deliver` into frames on a socket. One engine serves all types and readers; they
differ in who may attach and in how the messages of a frame are divided (`_share_out`). What is the
case with each message stands in the ledger.

    settled below | settled, unacked, waiting, delayed, blocked | fresh
    --------------^ cursor                                    ^ next_offset   ^ visible
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.ledger.ledger import Rows, runs_of
from danube_fast.broker.records import Acked, Cursor, PendingGapsSet
from danube_fast.broker.sparse import existing
from danube_fast.broker.subscription.consumer import (
    PENDING,
    Consumer,
    Deliver,
    Gap,
    Parting,
    Pending,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.cuts import cut_frame, divide
from danube_fast.broker.subscription.returns import Returns
from danube_fast.broker.subscription.timers import NEVER, Timers
from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = ["Fetch", "OnDelayed", "Subscription"]

FRESH, WAITING = State.FRESH, State.WAITING
LOOK_AHEAD_MAX = 1 << 22
"""Messages that are looked at for consumers who are not there; each takes up to 22 bytes."""

Fetch = Callable[["Subscription", int], "Stored | Gap | Pending"]
"""The frame that holds an offset, a gap there, or PENDING: it is not here yet, and comes."""
OnDelayed = Callable[["Subscription", Stored], object]
"""Called with a frame whose delayed messages were put aside."""

_ONE_CONSUMER = (SubscriptionKind.EXCLUSIVE, SubscriptionKind.READER)
_IN_ORDER = (SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER)
_GROUPS = (SubscriptionKind.SHARED, SubscriptionKind.KEY_SHARED)
"""What one consumer has no credit for, another one may get: so frames are cut to credit."""


class Subscription(Returns):
    """State of one subscription on one partition."""

    __slots__ = (
        "_free_slots", "_sought", "ahead", "looked_count", "looked_until", "looks_ahead", "recorded", "start_count",
    )  # fmt: skip

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
        super().__init__(partition_id, name, kind, cursor, tracks=tracks, timers=timers)
        self.ahead: list[Stored] = []
        """Frames read from the log and not yet delivered; filled by the worker's fetch."""
        self.recorded = kind is SubscriptionKind.READER
        """Its creation is durable."""
        self.looks_ahead = False
        """Restored from a log: which of its messages are delayed, and until when, is not known yet."""
        self.looked_until = self.looked_count = 0
        """Where looking ahead goes on, and the messages that it has looked at."""
        self.start_count = 0
        """How often it started over."""
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
        consumer.slot = self._free_slots.pop() if self._free_slots else len(self.consumers)
        self.consumers.append(consumer)
        consumer.flow.users[consumer] = None
        if self.router is not None:
            self._reroute()

    def dismiss(self, consumer: Consumer) -> None:
        """Hand it nothing more; until it is detached it keeps what it has, and may ack it."""
        self.consumers.remove(consumer)
        consumer.flow.users.pop(consumer, None)

    def detach(self, consumer: Consumer, parting: Parting = Parting.CLOSED) -> None:
        """Remove a consumer; what it has waits for redelivery."""
        if consumer.slot < 0:
            return
        if consumer in self.consumers:
            self.dismiss(consumer)
        self.take_from(consumer, parting)
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

    def ack(self, consumer: Consumer, pairs: list[int] | bytes) -> None:
        """Acknowledge flat [start, end) pairs, as far as they are with the consumer."""
        if consumer.slot >= 0:
            self.ledger.ack(consumer.slot, pairs)

    def seek(self, offset: int) -> None:
        """Start over at `offset`: everything below counts as acked, everything above as new.
        Consumers stay attached and have nothing."""
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative; seek to 0 or above")
        self.start_over(offset)
        if self.tracks:
            self._sought = offset

    def start_over(self, offset: int) -> None:
        """Count all below as acked and nothing above as handed out; no record says so."""
        self.start_count += 1
        self.ledger.restart(offset)
        if self.router is not None:
            self.router.restart()
        self.next_offset = offset
        self.looked_until = self.looked_count = 0
        self.forget_returns()
        self.ahead.clear()

    # ------------------------------------------------------------ records

    def note_recorded(self) -> None:
        """Note that its creation is durable."""
        self.recorded = True

    @property
    def cursor_dirty(self) -> bool:
        """Something was acked or sought since the last `cursor_records`."""
        is_dirty = self._sought is not None or self.ledger.is_dirty or self.pending_gaps.is_dirty
        return self.tracks and is_dirty

    def cursor_records(self) -> list[Cursor | Acked | PendingGapsSet]:
        """Records of what changed since the last call: however much is acked above the cursor, a record only
        holds what is new."""
        records: list[Cursor | Acked | PendingGapsSet] = []
        if not self.tracks:
            return records
        if self.pending_gaps.is_dirty:
            self.pending_gaps.is_dirty = False
            records.append(self.pending_gaps.record(self.partition_id, self.name))
        if self._sought is not None:
            records.append(Cursor(self.partition_id, self.name, self._sought))
            self._sought = None
        while pairs := self.ledger.collect():
            records.append(Acked(self.partition_id, self.name, pairs))
        return records

    def restore(self, cursor: int, acked: list[int]) -> None:
        """Set what a cursor record says."""
        self.recorded = True
        self.start_over(cursor)
        self.restore_acked(acked)

    def restore_acked(self, ranges: list[int]) -> None:
        """Add what a record says, maybe not for the first time."""
        for i in range(0, len(ranges) - 1, 2):
            self.ledger.settle(ranges[i], ranges[i + 1])
        while self.ledger.collect():  # a record says so
            pass
        self.next_offset = self.cursor
        self.looks_ahead = self.tracks

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
            if not self.tracks:
                self._give_up_late(fetch, gaps, before)
        if self._hand_out_waiting(fetch, now_ns, effects, gaps):
            self._hand_out_fresh(visible, fetch, now_ns, effects, gaps)
        if self.tracks and len(effects) > before and self.armed_ns == NEVER:
            self.arm()
        return gaps

    def _hand_out_waiting(
        self, fetch: Fetch, now_ns: int, effects: list[Deliver], gaps: list[Gap]
    ) -> bool:
        """Hand out what waits, before what is fresh. False: nothing fresh may go out now."""
        ledger, router = self.ledger, self.router
        find: Callable[[], int | None] = ledger.first_waiting
        if router is not None:
            find = router.next_waiting
        while ledger.waiting:
            consumer = self.willing()
            if consumer is None:
                return False
            if (at := find()) is None:
                break
            if (found := fetch(self, at)) is PENDING:
                return self.kind not in _IN_ORDER  # the router keeps what is fresh behind its key
            if isinstance(found, Gap):
                gaps.append(found._replace(start=at, place=len(effects)))
                self.pass_waiting(at, found)
                continue
            # All that waits of one frame goes to one consumer: a frame is taken apart once.
            base = found.base_offset
            rows = self._there(found, ledger.select(base, at, found.end_offset, WAITING))
            if not len(rows):
                continue
            if self.rate is not None:
                if self.must_rest(self.rate, now_ns):
                    return False
                rows = rows[: self.rate.room(now_ns, found.message_bytes)]
            if router is not None:
                self._route(found, rows, now_ns, effects, waiting=True)
                continue
            self._deliver(consumer, found, rows, now_ns, effects, ledger.attempts(base, rows))
            self.pass_turn(consumer)
        return True

    def _give_up_late(self, fetch: Fetch, gaps: list[Gap], place: int) -> None:
        """Of a topic that keeps nothing: what waits for its consumers and is gone, or keeps others waiting
        because it is too much, is lost."""
        router = self.router
        while router is not None and (at := self.ledger.first_waiting()) is not None:
            found = fetch(self, at)
            if isinstance(found, Stored) and router.is_full:
                found = Gap(found.end_offset, "the consumer of their keys was too slow", lost=True)
            if not isinstance(found, Gap):
                break
            gaps.append(found._replace(start=at, place=place))
            self.pass_waiting(at, found)

    def _hand_out_fresh(
        self, visible: int, fetch: Fetch, now_ns: int, effects: list[Deliver], gaps: list[Gap]
    ) -> None:
        while self.next_offset < visible:
            if self.willing() is None or (self.router is not None and self.router.is_full):
                return
            if self.rate is not None and self.must_rest(self.rate, now_ns):
                return
            if not self._find_fresh(visible):
                return
            found = fetch(self, self.next_offset)
            if found is PENDING:
                return
            if isinstance(found, Gap):
                gaps.append(found._replace(start=self.next_offset, place=len(effects)))
                self._pass_fresh(found)
                continue
            base, rows = found.base_offset, self._take_fresh(found)
            if found.is_delayed and self.tracks and len(rows):
                rows = self.postpone(found, rows, now_ns)
            if self.rate is not None and len(rows):
                rows = rows[: self.rate.room(now_ns, found.message_bytes)]
                self.next_offset = base + int(rows[-1]) + 1
            if self.router is not None:
                self._route(found, rows, now_ns, effects, waiting=False)
            elif len(rows):
                self._share_out(found, rows, now_ns, effects)

    @property
    def _is_untouched(self) -> bool:
        """All from `next_offset` on is fresh."""
        ledger = self.ledger
        return not self.by_message or (
            self.next_offset >= ledger.next_offset and not ledger.settled_ahead
        )

    def _find_fresh(self, visible: int) -> bool:
        """Go on to the next fresh message; False: there is none. What is settled, unacked or put aside is
        not even read."""
        if not self._is_untouched:
            self.next_offset = self.ledger.first_fresh(self.next_offset, visible)
        return self.next_offset < visible

    def _take_fresh(self, found: Stored) -> Rows:
        """Rows of the fresh messages of a frame, from `next_offset` on, which goes behind the frame."""
        base, end = found.base_offset, found.end_offset
        if self._is_untouched:
            rows = np.arange(self.next_offset - base, end - base, dtype=np.int32)
        else:
            rows = self.ledger.select(base, self.next_offset, end, FRESH)
        self.next_offset = end
        return self._there(found, rows)

    def look_ahead(
        self, visible: int, fetch: Fetch, frames_max: int, on_delayed: OnDelayed
    ) -> bool:
        """Put the delayed messages at the beginning of the backlog aside, before a consumer is attached, so
        that none waits for that later; some frames of it. False: that was all."""
        for _ in range(frames_max):
            if not self.looks_ahead:
                return False
            found = self._put_aside(visible, fetch, on_delayed)
            if found is PENDING:
                break
            if not found:
                self.looks_ahead = False
                self.ahead = []
        return self.looks_ahead

    def _put_aside(self, visible: int, fetch: Fetch, on_delayed: OnDelayed) -> bool | Pending:
        """The delayed messages of the next frame; the others stay fresh, where they are. False: none, and
        what comes next is for consumers."""
        if self.consumers or self.looked_count > LOOK_AHEAD_MAX:
            return False
        at = self.ledger.first_fresh(max(self.next_offset, self.looked_until), visible)
        found = fetch(self, at) if at < visible else None
        if found is PENDING:
            return found
        if not isinstance(found, Stored) or not found.is_delayed:
            return False
        rows = self.ledger.select(found.base_offset, at, found.end_offset, FRESH)
        if (rows := self._there(found, rows)).size and not self.set_aside(found, rows):
            return False  # a frame that cannot be read: its consumer is told
        self.looked_until = found.end_offset
        self.looked_count += len(rows)
        on_delayed(self, found)
        return True

    def _there(self, found: Stored, rows: Rows) -> Rows:
        """Rows of messages that a frame still has; the others need no delivery any more."""
        if not found.is_sparse:
            return rows
        rows, gone = existing(found, rows)
        if self.by_message:
            for low, high in runs_of(gone, found.base_offset):
                self.settle(low, high)
        elif not len(rows):
            self.ledger.move_to(found.end_offset)
        return rows

    def _pass_fresh(self, gap: Gap) -> None:
        start, self.next_offset = self.next_offset, max(self.next_offset, gap.end)
        if self.by_message:
            settled = self.settle(start, gap.end)
        else:
            settled = gap.end - start
            self.ledger.restart(self.next_offset)
        self.lost_count += settled if gap.lost else 0

    def pass_on(self, stored: Stored, now_ns: int, effects: list[Deliver]) -> bool:
        """Hand out a whole frame that has just become visible, if that is all that `dispatch` would
        do; False: it may be more, and nothing was done."""
        consumer = self.next_taker(stored.base_offset)
        if consumer is None or stored.is_delayed:
            return False
        if self.kind is SubscriptionKind.SHARED and not consumer.flow.covers(stored):
            return False
        end = self.next_offset = stored.end_offset
        if self.tracks:
            slot, frame = consumer.slot, consumer.next_frame()
            self.ledger.deliver(stored.base_offset, end, slot, now_ns, frame)
            if self.armed_ns == NEVER:
                self.arm()
        else:
            self.ledger.move_to(end)
        consumer.flow.take(stored.frame_bytes, stored.message_count)
        effects.append(Deliver(consumer, stored, None, None))
        return True

    def next_taker(self, offset: int) -> Consumer | None:
        """The consumer that `pass_on` would hand a frame at `offset` to; None: `dispatch` has to look."""
        consumers = self.consumers
        if len(consumers) != 1 and not (consumers and self.kind is SubscriptionKind.FAILOVER):
            return None
        if self.next_offset != offset or not self.ledger.is_plain or self.router:
            return None
        return consumers[0] if self.rate is None and consumers[0].flow.willing else None

    # ------------------------------------------------------------ dividing

    def _share_out(self, stored: Stored, rows: Rows, now_ns: int, effects: list[Deliver]) -> None:
        """Contiguous blocks of one frame, as equal as credit lets them be, the odd ones in turn: the
        counts are those of round-robin by message, and acks stay ranges. What there is no credit for
        stays fresh; one consumer alone gets all."""
        everyone = self.consumers
        if self.kind is SubscriptionKind.FAILOVER:
            everyone = everyone[:1]
        turned = everyone[self.turn :] + everyone[: self.turn]
        order = [consumer for consumer in turned if consumer.flow.willing]
        rooms = [len(rows) + 1] * len(order)
        if self.kind is SubscriptionKind.SHARED:
            rooms = [consumer.flow.message_credit for consumer in order]
        shares = divide(len(rows), rooms)
        at, most = 0, max(shares)
        last, counts = order[0], self._counts(stored.base_offset, rows)
        for consumer, share in zip(order, shares, strict=True):
            if share:
                mine = slice(at, at + share)
                known = None if counts is None else counts[mine]
                at += self._deliver(consumer, stored, rows[mine], now_ns, effects, known)
            if share == most:
                last = consumer
        if at < len(rows):
            self.next_offset = stored.base_offset + int(rows[at])
        self.pass_turn(last)

    def _route(
        self, stored: Stored, rows: Rows, now_ns: int, effects: list[Deliver], *, waiting: bool
    ) -> None:
        """Every consumer gets the messages of its keys; who has no credit, or waits for what another
        consumer still holds of a key, gets them later."""
        router = self.router
        if router is None or not len(rows):
            return
        base = stored.base_offset
        attempts = self._counts(base, rows)
        for consumer, mine in router.route(stored, rows, waiting=waiting):
            counts = None if attempts is None else attempts[np.searchsorted(rows, mine)]
            given = self._deliver(consumer, stored, mine, now_ns, effects, counts)
            if given < len(mine):
                router.keep_waiting(consumer, base, mine[given:])
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
    ) -> int:
        """One consumer gets some messages of a frame, of a group no more than it has credit for, but for a
        part of the last one. How many it got."""
        base, flow, byte_count = stored.base_offset, consumer.flow, None
        if self.kind in _GROUPS:
            byte_count = flow.bytes_left
            rows = rows[: max(0, flow.message_credit if byte_count > 0 else 0)]
            attempts = None if attempts is None else attempts[: len(rows)]
        count, size, cut = len(rows), stored.frame_bytes, None
        is_whole = count == stored.message_count and attempts is None
        if not count:
            return 0
        if not is_whole or (byte_count is not None and byte_count < size):
            cut = cut_frame(stored, rows, attempts, byte_count)
            size = size * count // stored.message_count if cut is None else len(cut)
            is_whole = False
        if cut is not None and cut.row_count < count:
            count = cut.row_count
            rows, attempts = rows[:count], None if attempts is None else attempts[:count]
        frame = consumer.next_frame()
        if not self.by_message:
            self.ledger.move_to(base + int(rows[-1]) + 1)
        elif count == stored.message_count and not stored.is_sparse:
            self.ledger.deliver(base, stored.end_offset, consumer.slot, now_ns, frame)
        else:
            self.ledger.deliver_rows(base, rows, consumer.slot, now_ns, frame)
        if self.by_message and not self.tracks:
            self.ledger.ack(consumer.slot, [base, stored.end_offset])
        flow.take(size, count)
        if self.rate is not None:
            self.rate.take(now_ns, count, size)
        effects.append(Deliver(consumer, stored, None if is_whole else rows, attempts, cut))
        return count
