"""The subscription engine alone: who gets what, what is held, what comes again."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.subscription.consumer import (
    PENDING,
    Consumer,
    Deliver,
    Flow,
    Gap,
    Pending,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import FailedPrecondition, InvalidArgument


class Topic:
    """Frames of given sizes, back to back from offset 0."""

    def __init__(self, *sizes: int) -> None:
        self.frames: list[Stored] = []
        self.end = 0
        for size in sizes:
            self.add(size)

    def add(self, size: int) -> None:
        frame = Stored(1, self.end, self.end + size, size, 100 * size, 7, b"", 0)
        self.frames.append(frame)
        self.end += size

    def fetch(self, subscription: Subscription, offset: int) -> Stored | Gap | Pending:
        for frame in self.frames:
            if frame.base_offset <= offset < frame.end_offset:
                return frame
            if frame.base_offset > offset:
                return Gap(frame.base_offset, "missing")
        return PENDING


def consumer_of(sub: Subscription, number: int, *, credit: int = 1 << 40) -> Consumer:
    flow = Flow()
    flow.byte_credit = flow.message_credit = credit
    consumer = Consumer(sub, number, 1, flow, f"c{number}")
    sub.attach(consumer)
    return consumer


def run(sub: Subscription, topic: Topic, now_ns: int = 0) -> list[Deliver]:
    effects: list[Deliver] = []
    sub.dispatch(topic.end, topic.fetch, now_ns, effects)
    return effects


def offsets(effect: Deliver) -> list[int]:
    if effect.rows is None:
        return list(range(effect.stored.base_offset, effect.stored.end_offset))
    return [effect.stored.base_offset + row for row in effect.rows.tolist()]


def counts(effect: Deliver) -> dict[int, int]:
    """Offset -> how often it was delivered before."""
    if effect.attempts is None:
        return {}
    return dict(zip(offsets(effect), effect.attempts.tolist(), strict=True))


def in_state(sub: Subscription, state: State) -> list[int]:
    return [n for n in range(sub.next_offset) if sub.ledger.state_of(n)[0] == state]


def acked_ahead(sub: Subscription) -> list[int]:
    return sub.ledger.settled_pairs()


def held(sub: Subscription, consumer: Consumer) -> list[int]:
    wanted = (State.UNACKED, consumer.slot)
    return [n for n in range(sub.next_offset) if sub.ledger.state_of(n) == wanted]


def shared(cursor: int = 0) -> Subscription:
    return Subscription(1, "s", SubscriptionKind.SHARED, cursor, tracks=True)


def exclusive(cursor: int = 0) -> Subscription:
    return Subscription(1, "s", SubscriptionKind.EXCLUSIVE, cursor, tracks=True)


def test_exclusive_gets_whole_frames_in_order_and_the_cursor_follows_acks():
    sub, topic = exclusive(), Topic(3, 4)
    consumer = consumer_of(sub, 1)
    effects = run(sub, topic)
    assert [effect.rows for effect in effects] == [None, None]
    assert functools.reduce(operator.iadd, map(offsets, effects), []) == list(range(7))
    sub.ack(consumer, [2, 5])
    assert (sub.cursor, acked_ahead(sub)) == (0, [2, 5])
    sub.ack(consumer, [0, 2])
    assert (sub.cursor, acked_ahead(sub), sub.ledger.unacked) == (5, [], 2)


def test_a_second_exclusive_consumer_is_refused_until_the_first_is_gone():
    sub = exclusive()
    first = consumer_of(sub, 1)
    with pytest.raises(FailedPrecondition, match="c1"):
        consumer_of(sub, 2)
    sub.detach(first)
    consumer_of(sub, 3)


def test_thirty_six_messages_one_by_one_over_three_shared_consumers_are_twelve_each():
    sub, topic = shared(), Topic()
    consumers = [consumer_of(sub, n) for n in range(3)]
    got = dict.fromkeys(consumers, 0)
    for _ in range(36):
        topic.add(1)
        for effect in run(sub, topic):
            got[effect.consumer] += len(offsets(effect))
    assert list(got.values()) == [12, 12, 12]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 5))
def test_shared_division_is_exact_round_robin_by_count(sizes, consumer_count):
    sub, topic = shared(), Topic()
    consumers = [consumer_of(sub, n) for n in range(consumer_count)]
    got: dict[Consumer, list[int]] = {consumer: [] for consumer in consumers}
    for size in sizes:
        topic.add(size)
        for effect in run(sub, topic):
            got[effect.consumer] += offsets(effect)
    assert sorted(functools.reduce(operator.iadd, got.values(), [])) == list(range(topic.end))
    counts = [len(part) for part in got.values()]
    assert max(counts) - min(counts) <= 1


def test_acks_are_tied_to_the_holder():
    sub, topic = shared(), Topic(10)
    one, two = consumer_of(sub, 1), consumer_of(sub, 2)
    run(sub, topic)
    sub.ack(one, [0, 10])
    assert sub.cursor == 5, "the other half is held by the other consumer"
    sub.ack(two, [0, 10])
    assert sub.cursor == 10


def test_what_a_dead_consumer_held_goes_to_the_others_with_a_count():
    sub, topic = shared(), Topic(10)
    one, two = consumer_of(sub, 1), consumer_of(sub, 2)
    run(sub, topic)
    sub.ack(one, [0, 2])
    sub.detach(one)
    (effect,) = run(sub, topic)
    assert effect.consumer is two
    assert offsets(effect) == [2, 3, 4]
    assert counts(effect) == {2: 1, 3: 1, 4: 1}
    sub.detach(two)
    three = consumer_of(sub, 3)
    effects = run(sub, topic)
    assert all(effect.consumer is three for effect in effects)
    told = {offset: count for effect in effects for offset, count in counts(effect).items()}
    assert told == {2: 2, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1}


def test_no_credit_no_delivery_and_the_other_one_goes_on():
    sub, topic = shared(), Topic(4, 4)
    poor, rich = consumer_of(sub, 1, credit=0), consumer_of(sub, 2)
    assert {effect.consumer for effect in run(sub, topic)} == {rich}
    assert poor.unacked == 0


def test_nack_comes_again_at_once_or_when_due():
    sub, topic = exclusive(), Topic(4)
    consumer = consumer_of(sub, 1)
    run(sub, topic)
    sub.nack(consumer, [1, 2], 0, 0, "")
    sub.nack(consumer, [3, 4], 1_000, 0, "")
    (effect,) = run(sub, topic)
    assert offsets(effect) == [1]
    sub.on_time(999)
    assert run(sub, topic) == []
    sub.on_time(1_000)
    (effect,) = run(sub, topic)
    assert (offsets(effect), counts(effect)) == ([3], {3: 1})


def test_a_gap_is_settled_so_that_the_cursor_passes_it():
    sub, topic = exclusive(), Topic(3)
    topic.end = 10
    topic.add(2)
    consumer = consumer_of(sub, 1)
    gaps = sub.dispatch(topic.end, topic.fetch, 0, [])
    assert [gap.end for gap in gaps] == [10]
    sub.ack(consumer, [0, 3])
    sub.ack(consumer, [10, 12])
    assert sub.cursor == 12


def test_acked_ranges_above_a_restored_cursor_are_not_delivered_again():
    sub, topic = exclusive(), Topic(6, 6)
    sub.restore(2, [4, 5, 8, 12])
    consumer_of(sub, 1)
    effects = run(sub, topic)
    assert [offsets(effect) for effect in effects] == [[2, 3, 5], [6, 7]]


def test_seek_starts_over():
    sub, topic = exclusive(), Topic(5)
    consumer = consumer_of(sub, 1)
    run(sub, topic)
    sub.ack(consumer, [0, 5])
    sub.seek(2)
    (effect,) = run(sub, topic)
    assert offsets(effect) == [2, 3, 4]
    with pytest.raises(InvalidArgument):
        sub.seek(-1)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 9)),
            st.tuples(st.just("join"), st.integers(1, 6)),
            st.tuples(st.just("leave"), st.integers(0, 3)),
            st.tuples(st.just("ack"), st.integers(0, 60)),
            st.tuples(st.just("nack"), st.integers(0, 60)),
        ),
        max_size=60,
    )
)
def test_every_offset_is_acked_held_or_waiting_and_nobody_holds_what_another_holds(steps):
    sub, topic = shared(), Topic()
    number = 0
    for what, value in steps:
        if what == "add":
            topic.add(value)
        elif what == "join":
            number += 1
            consumer_of(sub, number)
        elif what == "leave" and sub.consumers:
            sub.detach(sub.consumers[value % len(sub.consumers)])
        elif sub.consumers and what in ("ack", "nack"):
            consumer = sub.consumers[value % len(sub.consumers)]
            if what == "ack":
                sub.ack(consumer, [value, value + 3])
            else:
                sub.nack(consumer, [value, value + 3], 0, 0, "")
        run(sub, topic)
        mine = [n for consumer in sub.consumers for n in held(sub, consumer)]
        waiting, blocked = in_state(sub, State.WAITING), in_state(sub, State.BLOCKED)
        acked = in_state(sub, State.SETTLED) + in_state(sub, State.SETTLED_NEW)
        assert sorted(mine + waiting + acked + blocked) == list(range(sub.next_offset))
        if sub.consumers:
            assert sub.next_offset == topic.end and not waiting


def test_what_waits_of_one_frame_goes_out_in_one_piece():
    topic = Topic(10, 10)
    sub = Subscription(1, "s", SubscriptionKind.SHARED, 0, tracks=True)
    one, two = consumer_of(sub, 1), consumer_of(sub, 2)
    run(sub, topic)
    assert one.unacked + two.unacked == 20
    for consumer in (one, two):
        mine = held(sub, consumer)
        sub.ack(consumer, [edge for n in mine if not n % 2 for edge in (n, n + 1)])
        sub.nack(consumer, [edge for n in mine if n % 2 for edge in (n, n + 1)], 0, 0, "")
    effects = run(sub, topic)
    assert [(effect.stored.base_offset, len(offsets(effect))) for effect in effects] == [
        (0, 5), (10, 5)
    ]  # fmt: skip
    assert {effect.consumer for effect in effects} == {one, two}


def test_delayed_redeliveries_come_when_they_are_due():
    topic = Topic(10)
    sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
    consumer = consumer_of(sub, 1)
    run(sub, topic)
    for offset, due_ns in ((5, 300), (2, 100), (7, 200)):
        sub.nack(consumer, [offset, offset + 1], due_ns, 0, "")
    for now_ns, offset in ((100, 2), (200, 7), (300, 5)):
        sub.on_time(now_ns)
        (effect,) = run(sub, topic)
        assert offsets(effect) == [offset]
    assert not sub.ledger.delayed


def test_lost_messages_are_counted_and_unused_offsets_are_not():
    topic = Topic(10, 10)
    topic.frames[0].base_offset = 4

    def lossy(subscription: Subscription, offset: int) -> Stored | Gap | Pending:
        if offset < 2:
            return Gap(2, "gone", lost=True)
        return topic.fetch(subscription, offset)

    sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
    consumer_of(sub, 1)
    assert [gap.end for gap in sub.dispatch(topic.end, lossy, 0, [])] == [2, 4]
    assert (sub.lost_count, sub.cursor) == (2, 4)


PLAIN_KINDS = [kind for kind in SubscriptionKind if kind is not SubscriptionKind.KEY_SHARED]
"""Those that never look into a frame."""
SEVERAL = (SubscriptionKind.SHARED, SubscriptionKind.FAILOVER)
_STEPS = st.lists(
    st.sampled_from(["frame", "ack", "nack", "run", "pause", "poor", "rich", "leave", "join"]),
    max_size=12,
)


def _after(steps: list[str], kind: SubscriptionKind, tracks: bool) -> tuple[Subscription, Topic]:
    """A subscription that has lived through some steps."""
    sub, topic = Subscription(1, "s", kind, 0, tracks=tracks), Topic()
    consumer_of(sub, 1)
    for number, step in enumerate(steps):
        consumer = sub.consumers[0] if sub.consumers else None
        if step == "frame":
            topic.add(1 + number % 3)
        elif step == "run":
            run(sub, topic)
        elif step == "join" and (consumer is None or kind in SEVERAL):
            consumer_of(sub, number + 2)
        elif consumer is None:
            continue
        elif step == "ack":
            sub.ack(consumer, [max(0, topic.end - 2), topic.end])
        elif step == "nack":
            sub.nack(consumer, [0, 1 + number], 0, 0, "")
        elif step == "leave":
            sub.detach(consumer)
        elif step == "pause":
            consumer.flow.paused = True
        else:
            consumer.flow.byte_credit = 0 if step == "poor" else 100
    return sub, topic


def _state(sub: Subscription, effects: list[Deliver]) -> object:
    return (
        sub.cursor, sub.next_offset, sub.turn, in_state(sub, State.WAITING), acked_ahead(sub),
        [(held(sub, c), c.flow.byte_credit, c.flow.message_credit, c.flow.ran_out) for c in sub.consumers],
        [(e.consumer.consumer_id, e.stored.base_offset, e.rows, e.attempts) for e in effects],
    )  # fmt: skip


@settings(deadline=None)
@given(steps=_STEPS, kind=st.sampled_from(PLAIN_KINDS), tracks=st.booleans())
def test_a_frame_that_is_passed_on_is_what_dispatch_would_do(steps, kind, tracks):
    """Or nothing happens, and dispatch does it."""
    (quick, topic), (slow, _) = _after(steps, kind, tracks), _after(steps, kind, tracks)
    topic.add(2)
    before = _state(quick, [])
    effects: list[Deliver] = []
    if quick.pass_on(topic.frames[-1], 0, effects):
        assert _state(quick, effects) == _state(slow, run(slow, topic))
    else:
        assert _state(quick, effects) == before


@pytest.mark.parametrize("tracks", [True, False])
def test_the_only_consumer_at_the_tail_gets_a_frame_at_once(tracks):
    sub, topic = _after(["frame", "run"], SubscriptionKind.SHARED, tracks)
    topic.add(3)
    effects: list[Deliver] = []
    assert sub.pass_on(topic.frames[-1], 0, effects)
    assert [offsets(effect) for effect in effects] == [[1, 2, 3]]
    assert not sub.pass_on(topic.frames[-1], 0, effects), "twice"
