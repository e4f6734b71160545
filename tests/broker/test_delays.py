"""Delayed delivery and dispatch rates: nothing early, nothing lost, nobody held up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.ledger.ledger import Ledger
from danube_fast.broker.ledger.page_pool import PAGES
from danube_fast.broker.subscription.consumer import Consumer, Flow, Stored, SubscriptionKind
from danube_fast.broker.subscription.delays import Delays
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.subscription.prefetched import CUTS_MAX
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.broker.subscription.timers import NEVER, Timers
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import stamp
from danube_fast.frame.view import FrameView
from danube_fast.ring.buckets import Bucket, BucketTable

MS = 1_000_000
SECOND = 1000 * MS
WALL = 1_800_000_000 * SECOND
PLENTY = 1 << 30
_stamp = direct(stamp)


class Delayed:
    """A subscription on frames of messages that each have a deliver-at time or none, and its clock."""

    def __init__(self, kind: SubscriptionKind = SubscriptionKind.SHARED) -> None:
        self.timers: Timers[Subscription] = Timers()
        self.timers.wall_ahead_ns = WALL
        self.sub = Subscription(1, "s", kind, 0, tracks=True, timers=self.timers)
        self.sub.policy = FailurePolicy(ack_timeout_ms=0)
        self.frames: list[Stored] = []
        self.end = 0
        self.now_ns = 0
        self.cut: list[int] = []
        """Offsets that needed no frame."""
        self.got: list[tuple[int, Consumer, int]] = []
        """When, who, which offset."""
        self.bytes_sent = 0
        """Of whole frames, and of those that were cut out of some."""

    def join(self, number: int = 1, credit: int = PLENTY) -> Consumer:
        flow = Flow()
        flow.byte_credit, flow.message_credit = PLENTY, credit
        consumer = Consumer(self.sub, number, 1, flow, f"c{number}")
        self.sub.attach(consumer)
        return consumer

    def add(self, dues: list[int | None], keys: list[bytes] | None = None) -> None:
        """Messages due at times since the beginning, ns."""
        times = [None if due is None else WALL + due for due in dues]
        frame = encode_frame([b"x"] * len(dues), keys=keys, deliver_at=times)
        _stamp(address_of(frame), 0, 0, self.end, 1, 0, 1, 1, len(dues))
        end = self.end + len(dues)
        self.frames.append(
            Stored(1, self.end, end, len(dues), len(frame), 7, frame, 0, is_delayed=True)
        )
        self.end = end

    def fetch(self, sub: Subscription, offset: int) -> Stored | None:
        if (cut := sub.prefetched.take(offset)) is not None:
            self.cut.append(offset)
            return cut
        return next((f for f in self.frames if f.base_offset <= offset < f.end_offset), None)

    def look_ahead(self, frames: int, prefetches: bool = False) -> bool:
        def on_delayed(sub: Subscription, stored: Stored) -> None:
            if prefetches:
                sub.prefetched.prefetch(stored, 0, WALL + self.now_ns + 20 * MS)

        return self.sub.look_ahead(self.end, self.fetch, frames, on_delayed)

    def dispatch(self) -> list[int]:
        """Hand out what can be; its offsets."""
        effects: list[Any] = []
        self.sub.dispatch(self.end, self.fetch, self.now_ns, effects)
        out = []
        for effect in effects:
            stored, rows = effect.stored, effect.rows
            self.bytes_sent += stored.frame_bytes if effect.cut is None else len(effect.cut)
            if rows is None:
                whole = np.arange(stored.message_count)
                rows = FrameView(stored.memory).offset_deltas() if stored.is_sparse else whole
            offsets = [stored.base_offset + row for row in rows.tolist()]
            out += offsets
            self.got += [(self.now_ns, effect.consumer, offset) for offset in offsets]
        return out

    def until(self, now_ns: int) -> None:
        """Let the time go by, as the worker does."""
        while self.timers.next_ns <= now_ns:
            self.now_ns = max(self.now_ns, self.timers.next_ns)
            for sub in self.timers.due(self.now_ns):
                sub.on_time(self.now_ns)
                self.dispatch()
        self.now_ns = now_ns


def test_a_message_comes_when_it_is_due_and_holds_up_nobody() -> None:
    topic = Delayed()
    topic.join()
    topic.add([None, 500 * MS, None, 200 * MS, 0])
    assert topic.dispatch() == [0, 2, 4]
    assert topic.sub.ledger.delayed == 2
    topic.until(199 * MS)
    assert len(topic.got) == 3
    topic.until(SECOND)
    assert [(when, offset) for when, _, offset in topic.got[3:]] == [
        (200 * MS, 3),
        (500 * MS, 1),
    ]


def test_what_came_late_is_due_at_once_and_frames_without_delays_are_not_looked_at() -> None:
    topic = Delayed()
    topic.join()
    topic.add([-5 * SECOND, -1])
    assert topic.dispatch() == [0, 1]
    assert topic.timers.next_ns == NEVER
    plain = encode_frame([b"x"])
    topic.frames.append(Stored(1, 2, 3, 1, len(plain), 7, plain, 0))
    topic.end = 3
    assert topic.dispatch() == [2]


def test_a_new_frame_with_delays_is_not_passed_on_whole() -> None:
    topic = Delayed(SubscriptionKind.EXCLUSIVE)
    topic.join()
    topic.add([SECOND])
    assert topic.sub.pass_on(topic.frames[0], 0, []) is False
    assert topic.dispatch() == []


def test_a_seek_and_a_restart_delay_again() -> None:
    topic = Delayed()
    topic.join()
    topic.add([SECOND, None])
    topic.dispatch()
    topic.sub.seek(0)
    assert topic.dispatch() == [1]
    topic.sub.restore(0, [1, 2])
    assert topic.dispatch() == []
    topic.until(2 * SECOND)
    assert [offset for _, _, offset in topic.got] == [1, 1, 0]


def test_a_key_stays_with_its_consumer_while_its_messages_are_delayed() -> None:
    topic = Delayed(SubscriptionKind.KEY_SHARED)
    consumers = [topic.join(number) for number in range(4)]
    keys = [f"k{i % 10}".encode() for i in range(100)]
    topic.add([None if i % 3 else (i + 1) * MS for i in range(100)], keys)
    topic.dispatch()
    topic.until(SECOND)
    owners: dict[bytes, set[int]] = {}
    for _, consumer, offset in topic.got:
        owners.setdefault(keys[offset], set()).add(consumer.session)
    assert sorted(offset for _, _, offset in topic.got) == list(range(100))
    assert all(len(owner) == 1 for owner in owners.values())
    assert len({consumer for _, consumer, _ in topic.got}) > 1, consumers


def test_the_wall_clock_decides_even_when_it_is_set_back() -> None:
    topic = Delayed()
    topic.join()
    topic.add([SECOND])
    topic.dispatch()
    topic.timers.wall_ahead_ns -= 10 * SECOND
    topic.until(2 * SECOND)
    assert topic.got == []
    topic.until(12 * SECOND)
    assert [when for when, _, _ in topic.got] == [11 * SECOND]


@pytest.mark.parametrize("jump_ns", [10 * SECOND, 50 * MS])
def test_what_is_due_when_the_wall_clock_is_set_forward_comes_at_once(jump_ns: int) -> None:
    """So after a machine was suspended: its monotonic clock stood still."""
    topic = Delayed()
    topic.join()
    topic.add([jump_ns])
    topic.dispatch()
    topic.timers.wall_ahead_ns += jump_ns
    topic.until(2 * MS)
    assert [offset for _, _, offset in topic.got] == [0]


def test_a_wall_clock_that_is_set_back_and_forth_delays_nothing() -> None:
    topic = Delayed()
    topic.join()
    topic.timers.wall_ahead_ns -= 10 * SECOND
    topic.add([SECOND])
    topic.dispatch()
    topic.timers.wall_ahead_ns += 10 * SECOND
    topic.until(SECOND)
    assert [(when, offset) for when, _, offset in topic.got] == [(SECOND, 0)]


def test_a_compressed_frame_that_is_no_such_thing_is_delivered_for_its_consumer_to_see() -> None:
    topic = Delayed()
    topic.join()
    garbage = bytearray(encode_frame([b"x"], deliver_at=[WALL + SECOND]))
    garbage[5] = 1  # says lz4
    topic.frames.append(Stored(1, 0, 1, 1, len(garbage), 7, garbage, 0, is_delayed=True))
    topic.end = 1
    assert topic.dispatch() == [0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(0, 2**32))
def test_the_heap_wakes_exactly_those_that_are_due(dues: list[int], seed: int) -> None:
    draw = random.Random(seed)
    ledger = Ledger(PAGES, 0)
    delays = Delays(ledger)
    at = 0
    while at < len(dues):
        end = min(len(dues), at + draw.randrange(1, 20))
        rows = np.arange(0, end - at, dtype=np.int32)
        delays.postpone(at, rows, np.array(dues[at:end], np.int64))
        at = end
    now = 0
    while delays:
        assert delays.first_ns == min(due for due in dues if due > now or now == 0)
        now = max(now + 1, delays.first_ns) + draw.randrange(3)
        delays.wake(now)
        for offset, due in enumerate(dues):
            expected = State.WAITING if due <= now else State.DELAYED
            assert ledger.state_of(offset)[0] is expected
    assert delays.first_ns == NEVER
    assert (ledger.delayed, ledger.waiting) == (0, len(dues))
    ledger.restart(ledger.cursor)


def test_acked_ahead_of_its_time_it_never_comes() -> None:
    topic = Delayed()
    topic.join()
    topic.add([SECOND, None, 2 * SECOND])
    topic.dispatch()
    topic.sub.settle(0, 2)
    topic.until(5 * SECOND)
    assert [offset for _, _, offset in topic.got] == [1, 2]


@pytest.mark.parametrize("kind", [SubscriptionKind.SHARED, SubscriptionKind.KEY_SHARED])
@pytest.mark.parametrize("rate", [3, 100, 5000])
def test_sixty_seconds_of_a_dispatch_rate(kind: SubscriptionKind, rate: int) -> None:
    """Counted over 60 virtual seconds, with more messages waiting than may go; nothing is lost."""
    table = BucketTable.create()
    topic = Delayed(kind)
    topic.sub.rate = Bucket(table.address(1), rate, 0)
    for number in range(3):
        topic.join(number)
    total = 62 * rate
    keys = [f"k{i % 50}".encode() for i in range(1000)]
    while topic.end < total:
        count = min(1000, total - topic.end)
        frame = encode_frame([b"x"] * count, keys=keys[:count])
        _stamp(address_of(frame), 0, 0, topic.end, 1, 0, 1, 1, count)
        end = topic.end + count
        topic.frames.append(Stored(1, topic.end, end, count, len(frame), 7, frame, 0))
        topic.end = end
    topic.now_ns = SECOND
    topic.dispatch()
    topic.until(61 * SECOND)
    assert len(topic.got) == pytest.approx(60 * rate, rel=0.02, abs=2)
    topic.sub.rate = None
    topic.dispatch()
    assert sorted(offset for _, _, offset in topic.got) == list(range(total))
    table.close()


def test_a_rate_of_bytes() -> None:
    table = BucketTable.create()
    topic = Delayed()
    topic.sub.rate = Bucket(table.address(1), 0, 10_000)
    topic.join()
    for _ in range(100):
        frame = encode_frame([b"x" * 1000] * 10)
        _stamp(address_of(frame), 0, 0, topic.end, 1, 0, 1, 1, 10)
        topic.frames.append(Stored(1, topic.end, topic.end + 10, 10, len(frame), 7, frame, 0))
        topic.end += 10
    topic.dispatch()
    topic.until(60 * SECOND)
    assert topic.bytes_sent == pytest.approx(60 * 10_000, rel=0.03)
    assert len(topic.got) * 1000 > 0.8 * topic.bytes_sent, "frames of one message"
    table.close()


def test_times_of_a_frame_with_and_without_nulls() -> None:
    with_nulls = FrameView(encode_frame([b"a", b"b"], deliver_at=[None, 5]))
    assert with_nulls.deliver_at_ns().tolist() == [0, 5]
    assert FrameView(encode_frame([b"a"], deliver_at=[7])).deliver_at_ns().tolist() == [7]
    assert FrameView(encode_frame([b"a"])).deliver_at_ns() is None


KINDS = [
    SubscriptionKind.EXCLUSIVE,
    SubscriptionKind.SHARED,
    SubscriptionKind.FAILOVER,
    SubscriptionKind.KEY_SHARED,
]


@pytest.mark.parametrize("kind", KINDS)
def test_who_looked_ahead_hands_out_at_once_what_is_due(kind: SubscriptionKind) -> None:
    topic = Delayed(kind)
    topic.add([-SECOND, SECOND, None])
    topic.add([2 * SECOND, 0, 3 * SECOND])
    topic.sub.restore(0, [4, 5])
    assert topic.look_ahead(1) is True
    assert topic.look_ahead(2) is False
    topic.until(1 * MS)
    assert (topic.sub.ledger.delayed, topic.sub.ledger.waiting) == (3, 1)
    read = []

    def fetch(sub: Subscription, offset: int) -> Stored | None:
        read.append(offset)
        return topic.fetch(sub, offset)

    topic.join()
    effects: list[Any] = []
    topic.sub.dispatch(topic.end, fetch, topic.now_ns, effects)
    assert [list(effect.rows) for effect in effects] == [[0], [2]], "one waited, one is fresh"
    assert read, "the first frame was fetched"
    assert max(read) < 3, "what is put aside is not read"
    topic.until(5 * SECOND)
    assert [(when, offset) for when, _, offset in topic.got] == [
        (SECOND, 1),
        (2 * SECOND, 3),
        (3 * SECOND, 5),
    ]


def test_looking_ahead_ends_at_the_first_frame_that_is_not_delayed_or_cannot_be_read() -> None:
    topic = Delayed()
    topic.add([SECOND])
    garbage = bytearray(encode_frame([b"x"], deliver_at=[WALL + SECOND]))
    garbage[5] = 1  # says lz4
    topic.frames.append(Stored(1, 1, 2, 1, len(garbage), 7, garbage, 0, is_delayed=True))
    plain = encode_frame([b"x"])
    topic.frames.append(Stored(1, 2, 3, 1, len(plain), 7, plain, 0))
    topic.end = 3
    topic.add([SECOND])
    topic.sub.restore(0, [])
    assert topic.look_ahead(100) is False
    assert (topic.sub.ledger.delayed, topic.sub.looked_until) == (1, 1)
    topic.join()
    assert topic.dispatch() == [1, 2]
    topic.until(2 * SECOND)
    assert [offset for _, _, offset in topic.got] == [1, 2, 0, 3]


def test_nobody_looks_ahead_for_a_consumer_that_is_there() -> None:
    topic = Delayed()
    topic.add([SECOND])
    topic.sub.restore(0, [])
    topic.join()
    assert topic.look_ahead(100) is False
    assert topic.sub.next_offset == 0


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_looking_ahead_changes_nothing_of_what_is_delivered_and_when(seed: int) -> None:
    """Twice the same backlog, some of it acked, with and without a look ahead: every message that is
    not acked comes once, at the later of its time and the moment at which its consumers came."""
    for looks, prefetches in ((False, False), (True, False), (True, True)):
        draw = random.Random(seed)
        topic = Delayed(draw.choice(KINDS))
        due: list[int] = []
        for _ in range(draw.randrange(1, 6)):
            times = [draw.choice([None, -1, draw.randrange(40) * MS]) for _ in range(5)]
            topic.add(times, [b"%d" % draw.randrange(4) for _ in range(5)])
            due += [time or 0 for time in times]
        acked = [offset for offset in range(topic.end) if draw.random() < 0.3]
        topic.sub.restore(0, [bound for offset in acked for bound in (offset, offset + 1)])
        frames = draw.randrange(1, 4)
        while looks and topic.look_ahead(frames, prefetches):
            pass
        came_ns = draw.randrange(30) * MS
        topic.until(came_ns)
        single = topic.sub.kind is SubscriptionKind.EXCLUSIVE
        for number in range(1 if single else draw.randrange(1, 3)):
            topic.join(number)
        topic.dispatch()
        topic.until(SECOND)
        assert sorted((offset, when) for when, _, offset in topic.got) == [
            (offset, max(due[offset], came_ns))
            for offset in range(topic.end)
            if offset not in acked
        ], (seed, looks, prefetches)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 50), max_size=100), st.integers(0, 50), st.integers(0, 50))
def test_which_are_due_between_two_times(dues: list[int], low: int, high: int) -> None:
    ledger = Ledger(PAGES, 0)
    delays = Delays(ledger)
    if dues:
        delays.postpone(0, np.arange(len(dues), dtype=np.int32), np.array(dues, np.int64))
    wanted = [offset for offset, due in enumerate(dues) if low <= due < high]
    assert delays.due_between(low, high) == wanted
    ledger.restart(ledger.cursor)


def test_what_is_cut_out_goes_out_without_its_frame_and_only_once() -> None:
    topic = Delayed()
    topic.join()
    topic.add([SECOND, None, 2 * SECOND, 3 * SECOND, 9 * SECOND])
    assert topic.dispatch() == [1]
    until = topic.sub.prefetched.prefetch(topic.frames[0], WALL, WALL + 5 * SECOND)
    assert until == WALL + 5 * SECOND
    assert len(topic.sub.prefetched) == 3
    assert 4 not in topic.sub.prefetched
    topic.sub.settle(3, 4)
    topic.until(10 * SECOND)
    assert [offset for _, _, offset in topic.got] == [1, 0, 2, 4]
    assert topic.cut == [0, 2]
    topic.sub.prefetched.prune()
    assert (len(topic.sub.prefetched), topic.sub.prefetched.byte_count) == (0, 0)


def test_what_was_cut_out_and_given_back_counts_its_deliveries() -> None:
    topic = Delayed()
    consumer = topic.join()
    topic.add([SECOND, 20 * SECOND])
    topic.dispatch()
    topic.sub.prefetched.prefetch(topic.frames[0], WALL, WALL + 5 * SECOND)
    topic.until(SECOND)
    topic.sub.nack(consumer, [0, 1], 0, topic.now_ns, "no")
    assert topic.dispatch() == [0], "now out of its frame"
    assert topic.cut == [0]
    topic.sub.prefetched.prefetch(topic.frames[0], WALL, WALL + 30 * SECOND)
    topic.sub.seek(0)
    assert not len(topic.sub.prefetched)


def test_many_that_are_due_together_stay_in_their_frame() -> None:
    topic = Delayed()
    topic.join()
    topic.add([SECOND] * 100 + [(2 + i) * SECOND for i in range(100)])
    topic.dispatch()
    prefetched = topic.sub.prefetched
    assert (
        prefetched.prefetch(topic.frames[0], WALL + 2 * SECOND, WALL + PLENTY) == WALL + 2 * SECOND
    )
    assert not len(prefetched)
    topic.until(SECOND)
    assert len(topic.got) == 100
    until = prefetched.prefetch(topic.frames[0], WALL + 2 * SECOND, WALL + 1000 * SECOND)
    assert len(prefetched) == CUTS_MAX
    assert until == WALL + (2 + CUTS_MAX) * SECOND
    topic.until(1000 * SECOND)
    assert len(topic.got) == 200
    assert len(topic.cut) == CUTS_MAX


def test_what_compaction_took_out_of_a_frame_cannot_be_cut_out() -> None:
    topic = Delayed()
    topic.join()
    topic.add([SECOND, 2 * SECOND, 3 * SECOND])
    topic.dispatch()
    whole = topic.frames[0]
    left = split_frame(FrameView(whole.memory), np.array([0], np.int32))
    sparse = Stored(1, 0, 3, 1, len(left), 7, left, 0, is_delayed=True, is_sparse=True)
    topic.frames = [sparse]
    assert topic.sub.prefetched.prefetch(sparse, WALL, WALL + 5 * SECOND) == WALL + 5 * SECOND
    assert 0 in topic.sub.prefetched
    assert len(topic.sub.prefetched) == 1
    topic.until(10 * SECOND)
    assert [offset for _, _, offset in topic.got] == [0]
    assert (topic.sub.ledger.delayed, topic.sub.ledger.waiting) == (0, 0)
