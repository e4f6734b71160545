"""The subscription engine alone: who gets what, what is held, what comes again."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.broker import subscription
from danube_fast.broker.subscription import (
    Consumer,
    Deliver,
    Flow,
    Gap,
    Stored,
    Subscription,
    SubscriptionKind,
)
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

    def fetch(self, subscription: Subscription, offset: int) -> Stored | Gap | None:
        for frame in self.frames:
            if frame.base_offset <= offset < frame.end_offset:
                return frame
            if frame.base_offset > offset:
                return Gap(frame.base_offset, "missing")
        return None


def consumer_of(sub: Subscription, number: int, *, credit: int = 1 << 40) -> Consumer:
    flow = Flow()
    flow.byte_credit = flow.message_credit = credit
    consumer = Consumer(sub, number, 1, flow, f"c{number}")
    sub.attach(consumer)
    return consumer


def run(sub: Subscription, topic: Topic) -> list[Deliver]:
    effects: list[Deliver] = []
    sub.dispatch(topic.end, topic.fetch, effects)
    return effects


def offsets(effect: Deliver) -> list[int]:
    ranges = effect.ranges or [(effect.stored.base_offset, effect.stored.end_offset)]
    return [offset for low, high in ranges for offset in range(low, high)]


def shared(cursor: int = 0) -> Subscription:
    return Subscription(1, "s", SubscriptionKind.SHARED, cursor, tracks=True)


def exclusive(cursor: int = 0) -> Subscription:
    return Subscription(1, "s", SubscriptionKind.EXCLUSIVE, cursor, tracks=True)


def test_exclusive_gets_whole_frames_in_order_and_the_cursor_follows_acks():
    sub, topic = exclusive(), Topic(3, 4)
    consumer = consumer_of(sub, 1)
    effects = run(sub, topic)
    assert [effect.ranges for effect in effects] == [None, None]
    assert functools.reduce(operator.iadd, map(offsets, effects), []) == list(range(7))
    sub.ack(consumer, [2, 5])
    assert (sub.cursor, sub.acked.flat()) == (0, [2, 5])
    sub.ack(consumer, [0, 2])
    assert (sub.cursor, sub.acked.flat(), sub.held_count) == (5, [], 2)


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
    assert effect.attempts == [(2, 5, 1)]
    sub.detach(two)
    three = consumer_of(sub, 3)
    effects = run(sub, topic)
    assert all(effect.consumer is three for effect in effects)
    counts = {
        offset: count
        for effect in effects
        for low, high, count in effect.attempts or []
        for offset in range(low, high)
    }
    assert counts == {2: 2, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1}


def test_no_credit_no_delivery_and_the_other_one_goes_on():
    sub, topic = shared(), Topic(4, 4)
    poor, rich = consumer_of(sub, 1, credit=0), consumer_of(sub, 2)
    assert {effect.consumer for effect in run(sub, topic)} == {rich}
    assert poor.held.count == 0


def test_nack_comes_again_at_once_or_when_due():
    sub, topic = exclusive(), Topic(4)
    consumer = consumer_of(sub, 1)
    run(sub, topic)
    sub.nack(consumer, [1, 2], 0)
    sub.nack(consumer, [3, 4], 1_000)
    (effect,) = run(sub, topic)
    assert offsets(effect) == [1]
    sub.release_due(999)
    assert run(sub, topic) == []
    sub.release_due(1_000)
    (effect,) = run(sub, topic)
    assert (offsets(effect), effect.attempts) == ([3], [(3, 4, 1)])


def test_a_gap_is_settled_so_that_the_cursor_passes_it():
    sub, topic = exclusive(), Topic(3)
    topic.end = 10
    topic.add(2)
    consumer = consumer_of(sub, 1)
    gaps = sub.dispatch(topic.end, topic.fetch, [])
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
                sub.nack(consumer, [value, value + 3], 0)
        run(sub, topic)
        held = [n for c in sub.consumers for low, high in c.held for n in range(low, high)]
        waiting = [n for low, high in sub.redeliver for n in range(low, high)]
        acked = list(range(sub.cursor)) + [n for lo, hi in sub.acked for n in range(lo, hi)]
        assert sorted(held + waiting + acked) == list(range(sub.next_offset))
        if sub.consumers:
            assert sub.next_offset == topic.end and not waiting


some = st.lists(st.integers(0, 59), max_size=30)


def test_what_waits_of_one_frame_goes_out_in_one_piece():
    topic = Topic(10, 10)
    sub = Subscription(1, "s", SubscriptionKind.SHARED, 0, tracks=True)
    one, two = consumer_of(sub, 1), consumer_of(sub, 2)
    run(sub, topic)
    held = list(one.held) + list(two.held)
    assert sum(end - start for start, end in held) == 20
    for consumer in (one, two):
        odd = [edge for start, end in consumer.held for i in range(start, end) if i % 2 for edge in (i, i + 1)]  # fmt: skip
        even = [edge for start, end in consumer.held for i in range(start, end) if not i % 2 for edge in (i, i + 1)]  # fmt: skip
        sub.ack(consumer, even)
        sub.nack(consumer, odd, 0)
    effects = run(sub, topic)
    assert [(effect.stored.base_offset, len(effect.ranges or [])) for effect in effects] == [
        (0, 5), (10, 5)
    ]  # fmt: skip
    assert {effect.consumer for effect in effects} == {one, two}


def test_delayed_redeliveries_come_when_they_are_due():
    topic = Topic(10)
    sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
    consumer = consumer_of(sub, 1)
    run(sub, topic)
    for offset, due_ns in ((5, 300), (2, 100), (7, 200)):
        sub.nack(consumer, [offset, offset + 1], due_ns)
    for now_ns, offset in ((100, 2), (200, 7), (300, 5)):
        sub.release_due(now_ns)
        (effect,) = run(sub, topic)
        assert effect.ranges == [(offset, offset + 1)]
    assert not sub.delayed


def test_lost_messages_are_counted_and_unused_offsets_are_not():
    topic = Topic(10, 10)
    topic.frames[0].base_offset = 4

    def lossy(subscription: Subscription, offset: int) -> Stored | Gap | None:
        if offset < 2:
            return Gap(2, "gone", lost=True)
        return topic.fetch(subscription, offset)

    sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
    consumer_of(sub, 1)
    assert [gap.end for gap in sub.dispatch(topic.end, lossy, [])] == [2, 4]
    assert (sub.lost_count, sub.cursor) == (2, 4)


@given(st.lists(st.tuples(st.sampled_from(["ack", "nack", "later", "leave"]), some), max_size=12))
def test_many_ranges_at_once_do_what_few_do(steps):
    def play(many: int) -> list[object]:
        seen: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subscription, "MANY_RANGES", many)
            topic = Topic(20, 20, 20)
            sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
            consumer = consumer_of(sub, 1)
            run(sub, topic)
            for now_ns, (what, chosen) in enumerate(steps, 1):
                pairs = [edge for offset in chosen for edge in (offset, offset + 1)]
                if what == "ack":
                    sub.ack(consumer, pairs)
                elif what == "leave":
                    sub.detach(consumer)
                    consumer = consumer_of(sub, 1)
                else:
                    sub.nack(consumer, pairs, now_ns + 1 if what == "later" else 0)
                sub.release_due(now_ns)
                effects = run(sub, topic)
                pieces = [(effect.ranges, effect.attempts) for effect in effects]
                counted = [
                    (n, count)
                    for low, high, count in sub.attempts.segments(0, 60)
                    for n in range(low, high)
                ]
                ranges = [effect[0] for effect in pieces]
                seen.append((sub.cursor, sub.acked.flat(), consumer.held.flat(), ranges, counted))
        return seen

    assert play(0) == play(1000)


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
        elif step == "join" and (kind is SubscriptionKind.SHARED or consumer is None):
            consumer_of(sub, number + 2)
        elif consumer is None:
            continue
        elif step == "ack":
            sub.ack(consumer, [max(0, topic.end - 2), topic.end])
        elif step == "nack":
            sub.nack(consumer, [0, 1 + number], 0)
        elif step == "leave":
            sub.detach(consumer)
        elif step == "pause":
            consumer.flow.paused = True
        else:
            consumer.flow.byte_credit = 0 if step == "poor" else 100
    return sub, topic


def _state(sub: Subscription, effects: list[Deliver]) -> object:
    return (
        sub.cursor, sub.next_offset, sub.turn, list(sub.redeliver), list(sub.acked),
        [(list(c.held), c.flow.byte_credit, c.flow.message_credit, c.flow.ran_out) for c in sub.consumers],
        [(e.consumer.consumer_id, e.stored.base_offset, e.ranges, e.attempts) for e in effects],
    )  # fmt: skip


@given(steps=_STEPS, kind=st.sampled_from(list(SubscriptionKind)), tracks=st.booleans())
def test_a_frame_that_is_passed_on_is_what_dispatch_would_do(steps, kind, tracks):
    """Or nothing happens, and dispatch does it."""
    (quick, topic), (slow, _) = _after(steps, kind, tracks), _after(steps, kind, tracks)
    topic.add(2)
    before = _state(quick, [])
    effects: list[Deliver] = []
    if quick.pass_on(topic.frames[-1], effects):
        assert _state(quick, effects) == _state(slow, run(slow, topic))
    else:
        assert _state(quick, effects) == before


@pytest.mark.parametrize("tracks", [True, False])
def test_the_only_consumer_at_the_tail_gets_a_frame_at_once(tracks):
    sub, topic = _after(["frame", "run"], SubscriptionKind.SHARED, tracks)
    topic.add(3)
    effects: list[Deliver] = []
    assert sub.pass_on(topic.frames[-1], effects)
    assert [offsets(effect) for effect in effects] == [[1, 2, 3]]
    assert not sub.pass_on(topic.frames[-1], effects), "twice"
