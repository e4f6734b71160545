"""What compaction leaves of frames, and how frames with gaps are handed out, against small models."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.admission.layout import INT64_MAX
from danube_fast.broker.compaction import NewestOffsets, tombstones
from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionAssigned
from danube_fast.broker.sparse import by_row, existing, place_of, places_of
from danube_fast.broker.subscription.consumer import (
    Consumer,
    Deliver,
    Flow,
    Gap,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.policy import REDELIVERIES_MAX, FailurePolicy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.broker.subscription.timers import Timers
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import stamp
from danube_fast.frame.view import FrameView

_stamp = direct(stamp)

MESSAGES = st.lists(
    st.tuples(st.sampled_from([None, b"a", b"b", b"c", b"", b"\xff"]), st.booleans()),
    min_size=1, max_size=40,
)  # fmt: skip


def stamped(keys: list[bytes | None], payloads: list[bytes | None], base: int) -> bytearray:
    frame = encode_frame(payloads, keys=keys)
    _stamp(address_of(frame), 0, 0, base, 1, 0, 1, 1, len(keys))
    return frame


def frames_of(messages: list[tuple[bytes | None, bool]], draw: random.Random) -> list[FrameView]:
    frames, at = [], 0
    while at < len(messages):
        some = messages[at : at + draw.randint(1, 7)]
        keys = [key for key, _ in some]
        payloads = [b"%d" % (at + i) if there else None for i, (_, there) in enumerate(some)]
        frames.append(FrameView(stamped(keys, payloads, at)))
        at += len(some)
    return frames


@settings(deadline=None)
@given(MESSAGES, st.integers(0, 40), st.integers(0, 40), st.integers(0, 1 << 16))
def test_the_newest_of_every_key_stays(messages, dirty_from, tombstones_below, seed):
    """A pass knows the keys of its dirty part; what is older and not among them stays."""
    frames = frames_of(messages, random.Random(seed))
    newest = NewestOffsets(1000)
    expected: dict[bytes, int] = {}
    for view in frames:
        if view.base_offset >= dirty_from:
            newest.note(view)
            for offset, key in zip(view.offsets().tolist(), view.keys(), strict=True):
                if key is not None:
                    expected[key] = offset
    assert len(newest) == len(expected)
    for view in frames:
        stay = newest.survivors(view, tombstones_below)
        got = list(range(view.message_count)) if stay is None else stay.tolist()
        wanted = []
        for place, offset in enumerate(view.offsets().tolist()):
            key, there = messages[offset]
            is_newest = key is None or expected.get(key, offset) <= offset
            is_over = key is not None and not there and offset < tombstones_below
            if is_newest and not is_over:
                wanted.append(place)
        assert got == wanted


def test_a_map_is_full_at_its_bound_and_frames_without_keys_stay():
    newest = NewestOffsets(2)
    newest.note(FrameView(encode_frame([b"x", b"y"])))
    assert not newest.is_full
    assert newest.survivors(FrameView(encode_frame([None, b"y"])), INT64_MAX) is None
    newest.note(FrameView(stamped([b"a", b"b", b"c"], [b"1"] * 3, 0)))
    assert newest.is_full and len(newest) == 3


def test_only_null_payloads_with_a_key_are_tombstones():
    view = FrameView(stamped([b"a", None, b"b", b"c"], [None, None, b"", b"x"], 0))
    assert tombstones(view).tolist() == [True, False, False, False]
    assert tombstones(FrameView(stamped([b"a"], [b""], 0))) is None
    assert tombstones(FrameView(encode_frame([None]))) is None


# ---------------------------------------------------------------- frames with gaps


def sparse(base: int, span: int, rows: list[int]) -> Stored:
    keys = [b"k%d" % (base + row) for row in range(span)]
    frame = stamped(list(keys), [b"%d" % (base + row) for row in range(span)], base)
    is_sparse = len(rows) < span
    if is_sparse:
        frame = split_frame(FrameView(frame), np.array(rows, np.int32))
    return Stored(
        1, base, base + span, len(rows), len(frame), 7, frame, 0, is_sparse=is_sparse
    )  # fmt: skip


def test_rows_become_places():
    stored = sparse(100, 6, [1, 4])
    view = FrameView(stored.memory)
    there, gone = existing(stored, np.arange(6, dtype=np.int32))
    assert (there.tolist(), gone.tolist()) == ([1, 4], [0, 2, 3, 5])
    assert places_of(stored, view, there).tolist() == [0, 1]
    assert [place_of(stored, offset) for offset in range(100, 106)] == [-1, 0, -1, -1, 1, -1]
    assert by_row(stored, view, np.array([7, 8])).tolist() == [0, 7, 0, 0, 8, 0]
    assert view.payloads() == [b"101", b"104"]


class Topic:
    """Frames, some with gaps, some gone; what every consumer of a subscription got and holds."""

    def __init__(self, kind: SubscriptionKind, draw: random.Random) -> None:
        self.draw = draw
        self.kind = kind
        self.sub = Subscription(
            1, "s", kind, 0, tracks=kind is not SubscriptionKind.READER, timers=Timers()
        )
        self.sub.policy = FailurePolicy(
            ack_timeout_ms=0, base_redelivery_delay_ms=0, max_redelivery_count=REDELIVERIES_MAX
        )
        self.frames: list[Stored] = []
        self.there: set[int] = set()
        self.end = 0
        for _ in range(draw.randint(1, 12)):
            span = draw.randint(1, 9)
            rows = [row for row in range(span) if draw.random() < 0.5]
            if rows:
                self.frames.append(sparse(self.end, span, rows))
                self.there |= {self.end + row for row in rows}
            self.end += span
        self.acked: set[int] = set()
        self.got: dict[int, int] = {}

    def fetch(self, _: Subscription, offset: int) -> Stored | Gap:
        for stored in self.frames:
            if stored.end_offset > offset:
                if stored.base_offset <= offset:
                    return stored
                return Gap(stored.base_offset, "newer", is_silent=True)
        return Gap(self.end, "newer", is_silent=True)

    def join(self, number: int) -> Consumer:
        flow = Flow()
        flow.byte_credit, flow.message_credit = 1 << 30, self.draw.randint(1, 8)
        consumer = Consumer(self.sub, number, 1, flow, f"c{number}")
        self.sub.attach(consumer)
        return consumer

    def take(self, effect: Deliver) -> list[int]:
        view = FrameView(effect.stored.memory)
        if effect.rows is None:
            return list(view.offsets().tolist())
        places = places_of(effect.stored, view, effect.rows)
        return list(FrameView(split_frame(view, places, effect.attempts)).offsets().tolist())


@pytest.mark.parametrize("kind", ["exclusive", "shared", "failover", "key_shared", "reader"])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 32))
def test_frames_with_gaps_are_handed_out_as_what_is_there(kind, seed):
    """Every message that is there is delivered and acked, nothing else; nacks and deaths included."""
    draw = random.Random(seed)
    topic = Topic(SubscriptionKind(kind), draw)
    single = kind in ("exclusive", "reader")
    consumers = [topic.join(number) for number in range(1 if single else draw.randint(1, 3))]
    held: dict[Consumer, list[int]] = {consumer: [] for consumer in consumers}
    number = 10
    for step in range(400):
        effects: list[Deliver] = []
        topic.sub.dispatch(topic.end, topic.fetch, step, effects)
        for effect in effects:
            offsets = topic.take(effect)
            assert set(offsets) <= topic.there - topic.acked
            held[effect.consumer] += offsets
            for offset in offsets:
                topic.got[offset] = topic.got.get(offset, 0) + 1
        consumer = draw.choice(consumers)
        if held[consumer] and kind != "reader":
            some = [o for o in held[consumer] if draw.random() < 0.7]
            held[consumer] = [o for o in held[consumer] if o not in some]
            pairs = [bound for offset in some for bound in (offset, offset + 1)]
            if draw.random() < 0.8:
                topic.sub.ack(consumer, pairs)
                topic.acked |= set(some)
            else:
                topic.sub.nack(consumer, pairs, 0, step, "no")
        if draw.random() < 0.05 and not single:
            topic.sub.detach(consumer)
            consumers.remove(consumer)
            del held[consumer]
            number += 1
            consumers.append(topic.join(number))
            held[consumers[-1]] = []
        consumer = draw.choice(consumers)
        consumer.flow.grant(1 << 20, draw.randint(1, 8))
        topic.sub.on_time(step)
        done = (
            topic.acked == topic.there if kind != "reader" else len(topic.got) == len(topic.there)
        )
        if done and topic.sub.next_offset == topic.end and not effects:
            break
    assert topic.got.keys() == topic.there
    if kind == "reader":
        assert set(topic.got.values()) <= {1}
    else:
        assert topic.acked == topic.there
        assert topic.sub.cursor == topic.end
        assert (topic.sub.ledger.unacked, topic.sub.ledger.waiting) == (0, 0)


# ---------------------------------------------------------------- where messages stand


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 6)), max_size=30))
def test_breaks_know_every_place_where_positions_fall(moves):
    """Runs of one offset each: some are written again, again and again; the lowest position from any
    offset on is found at one of the places."""
    assigned = PartitionAssigned(1, "/default/t", 0, "reliable", "os", 1)
    partition = Partition(assigned, 0, 0)
    positions = list(range(20))
    for start, count in moves:
        for offset in range(start, min(20, start + count)):
            positions[offset] = max(positions) + 1
            partition.written_again(offset, offset + 1)
    for offset in range(20):
        places = [at for at in partition.places_from(offset) if at < 20]
        assert min(positions[at] for at in places) == min(positions[offset:])
