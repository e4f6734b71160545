"""Nothing overtakes, at the engine alone: whatever is read late, delayed, read ahead, given back or begun anew."""

from __future__ import annotations

from typing import Any

import pytest

from danube_fast.broker.consumer import Consumer, Flow, Gap, Stored, SubscriptionKind
from danube_fast.broker.ledger_layout import State
from danube_fast.broker.policy import FailurePolicy
from danube_fast.broker.subscription import Subscription
from danube_fast.broker.timers import Timers
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import stamp
from danube_fast.frame.view import FrameView

MS = 1_000_000
SECOND = 1000 * MS
WALL = 1_800_000_000 * SECOND
PLENTY = 1 << 30
EXCLUSIVE, FAILOVER = SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER
SHARED, KEY_SHARED = SubscriptionKind.SHARED, SubscriptionKind.KEY_SHARED
_stamp = direct(stamp)


class Allowance:
    """A rate without a clock: so many messages at a time, as often as `refill` says."""

    def __init__(self, room: int) -> None:
        self._most = self._left = room

    def refill(self) -> None:
        self._left = self._most

    def wait_ns(self, now_ns: int) -> int:
        return 0 if self._left > 0 else MS

    def room(self, now_ns: int) -> int:
        return self._left

    def take(self, now_ns: int, messages: int, byte_count: int) -> None:
        self._left -= messages


class Broker:
    """A subscription on messages with keys and times, which lie in the log up to `tail` and in memory from
    there on; only so many frames of the log are read in one dispatch."""

    def __init__(self, kind: SubscriptionKind) -> None:
        self.kind = kind
        self.timers: Timers[Subscription] = Timers()
        self.timers.wall_ahead_ns = WALL
        self.frames: list[Stored] = []
        self.keys: list[bytes] = []
        self.due: list[int | None] = []
        self.tail = 0
        self.reads_max = 1 << 30
        self.reads = 0
        self.now_ns = 0
        self.gone = range(0)
        """Offsets whose frames were trimmed."""
        self.sub = self.new_life()

    def new_life(self, cursor: int = 0, settled: tuple[int, ...] = ()) -> Subscription:
        """What a restart or a move leaves: what is settled, and nothing else."""
        self.sub = Subscription(1, "s", self.kind, cursor, tracks=True, timers=self.timers)
        self.sub.policy = FailurePolicy(ack_timeout_ms=0)
        if settled or cursor:
            self.sub.restore(cursor, list(settled))
        self.sub.looks_ahead = True
        self.hands: dict[Consumer, set[int]] = {}
        self.got: list[int] = []
        self.failed: set[int] = set()
        return self.sub

    @property
    def end(self) -> int:
        return len(self.keys)

    def add(self, due: list[int | None], keys: list[bytes] | None = None) -> None:
        """Publish a frame of messages due at times since the beginning, ns."""
        keys = keys or [b"k"] * len(due)
        times = [None if each is None else WALL + each for each in due]
        is_delayed = any(each is not None for each in due)
        frame = encode_frame([b"x"] * len(due), keys=keys, deliver_at=times if is_delayed else None)
        base = self.end
        _stamp(address_of(frame), 0, 0, base, 1, 0, 1, 1, len(due))
        self.keys += keys
        self.due += due
        self.frames.append(
            Stored(1, base, self.end, len(due), len(frame), 7, frame, 0, is_delayed=is_delayed)
        )

    def join(self, name: str = "c", *filters: str, credit: int = PLENTY) -> Consumer:
        flow = Flow()
        flow.byte_credit, flow.message_credit = PLENTY, credit
        consumer = Consumer(self.sub, len(self.hands), 1, flow, name, filters)
        self.sub.attach(consumer)
        self.hands[consumer] = set()
        return consumer

    def leave(self, consumer: Consumer) -> None:
        self.sub.detach(consumer)
        del self.hands[consumer]

    def fetch(self, sub: Subscription, offset: int) -> Stored | Gap | None:
        if offset in self.gone:
            return Gap(self.gone.stop, "trimmed", lost=True)
        if (cut := sub.foreseen.take(offset)) is not None:
            return cut
        if offset < self.tail:
            if self.reads >= self.reads_max:
                return None
            self.reads += 1
        return next((f for f in self.frames if f.base_offset <= offset < f.end_offset), None)

    def dispatch(self) -> list[int]:
        """One turn; the offsets that it handed out."""
        self.reads = 0
        effects: list[Any] = []
        self.sub.dispatch(self.end, self.fetch, self.now_ns, effects)
        out = []
        for effect in effects:
            stored, rows = effect.stored, effect.rows
            if rows is None:
                whole = range(stored.message_count)
                rows = FrameView(stored.memory).offset_deltas() if stored.is_sparse else whole
            for offset in [stored.base_offset + int(row) for row in rows]:
                self._check(effect.consumer, offset)
                self.hands[effect.consumer].add(offset)
                out.append(offset)
        self.got += out
        return out

    def _check(self, consumer: Consumer, offset: int) -> None:
        """Every message before an undelayed one, in its partition or of its key, is settled or in the
        hands of the same consumer; unless it failed or is delayed."""
        if self.due[offset] is not None or offset in self.failed or self.kind is SHARED:
            return
        for other in range(offset):
            if self.due[other] is not None or other in self.failed:
                continue
            if self.kind is KEY_SHARED and self.keys[other] != self.keys[offset]:
                continue
            is_settled = self.sub.ledger.state_of(other)[0] in (State.SETTLED, State.SETTLED_NEW)
            assert is_settled or other in self.hands[consumer], f"{offset} overtook {other}"

    def look_ahead(self, frames: int) -> bool:
        def foresee(sub: Subscription, stored: Stored) -> None:
            sub.foreseen.foresee(stored, 0, WALL + self.now_ns + 20 * MS)

        self.reads = 0
        return self.sub.look_ahead(self.end, self.fetch, frames, foresee)

    def tick(self) -> None:
        """What the worker does every few milliseconds."""
        for sub in self.timers.due(self.now_ns):
            sub.on_time(self.now_ns)

    def ack(self, consumer: Consumer, offsets: list[int]) -> None:
        self.sub.ack(consumer, [edge for offset in offsets for edge in (offset, offset + 1)])
        self.hands[consumer].difference_update(offsets)


