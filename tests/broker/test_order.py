"""Nothing overtakes, at the engine alone: whatever is read late, delayed, read ahead, given back or begun anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.subscription import delays, subscription
from danube_fast.broker.subscription.consumer import (
    PENDING,
    Consumer,
    Flow,
    Gap,
    Pending,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.broker.subscription.timers import Timers
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

    def room(self, now_ns: int, message_bytes: int) -> int:
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

    def fetch(self, sub: Subscription, offset: int) -> Stored | Gap | Pending:
        if offset in self.gone:
            return Gap(self.gone.stop, "trimmed", lost=True)
        if (cut := sub.prefetched.take(offset)) is not None:
            return cut
        if offset < self.tail:
            if self.reads >= self.reads_max:
                return PENDING
            self.reads += 1
        return next((f for f in self.frames if f.base_offset <= offset < f.end_offset), PENDING)

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
        def on_delayed(sub: Subscription, stored: Stored) -> None:
            sub.prefetched.prefetch(stored, 0, WALL + self.now_ns + 20 * MS)

        self.reads = 0
        return self.sub.look_ahead(self.end, self.fetch, frames, on_delayed)

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


# ---------------------------------------------------------------- delays


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, KEY_SHARED])
@pytest.mark.parametrize("looked", [1, 3, 100])
def test_a_restart_turns_nothing_round_that_is_not_delayed(
    kind: SubscriptionKind, looked: int
) -> None:
    """Every frame has one delayed message; they are read ahead, and a consumer comes before time goes on."""
    broker = Broker(kind)
    for _ in range(10):
        broker.add([None, None, 5 * SECOND, None])
    broker.new_life()
    broker.look_ahead(looked)
    broker.join()
    undelayed = [offset for offset in range(40) if offset % 4 != 2]
    assert drained(broker) == undelayed
    broker.tick()
    assert drained(broker) == []
    broker.now_ns = 5 * SECOND
    broker.tick()
    assert drained(broker) == list(range(2, 40, 4))


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER, KEY_SHARED])
@pytest.mark.parametrize("wake_max", [1, 2, 7])
def test_few_that_are_woken_at_a_time_turn_nothing_round(
    kind: SubscriptionKind, wake_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delays, "WAKE_MAX", wake_max)
    broker = Broker(kind)
    for _ in range(6):
        broker.add([None, SECOND, None, 1, None, SECOND])
    broker.new_life()
    while broker.look_ahead(1):
        pass
    broker.now_ns = MS
    broker.tick()
    broker.join()
    came = drained(broker)
    assert [at for at in came if broker.due[at] is None] == list(range(0, 36, 2))
    while broker.sub.delays.first_ns <= WALL + broker.now_ns:
        broker.tick()
        came += drained(broker)
    assert [at for at in came if broker.due[at] == 1] == list(range(3, 36, 6))
    broker.now_ns = SECOND
    late = []
    while broker.sub.delays:
        broker.tick()
        late += drained(broker)
    assert late == [at for at in range(36) if broker.due[at] == SECOND], (
        "those due at once, by offset"
    )


def test_a_look_ahead_is_bounded_by_what_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only few of the messages are delayed: the ledger keeps pages for all of them."""
    monkeypatch.setattr(subscription, "LOOK_AHEAD_MAX", 40)
    broker = Broker(SHARED)
    for _ in range(20):
        broker.add([None] * 9 + [SECOND])
    broker.new_life()
    assert broker.look_ahead(100) is False
    assert 4 <= broker.sub.ledger.delayed <= 5


def test_a_seek_behind_a_look_ahead_begins_anew() -> None:
    broker = Broker(EXCLUSIVE)
    for _ in range(5):
        broker.add([None, SECOND])
    broker.new_life()
    broker.look_ahead(2)
    broker.sub.seek(2)
    broker.look_ahead(100)
    assert broker.sub.ledger.delayed == 4
    broker.join()
    assert drained(broker) == [2, 4, 6, 8]


# ---------------------------------------------------------------- everything together


