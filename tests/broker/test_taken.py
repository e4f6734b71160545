"""What counts as delivered when a consumer goes: the ledger beside a list of what was sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.ledger.ledger import EVERYTHING, Ledger, Taken
from danube_fast.broker.ledger.page_pool import PagePool
from danube_fast.broker.subscription.consumer import (
    UNREPORTED_MESSAGES,
    Consumer,
    Flow,
    Parting,
    SubscriptionKind,
)
from danube_fast.broker.subscription.policy import parse_policy
from danube_fast.broker.subscription.subscription import Subscription

FRAMES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=12)
"""Messages of a frame, and every which of them the consumer gets."""
RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=6)


def attempts(ledger: Ledger, offsets: list[int]) -> list[int]:
    rows = np.array(offsets, np.int32)
    counts = ledger.attempts(0, rows)
    return [0] * len(offsets) if counts is None else counts.tolist()


@settings(max_examples=300, deadline=None)
@given(
    frames=FRAMES, acked=RANGES, extended=RANGES, place=st.tuples(st.integers(0, 13), st.integers(0, 500)),
    count=st.integers(0, 200),
)  # fmt: skip
def test_a_place_in_what_was_sent_divides_what_is_held(frames, acked, extended, place, count):
    ledger, taken = Ledger(PagePool(), 0), Taken(*place)
    sent: dict[int, int] = {}
    at = 0
    for number, (size, step) in enumerate(frames):
        rows = np.arange(0, size, step, dtype=np.int32)
        ledger.deliver_rows(at, rows, 1, 5, number)
        sent.update((at + row, number) for row in rows.tolist())
        at += size
    ledger.deliver(at, at + 10, 2, 5, 0)  # of another consumer
    for low, length in extended:
        ledger.extend(low, low + length, 1, 7)
    for low, length in acked:
        ledger.ack(1, [low, low + length])
        for offset in range(low, low + length):
            sent.pop(offset, None)
    places = sorted((number, offset) for offset, number in sent.items())
    behind = [each for each in places if each >= taken]
    further = ledger.taken_next(1, taken, count)
    assert [each for each in behind if each < further] == behind[:count]
    ledger.give_back(1, taken)
    assert attempts(ledger, sorted(sent)) == [int((sent[o], o) < taken) for o in sorted(sent)]
    assert all(ledger.state_of(offset)[0] is State.WAITING for offset in sent)
    assert ledger.unacked == 10


@settings(max_examples=100, deadline=None)
@given(
    frames=FRAMES, place=st.tuples(st.integers(0, 13), st.integers(0, 500)), most=st.integers(0, 1)
)
def test_what_was_taken_fails_and_nothing_else(frames, place, most):
    ledger, taken = Ledger(PagePool(), 0), Taken(*place)
    sent: dict[int, int] = {}
    at = 0
    for number, (size, _) in enumerate(frames):
        ledger.deliver(at, at + size, 1, 5, number)
        sent.update((at + row, number) for row in range(size))
        at += size
    runs = ledger.fail_taken(1, taken, most)
    failed = {offset for low, high, _, _ in runs for offset in range(low, high)}
    assert failed == {offset for offset, number in sent.items() if (number, offset) < taken}
    assert all(failures == 1 and is_poison is (most == 0) for _, _, failures, is_poison in runs)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=30))
def test_attempts_go_to_another_ledger(pieces):
    ledger, there = Ledger(PagePool(), 0), Ledger(PagePool(), 0)
    at = 0
    for size, times in pieces:
        for _ in range(times):
            ledger.deliver(at, at + size, 1, 5)
            ledger.give_back(1)
        ledger.deliver(at, at + size, 1, 5)
        at += size
    ledger.ack(1, [0, 7, 11, 13])
    for offset in range(at):
        if ledger.state_of(offset)[0] in (State.SETTLED, State.SETTLED_NEW):
            there.settle(offset, offset + 1)
    there.set_attempts(ledger.all_attempts(at))
    assert there.all_attempts(at) == ledger.all_attempts(at)
    left = [o for o in range(at) if ledger.state_of(o)[0] not in (State.SETTLED, State.SETTLED_NEW)]
    assert attempts(there, left) == attempts(ledger, left)


def consumer_of(sub: Subscription, *, reports: bool) -> Consumer:
    consumer = Consumer(sub, 1, 1, Flow(), "c", reports=reports)
    sub.attach(consumer)
    return consumer


@pytest.mark.parametrize(
    ("parting", "delivered", "failed"),
    [
        (Parting.CLOSED, 10, 0),
        (Parting.LOST, 10 + UNREPORTED_MESSAGES, 0),
        (Parting.DIED, 10 + UNREPORTED_MESSAGES, 10),
    ],
)
def test_how_a_consumer_leaves_decides_what_counts(parting, delivered, failed):
    sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
    sub.policy = parse_policy({"max_redelivery_count": 0, "poison_policy": "block"})
    consumer = consumer_of(sub, reports=True)
    sub.ledger.deliver(0, 200, consumer.slot, 0, consumer.next_frame())
    consumer.report(0, 10)
    sub.detach(consumer, parting)
    assert attempts(sub.ledger, list(range(200))) == [int(o < delivered) for o in range(200)]
    assert sub.ledger.blocked == failed
    assert sub.ledger.waiting == 200 - failed
    assert sub.redelivered_count == 200


def test_of_a_consumer_that_does_not_report_everything_counts_and_nothing_fails():
    sub = Subscription(1, "s", SubscriptionKind.SHARED, 0, tracks=True)
    sub.policy = parse_policy({"max_redelivery_count": 0, "poison_policy": "drop"})
    consumer = consumer_of(sub, reports=False)
    sub.ledger.deliver(0, 200, consumer.slot, 0, consumer.next_frame())
    consumer.report(0, 10)
    assert consumer.taken is EVERYTHING
    sub.detach(consumer, Parting.DIED)
    assert attempts(sub.ledger, list(range(200))) == [1] * 200
    assert sub.ledger.waiting == 200
    assert sub.dropped_count == 0


def test_a_report_beyond_all_numbers_is_bounded():
    sub = Subscription(1, "s", SubscriptionKind.EXCLUSIVE, 0, tracks=True)
    consumer = consumer_of(sub, reports=True)
    sub.ledger.deliver(0, 5, consumer.slot, 0, consumer.next_frame())
    consumer.report(2**64 - 1, -5)
    sub.detach(consumer, Parting.DIED)
    assert attempts(sub.ledger, list(range(5))) == [1] * 5