def drained(broker: Broker, turns: int = 10_000) -> list[int]:
    """Dispatch until nothing comes."""
    out: list[int] = []
    for _ in range(turns):
        came = broker.dispatch()
        if not came:
            return out
        out += came
    raise AssertionError("there is no end to it")


# ---------------------------------------------------------------- the budget of a turn


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
@pytest.mark.parametrize("reads_max", [0, 1, 3])
def test_nothing_fresh_goes_before_what_a_gone_consumer_held(
    kind: SubscriptionKind, reads_max: int
) -> None:
    broker = Broker(kind)
    for _ in range(10):
        broker.add([None] * 4)
    first = broker.join("first")
    assert broker.dispatch() == list(range(40))
    for _ in range(3):
        broker.add([None] * 4)
    broker.tail = 40
    broker.reads_max = reads_max
    broker.leave(first)
    broker.join("second")
    assert broker.dispatch() == list(range(4 * reads_max))
    broker.reads_max = 1
    assert drained(broker) == list(range(4 * reads_max, 52))


def test_a_key_waits_for_its_redelivery_and_others_go_on() -> None:
    broker = Broker(KEY_SHARED)
    first = broker.join("first")
    broker.add([None] * 4, [b"a", b"a", b"b", b"b"])
    assert broker.dispatch() == [0, 1, 2, 3]
    broker.add([None] * 4, [b"a", b"c", b"b", b"c"])
    broker.tail, broker.reads_max = 4, 0
    broker.leave(first)
    broker.join("second")
    assert broker.dispatch() == [5, 7]
    broker.reads_max = 1
    assert drained(broker) == [0, 1, 2, 3, 4, 6]


def test_a_shared_subscription_hands_out_fresh_ones_while_it_waits_for_the_log() -> None:
    broker = Broker(SHARED)
    first = broker.join("first")
    broker.add([None] * 4)
    broker.dispatch()
    broker.add([None] * 2)
    broker.tail, broker.reads_max = 4, 0
    broker.leave(first)
    broker.join("second")
    assert broker.dispatch() == [4, 5]
    broker.reads_max = 1
    assert drained(broker) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, KEY_SHARED, SHARED])
def test_what_was_held_and_is_gone_from_the_log_holds_up_nobody(kind: SubscriptionKind) -> None:
    broker = Broker(kind)
    first = broker.join("first")
    for _ in range(3):
        broker.add([None] * 4)
    broker.dispatch()
    broker.add([None] * 4)
    broker.tail, broker.reads_max = 12, 1
    broker.leave(first)
    broker.gone = range(4, 10)
    broker.join("second")
    assert sorted(drained(broker)) == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15]
    assert broker.sub.lost_count == 6