class Story:
    """One seed: what happens to a subscription, and in which order."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.broker = Broker(self.draw.choice((EXCLUSIVE, FAILOVER, KEY_SHARED, KEY_SHARED)))
        self.has_filters = self.broker.kind is KEY_SHARED and self.draw.random() < 0.4
        self.broker.reads_max = self.draw.choice((0, 1, 2, 1 << 30))
        self.rate = Allowance(self.draw.randrange(1, 8)) if self.draw.random() < 0.3 else None
        self.broker.sub.rate = self.rate
        self.joined = 0

    def step(self) -> None:
        steps = (
            self.publish, self.publish, self.join, self.join, self.leave, self.ack, self.ack,
            self.nack, self.pass_time, self.evict, self.restart, self.look, self.look, self.turn,
            self.turn, self.turn,
        )  # fmt: skip
        self.draw.choice(steps)()

    def publish(self) -> None:
        draw, count = self.draw, self.draw.randrange(1, 6)
        share = draw.choice((0.0, 0.2, 0.6))
        due = [draw.randrange(60) * MS if draw.random() < share else None for _ in range(count)]
        self.broker.add(due, [draw.choice((b"a", b"b", b"c")) for _ in range(count)])

    def join(self) -> None:
        broker = self.broker
        if len(broker.hands) >= (1 if broker.kind is EXCLUSIVE else 3):
            return
        filters = self.draw.choice(((), ("a",), ("a", "b"))) if self.has_filters else ()
        self.joined += 1
        credit = self.draw.choice((PLENTY, PLENTY, 3))
        broker.join(f"c{self.joined}", *filters, credit=credit)

    def leave(self) -> None:
        if self.broker.hands and self.draw.random() < 0.5:
            self.broker.leave(self.draw.choice(list(self.broker.hands)))

    def some(self) -> tuple[Consumer, list[int]] | None:
        holding = [consumer for consumer, hand in self.broker.hands.items() if hand]
        if not holding:
            return None
        consumer = self.draw.choice(holding)
        share = self.draw.choice((0.3, 1.0))
        hand = sorted(self.broker.hands[consumer])
        return consumer, [offset for offset in hand if self.draw.random() < share]

    def ack(self) -> None:
        if (found := self.some()) is not None:
            consumer, offsets = found
            self.broker.ack(consumer, offsets)
            consumer.flow.grant(0, len(offsets))

    def nack(self) -> None:
        if self.draw.random() < 0.3 and (found := self.some()) is not None:
            consumer, offsets = found
            pairs = [edge for offset in offsets[:2] for edge in (offset, offset + 1)]
            self.broker.failed.update(offsets[:2])
            self.broker.hands[consumer].difference_update(offsets[:2])
            delay_ns = self.draw.choice((0, 5 * MS))
            self.broker.sub.nack(consumer, pairs, delay_ns, self.broker.now_ns, "no")
            consumer.flow.grant(0, len(pairs) // 2)

    def pass_time(self) -> None:
        self.broker.now_ns += self.draw.choice((1, 10, 30)) * MS
        self.broker.tick()

    def evict(self) -> None:
        """Frames leave memory."""
        bases = [frame.base_offset for frame in self.broker.frames] + [self.broker.end]
        self.broker.tail = max(self.broker.tail, self.draw.choice(bases))

    def restart(self) -> None:
        if self.draw.random() < 0.2:
            sub = self.broker.sub
            self.broker.new_life(sub.cursor, tuple(sub.ledger.settled_pairs())).rate = self.rate
            self.broker.tail = self.draw.choice((self.broker.tail, self.broker.end))

    def look(self) -> None:
        self.broker.look_ahead(self.draw.randrange(1, 4))

    def turn(self) -> None:
        if self.rate is not None:
            self.rate.refill()
        self.broker.dispatch()

    def end(self) -> None:
        """Everybody comes, and gets all there is."""
        broker = self.broker
        broker.reads_max = max(1, broker.reads_max)
        for consumer in list(broker.hands):
            broker.leave(consumer)
        consumer = broker.join("last")
        for _ in range(4 * broker.end + 20):
            self.turn()
            broker.now_ns += 5 * MS
            broker.tick()
        assert broker.end == 0 or broker.hands[consumer] == {
            offset
            for offset in range(broker.end)
            if broker.sub.ledger.state_of(offset)[0] is State.UNACKED
        }
        broker.ack(consumer, sorted(broker.hands[consumer]))
        assert broker.sub.cursor == broker.end, "a message waits for ever"


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_nothing_overtakes_whatever_happens(seed: int) -> None:
    story = Story(seed)
    wake_max = delays.WAKE_MAX
    delays.WAKE_MAX = story.draw.choice((1, 3, wake_max))
    try:
        for _ in range(story.draw.randrange(10, 80)):
            story.step()
        story.end()
    finally:
        delays.WAKE_MAX = wake_max
