"""Failure policies: delays, ack timeouts, poison, extensions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionAssigned
from danube_fast.broker.subscription.consumer import SubscriptionKind
from danube_fast.broker.subscription.policy import Backoff, FailurePolicy, Poison, parse_policy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.broker.subscription.timers import NEVER, Timers
from danube_fast.errors import InvalidArgument
from tests.broker.test_subscription import Topic, consumer_of, counts, offsets, run

MS = 1_000_000
SECOND = 1000 * MS


def subscription(timers: Timers | None = None, **policy: object) -> Subscription:
    sub = Subscription(1, "s", SubscriptionKind.SHARED, 0, tracks=True, timers=timers)
    sub.policy = parse_policy(policy)
    return sub


def seen(sub: Subscription, topic: Topic, now_ns: int) -> list[int]:
    return sorted(offset for effect in run(sub, topic, now_ns) for offset in offsets(effect))


def test_delays_double_up_to_a_bound_and_are_a_little_longer_than_that():
    policy = FailurePolicy(base_redelivery_delay_ms=100, max_redelivery_delay_ms=1000)
    assert [policy.delay_ns(n, 0.0) // MS for n in range(1, 7)] == [100, 200, 400, 800, 1000, 1000]
    assert 200 * MS < policy.delay_ns(2, 0.999) < 241 * MS
    fixed = parse_policy({"backoff_strategy": "fixed"}, policy)
    assert [fixed.delay_ns(n, 0.0) // MS for n in (1, 5)] == [100, 100]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_redelivery_count": 255}, "254"),
        ({"ack_timeout_ms": -1}, "ack_timeout_ms"),
        ({"poison_policy": "explode"}, "poison_policy"),
        ({"poison_policy": "dead_letter"}, "dead_letter_topic"),
        ({"dead_letter_topic": "nonsense"}, "topic"),
        ({"max_redeliveries": 3}, "max_redeliveries"),
        ({"ack_timeout_ms": "soon"}, "ack_timeout_ms"),
    ],
)
def test_a_policy_that_cannot_be_says_why(values, text):
    with pytest.raises(InvalidArgument, match=text):
        parse_policy(values)


def test_an_ack_timeout_gives_back_what_is_held_for_too_long_and_nothing_else():
    timers = Timers()
    sub, topic = subscription(timers, ack_timeout_ms=1000, base_redelivery_delay_ms=0), Topic(5)
    one = consumer_of(sub, 1)
    run(sub, topic, 0)
    topic.add(5)
    run(sub, topic, 600 * MS)
    sub.ack(one, [0, 2])
    assert timers.next_ns <= 1100 * MS
    assert timers.due(999 * MS) == []
    (due,) = timers.due(1100 * MS)
    assert due is sub
    sub.on_time(1100 * MS)
    two = consumer_of(sub, 2)
    one.flow.paused = True
    effects = run(sub, topic, 1100 * MS)
    assert [(effect.consumer, counts(effect)) for effect in effects] == [(two, {2: 1, 3: 1, 4: 1})]
    assert timers.next_ns < NEVER


def test_a_nack_and_the_timeout_count_once_whichever_comes_first():
    sub, topic = subscription(ack_timeout_ms=1000, base_redelivery_delay_ms=500), Topic(1)
    consumer = consumer_of(sub, 1)
    run(sub, topic, 0)
    sub.nack(consumer, [0, 1], None, 900 * MS, "busy")
    sub.on_time(1001 * MS)  # its delivery is over: nothing to time out
    assert seen(sub, topic, 1001 * MS) == []
    sub.on_time(1600 * MS)
    (effect,) = run(sub, topic, 1600 * MS)
    assert counts(effect) == {0: 1}
    sub.on_time(2601 * MS)
    sub.nack(consumer, [0, 1], None, 2602 * MS, "too late")
    sub.on_time(10 * SECOND)
    (effect,) = run(sub, topic, 10 * SECOND)
    assert counts(effect) == {0: 2}


def test_extended_messages_stay_until_their_own_time():
    sub, topic = subscription(ack_timeout_ms=1000, base_redelivery_delay_ms=0), Topic(4)
    consumer = consumer_of(sub, 1)
    run(sub, topic, 0)
    sub.extend(consumer, [1, 3], 5 * SECOND)
    sub.on_time(1001 * MS)
    assert seen(sub, topic, 1001 * MS) == [0, 3]
    sub.ack(consumer, [0, 1, 3, 4])
    sub.on_time(4999 * MS)
    assert seen(sub, topic, 4999 * MS) == []
    sub.on_time(5 * SECOND)
    assert seen(sub, topic, 5 * SECOND) == [1, 2]


def test_a_timer_that_is_armed_for_a_subscription_that_is_gone_finds_nothing():
    timers: Timers[Subscription] = Timers()
    assigned = PartitionAssigned(1, "/default/t", 0, "reliable", "fsync", 1)
    partition = Partition(assigned, 0, 0, timers)
    partition.visible = 10
    sub, _ = partition.subscribe("s", SubscriptionKind.SHARED, 0)
    topic = Topic(5, 5)
    consumer = consumer_of(sub, 1)
    run(sub, topic)
    sub.extend(consumer, [0, 4], 5 * SECOND)
    sub.nack(consumer, [6, 8], SECOND, 0, "")
    partition.forget_subscription("s")
    for late in timers.due(100 * SECOND):
        late.on_time(100 * SECOND)
    assert sub.ledger.unacked == sub.ledger.waiting == 0


def test_poison_is_blocked_and_only_that_message():
    sub, topic = subscription(max_redelivery_count=2, base_redelivery_delay_ms=0), Topic(3)
    consumer = consumer_of(sub, 1)
    for attempt in range(3):
        assert seen(sub, topic, 0) == ([0, 1, 2] if not attempt else [1])
        sub.nack(consumer, [1, 2], None, 0, "bad")
    assert seen(sub, topic, 0) == []
    sub.ack(consumer, [0, 3])
    assert (sub.cursor, sub.ledger.blocked, sub.poisoned) == (1, 1, [])
    sub.set_policy(parse_policy({"max_redelivery_count": 9, "base_redelivery_delay_ms": 0}))
    (effect,) = run(sub, topic, 0)
    assert counts(effect) == {1: 3}


def test_poison_is_dropped_or_becomes_a_dead_letter():
    for policy in ("drop", "dead_letter"):
        sub = subscription(
            max_redelivery_count=0, poison_policy=policy, dead_letter_topic="/default/dead"
        )
        topic = Topic(3)
        consumer = consumer_of(sub, 1)
        run(sub, topic, 0)
        sub.nack(consumer, [1, 2], None, 0, "bad")
        sub.ack(consumer, [0, 1, 2, 3])
        if policy == "drop":
            assert (sub.cursor, sub.dropped_count) == (3, 1)
            continue
        ((start, end, failures, reason),) = sub.poisoned
        assert (start, end, failures, reason, sub.cursor) == (1, 2, 1, "bad", 1)
        sub.dead_letter_done(1, 2)
        assert (sub.cursor, sub.dead_letter_count, sub.dropped_count) == (3, 1, 0)


def test_redeliveries_never_stop_first_deliveries():
    sub, topic = subscription(base_redelivery_delay_ms=60_000), Topic(5)
    consumer = consumer_of(sub, 1)
    run(sub, topic, 0)
    sub.nack(consumer, [0, 5], None, 0, "bad")
    topic.add(5)
    assert seen(sub, topic, 1) == [5, 6, 7, 8, 9]


def test_deaths_raise_the_count_but_are_no_failures():
    sub, topic = subscription(max_redelivery_count=1, base_redelivery_delay_ms=0), Topic(1)
    for attempt in range(5):
        consumer = consumer_of(sub, attempt)
        (effect,) = run(sub, topic, 0)
        assert counts(effect) == ({0: attempt} if attempt else {})
        sub.detach(consumer)
    assert sub.ledger.waiting == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), max_size=30))
def test_timers_call_everybody_at_the_earliest_time_and_once(entries):
    class Owner:
        armed_ns = NEVER

    timers, owners = Timers(), [Owner() for _ in range(51)]
    wanted: dict[int, int] = {}
    for number, due in entries:
        timers.arm(owners[number], due)
        wanted[number] = min(due, wanted.get(number, NEVER))
    called: dict[int, int] = {}
    for now in range(101):
        for owner in timers.due(now):
            assert owners.index(owner) not in called
            called[owners.index(owner)] = now
    assert called == wanted
    assert timers.next_ns == NEVER


def test_the_defaults_are_those_of_the_documentation():
    policy = FailurePolicy()
    assert (policy.max_redelivery_count, policy.ack_timeout_ms) == (5, 30_000)
    assert (policy.base_redelivery_delay_ms, policy.max_redelivery_delay_ms) == (1000, 60_000)
    assert (policy.backoff_strategy, policy.poison_policy) == (Backoff.EXPONENTIAL, Poison.BLOCK)
