"""Credit bounds what is sent ahead: frames are cut to it where another consumer may take the rest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionAssigned
from danube_fast.broker.subscription.consumer import (
    Consumer,
    Deliver,
    Flow,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.cuts import divide
from danube_fast.broker.subscription.fairness import TURN_BYTES, dispatch_fairly
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.split import Cut
from danube_fast.frame.stamp import stamp

PLENTY = 1 << 30
GROUPS = [SubscriptionKind.SHARED, SubscriptionKind.KEY_SHARED]
_stamp = direct(stamp)


def frame_of(payloads: list[bytes], base: int, keys: Any = None, codec: Codec = Codec.NONE) -> Any:
    frame = encode_frame(payloads, keys=keys, codec=codec)
    _stamp(address_of(frame), 0, 0, base, 1, 0, 1, 1, len(payloads))
    return frame


class Group:
    """A subscription, its frames, its consumers and what each of them holds."""

    def __init__(self, kind: SubscriptionKind, *, tracks: bool = True) -> None:
        self.sub = Subscription(1, "s", kind, 0, tracks=tracks)
        self.frames: list[Stored] = []
        self.sizes: list[int] = []
        self.hands: dict[Consumer, list[int]] = {}
        self.fetched = 0
        self.effects: list[Deliver] = []

    @property
    def end(self) -> int:
        return len(self.sizes)

    def add(self, payloads: list[bytes], keys: Any = None, codec: Codec = Codec.NONE) -> Stored:
        frame = frame_of(payloads, self.end, keys, codec)
        count = len(payloads)
        stored = Stored(1, self.end, self.end + count, count, len(frame), 7, frame, 0)
        self.frames.append(stored)
        self.sizes += map(len, payloads)
        return stored

    def join(self, messages: int, byte_count: int = PLENTY) -> Consumer:
        flow = Flow()
        flow.grant(byte_count, messages)
        consumer = Consumer(self.sub, len(self.hands), 1, flow, f"c{len(self.hands)}")
        self.sub.attach(consumer)
        self.hands[consumer] = []
        return consumer

    def fetch(self, subscription: Subscription, offset: int) -> Stored | None:
        self.fetched += 1
        return next((f for f in self.frames if f.base_offset <= offset < f.end_offset), None)

    def run(self) -> None:
        self.effects = []
        self.sub.dispatch(self.end, self.fetch, 0, self.effects)
        for effect in self.effects:
            self.hands[effect.consumer] += offsets(effect)

    def ack(self, consumer: Consumer) -> None:
        done, self.hands[consumer] = self.hands[consumer], []
        self.sub.ack(consumer, [bound for offset in done for bound in (offset, offset + 1)])


def offsets(effect: Deliver) -> list[int]:
    stored = effect.stored
    if effect.rows is None:
        return list(range(stored.base_offset, stored.end_offset))
    return [stored.base_offset + row for row in effect.rows.tolist()]


@pytest.mark.parametrize("kind", GROUPS)
def test_ten_permits_of_a_frame_of_five_thousand_are_ten_messages(kind: SubscriptionKind):
    group = Group(kind)
    group.add([b"x"] * 5000)
    one = group.join(10)
    group.run()
    assert group.hands[one] == list(range(10)) or kind is SubscriptionKind.KEY_SHARED
    assert len(group.hands[one]) == 10
    assert one.flow.message_credit == 0
    other = group.join(PLENTY)
    group.run()
    seen = sorted(group.hands[one] + group.hands[other])
    assert len(group.hands[one]) == 10
    if kind is SubscriptionKind.SHARED:
        assert seen == list(range(5000))
    else:  # what the first one's keys are waits for it
        assert len(seen) > 2000


def test_a_frame_that_has_just_come_is_cut_too():
    group = Group(SubscriptionKind.SHARED)
    one = group.join(10)
    stored = group.add([b"x"] * 5000)
    effects: list[Deliver] = []
    assert not group.sub.pass_on(stored, 0, effects)
    assert not effects
    one.flow.grant(0, 5000)
    assert group.sub.pass_on(stored, 0, effects)


@pytest.mark.parametrize("kind", [SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER])
def test_an_only_consumer_gets_whole_frames(kind: SubscriptionKind):
    group = Group(kind)
    for _ in range(3):
        group.add([b"x"] * 100)
    consumer = group.join(10, 1)
    group.run()
    assert group.hands[consumer] == list(range(100))
    assert [effect.rows for effect in group.effects] == [None]


@given(st.integers(1, 300), st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_messages_go_round_one_by_one_past_those_without_room(count: int, rooms: list[int]):
    expected = [0] * len(rooms)
    left, place = min(count, sum(rooms)), 0
    while left:
        if expected[place] < rooms[place]:
            expected[place] += 1
            left -= 1
        place = (place + 1) % len(rooms)
    assert divide(count, rooms) == expected


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GROUPS), st.booleans(), st.integers(0, 1 << 30))
def test_nobody_gets_more_than_its_permits_and_everybody_gets_all_in_the_end(
    kind: SubscriptionKind, has_keys: bool, seed: int
):
    draw = random.Random(seed)
    group = Group(kind)
    for _ in range(draw.randrange(1, 5)):
        count = draw.randrange(1, 200)
        keys = [b"k%d" % draw.randrange(20) for _ in range(count)] if has_keys else None
        group.add([bytes(draw.choice((1, 10, 2000))) for _ in range(count)], keys)
    rooms = {}
    for _ in range(draw.randrange(1, 5)):
        messages, byte_count = draw.choice((1, 3, 50)), draw.choice((1, 3000, PLENTY))
        rooms[group.join(messages, byte_count)] = messages, byte_count
    seen: list[int] = []
    for _ in range(10_000):
        group.run()
        if not any(group.hands.values()):
            break
        for consumer, hand in group.hands.items():
            messages, byte_count = rooms[consumer]
            flow = consumer.flow
            assert 0 <= flow.message_credit == messages - len(hand)
            largest = max((group.sizes[offset] for offset in hand), default=0)
            assert flow.byte_credit > -(largest + 600)
            seen += hand
        for consumer in list(group.hands):
            messages, byte_count = rooms[consumer]
            group.ack(consumer)
            consumer.flow.byte_credit, consumer.flow.message_credit = byte_count, messages
    assert sorted(seen) == list(range(group.end))
    assert group.sub.cursor == group.end


@pytest.mark.parametrize("kind", GROUPS)
def test_bytes_are_exceeded_by_one_message_at_most(kind: SubscriptionKind):
    group = Group(kind)
    group.add([b"x" * (100_000 if n % 100 == 0 else 10) for n in range(1000)])
    consumer = group.join(PLENTY, 150_000)
    group.run()
    assert 100_000 <= sum(group.sizes[offset] for offset in group.hands[consumer]) <= 250_000
    assert -100_000 <= consumer.flow.byte_credit <= 0


def test_a_consumer_of_many_partitions_gets_whole_frames_while_its_credit_lasts():
    """A turn is bounded, but no frame is cut for that."""
    flow = Flow()
    flow.grant(10 * TURN_BYTES, PLENTY)
    parts = []
    for number in (1, 2):
        assigned = PartitionAssigned(number, f"/default/{number}", 0, "reliable", "fsync", 1)
        made = Partition(assigned, 0, number)
        sub, _ = made.subscribe("s", SubscriptionKind.SHARED, "earliest")
        sub.attach(Consumer(sub, 1, number, flow, "c"))
        for base in range(0, 6, 3):
            frame = frame_of([bytes(TURN_BYTES)] * 3, base)
            made.append(Stored(number, base, base + 3, 3, len(frame), 7, frame, 0))
        parts.append(made)
    effects: list[Deliver] = []
    for made in parts:
        dispatch_fairly(made, lambda *_: None, 0, effects)
    assert [effect.rows for effect in effects] == [None, None]
    dispatch_fairly(parts[0], lambda *_: None, 0, effects)
    assert [len(offsets(effect)) for effect in effects] == [3, 3, 3]
    dispatch_fairly(parts[1], lambda *_: None, 0, effects)
    assert len(offsets(effects[3])) < 3, "the credit is used up"


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_a_frame_that_goes_out_in_small_parts_is_unpacked_once(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
):
    from danube_fast.frame import view as view_module

    group = Group(SubscriptionKind.SHARED)
    group.add([b"%d" % n * 20 for n in range(5000)], codec=codec)
    consumer = group.join(10)
    unpacked = 0
    unpack = view_module.decompress_body

    def counted(*arguments: Any) -> Any:
        nonlocal unpacked
        unpacked += 1
        return unpack(*arguments)

    monkeypatch.setattr(view_module, "decompress_body", counted)
    measured = 0
    make = Cut.__init__

    def counting(self: Cut, view: Any, rows: Any, counts: Any = None) -> None:
        nonlocal measured
        measured += len(rows)
        make(self, view, rows, counts)

    monkeypatch.setattr(Cut, "__init__", counting)
    while group.sub.cursor < 5000:
        group.run()
        group.ack(consumer)
        consumer.flow.grant(PLENTY, 10)
    assert unpacked == (codec is not Codec.NONE)
    assert measured == 5000, "a cut costs what is cut"
    assert group.fetched <= 2 * 500


def test_what_bytes_cut_off_keeps_its_place_before_what_waits_of_its_key():
    """Of one key: the second message is cut off by bytes, the third waits for a permit."""
    group = Group(SubscriptionKind.KEY_SHARED)
    group.add([b"x" * 1000] * 4, [b"k"] * 4)
    consumer = group.join(2, 1)
    for _ in range(4):
        group.run()
        consumer.flow.byte_credit, consumer.flow.message_credit = 1, 2
    assert group.hands[consumer] == [0, 1, 2, 3]
