"""key_shared subscriptions alone: one consumer a key, in order, whoever comes and goes."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.subscription.consumer import (
    Consumer,
    Deliver,
    Flow,
    Gap,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.routing import AHEAD_MAX
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import HEADER_BYTES, Codec
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import stamp

PLENTY = 1 << 30
_stamp = direct(stamp)


class KeyedTopic:
    """Frames of messages with keys, from offset 0."""

    def __init__(self) -> None:
        self.frames: list[Stored] = []
        self.keys: list[bytes | None] = []

    @property
    def end(self) -> int:
        return len(self.keys)

    def add(self, keys: list[bytes | None]) -> None:
        frame = encode_frame([b"x"] * len(keys), keys=keys if any(keys) else None)
        base = self.end
        _stamp(address_of(frame), 0, 0, base, 1, 0, 1, 1, len(keys))
        self.keys += keys
        stored = Stored(1, base, self.end, len(keys), len(frame), 7, frame, 0)
        self.frames.append(stored)

    def fetch(self, subscription: Subscription, offset: int) -> Stored | None:
        return next((f for f in self.frames if f.base_offset <= offset < f.end_offset), None)


class Group:
    """A subscription, its consumers, and what each of them got."""

    def __init__(self, *, tracks: bool = True) -> None:
        self.sub = Subscription(1, "s", SubscriptionKind.KEY_SHARED, 0, tracks=tracks)
        self.topic = KeyedTopic()
        self.hands: dict[Consumer, list[int]] = {}
        self.now_ns = 0

    def join(self, name: str, *filters: str, credit: int = PLENTY) -> Consumer:
        flow = Flow()
        flow.byte_credit, flow.message_credit = PLENTY, credit
        consumer = Consumer(self.sub, len(self.hands), 1, flow, name, filters)
        self.sub.attach(consumer)
        self.hands[consumer] = []
        return consumer

    def leave(self, consumer: Consumer) -> None:
        self.sub.detach(consumer)
        self.hands.pop(consumer)

    def run(self) -> list[tuple[Consumer, list[int]]]:
        effects: list[Deliver] = []
        self.sub.dispatch(self.topic.end, self.topic.fetch, self.now_ns, effects)
        got = []
        for effect in effects:
            base, end = effect.stored.base_offset, effect.stored.end_offset
            rows = range(end - base) if effect.rows is None else effect.rows.tolist()
            offsets = [base + row for row in rows]
            self.hands[effect.consumer] += offsets
            got.append((effect.consumer, offsets))
        return got

    def ack(self, consumer: Consumer, offsets: list[int]) -> None:
        self.sub.ack(consumer, [edge for offset in offsets for edge in (offset, offset + 1)])
        self.hands[consumer] = [o for o in self.hands[consumer] if o not in set(offsets)]

    def owners(self) -> dict[bytes | None, Consumer]:
        return {self.topic.keys[o]: c for c, hand in self.hands.items() for o in hand}


def keys_of(count: int, draw: random.Random, distinct: int = 1000) -> list[bytes | None]:
    return [b"key-%d" % draw.randrange(distinct) for _ in range(count)]


def test_every_key_has_one_consumer_and_the_shares_are_about_equal():
    group, draw = Group(), random.Random(1)
    consumers = [group.join(f"c{n}") for n in range(4)]
    for _ in range(20):
        group.topic.add(keys_of(2000, draw, 10_000))
        group.run()
    seen: dict[bytes | None, Consumer] = {}
    for consumer, hand in group.hands.items():
        assert hand == sorted(hand)
        for offset in hand:
            assert seen.setdefault(group.topic.keys[offset], consumer) is consumer
    shares = [len(group.hands[consumer]) for consumer in consumers]
    assert sum(shares) == 40_000 and min(shares) > 40_000 / 4 * 0.6, shares


def test_a_join_moves_about_its_share_of_the_keys_and_a_leave_gives_them_back():
    group, draw = Group(), random.Random(2)
    for n in range(4):
        group.join(f"c{n}")
    keys = [b"key-%d" % n for n in range(5000)]

    def owners() -> dict[bytes | None, str]:
        group.topic.add(list(keys))
        group.run()
        found = {key: consumer.name for key, consumer in group.owners().items()}
        for consumer, hand in list(group.hands.items()):
            group.ack(consumer, list(hand))
        return found

    draw.shuffle(keys)
    before = owners()
    fifth = group.join("c4")
    after = owners()
    moved = [key for key in keys if before[key] != after[key]]
    assert 0.5 * 5000 / 5 < len(moved) < 1.6 * 5000 / 5
    assert {after[key] for key in moved} == {"c4"}
    group.leave(fifth)
    assert owners() == before


def test_a_key_that_moves_waits_until_its_old_consumer_has_acked_and_others_do_not():
    group = Group()
    first = group.join("first")
    group.topic.add([b"key-%d" % n for n in range(200)])
    group.run()
    second = group.join("second")
    group.topic.add([b"key-%d" % n for n in range(200)])
    group.run()
    assert group.hands[second] == [], "every key of it is still with the first consumer"
    assert 0 < len(group.hands[first]) - 200 < 200, "keys that stay do not wait"
    waiting = {o for o in range(200, 400) if group.sub.ledger.state_of(o)[0] == State.WAITING}
    group.ack(first, list(range(200)))
    group.run()
    assert set(group.hands[second]) == waiting


def test_the_keys_of_a_dead_consumer_come_again_in_order_before_newer_ones():
    group, draw = Group(), random.Random(3)
    dead, alive = group.join("dead"), group.join("alive")
    group.topic.add(keys_of(500, draw, 20))
    group.run()
    lost = list(group.hands[dead])
    assert lost
    mine = group.hands[alive]
    group.leave(dead)
    group.topic.add(keys_of(500, draw, 20))
    mine.clear()
    group.run()
    by_key = collections.defaultdict(list)
    for offset in group.hands[alive]:
        by_key[group.topic.keys[offset]].append(offset)
    assert all(offsets == sorted(offsets) for offsets in by_key.values())
    assert set(lost) <= set(mine)


def test_a_consumer_without_credit_stops_its_own_keys_only():
    group, draw = Group(), random.Random(4)
    poor, rich = group.join("poor", credit=10), group.join("rich")
    group.topic.add(keys_of(1000, draw, 100))
    group.run()
    assert len(group.hands[poor]) == 10
    assert len(group.hands[rich]) > 200
    poor.flow.grant(0, 10_000)
    group.run()
    assert sorted(group.hands[poor] + group.hands[rich]) == list(range(1000))
    assert group.hands[poor] == sorted(group.hands[poor])


def test_so_many_may_wait_for_one_consumer_then_nothing_fresh_is_looked_at(monkeypatch):
    monkeypatch.setattr("danube_fast.broker.subscription.routing.AHEAD_MAX", 300)
    assert AHEAD_MAX > 300
    group, draw = Group(), random.Random(5)
    group.join("poor", credit=0)
    group.join("rich")
    for _ in range(20):
        group.topic.add(keys_of(100, draw, 100))
    group.run()
    assert 300 <= group.sub.ledger.waiting < 400
    assert group.sub.next_offset < 2000


def test_filters_choose_the_keys_and_what_nobody_takes_is_skipped_and_counted():
    group = Group()
    payments, europe = group.join("payments", "pay*"), group.join("europe", "eu-?")
    group.topic.add([b"pay-1", b"eu-1", b"eu-22", b"pay-2", None])
    group.run()
    assert (group.hands[payments], group.hands[europe]) == ([0, 3], [1])
    assert group.sub.router.skipped_count == 2
    group.ack(payments, [0, 3])
    group.ack(europe, [1])
    assert group.sub.cursor == 5


def test_what_waited_is_looked_at_again_when_somebody_with_other_filters_comes():
    group = Group()
    poor = group.join("poor", "a*", credit=0)
    group.join("other", "b*")
    group.topic.add([b"a1", b"b1", b"a2"])
    group.run()
    assert group.sub.ledger.waiting == 2
    everything = group.join("everything", "*1")
    group.leave(poor)
    group.run()
    assert group.hands[everything] == [0]
    assert group.sub.router.skipped_count == 1, "nobody takes a2 any more"


def test_messages_without_a_key_go_to_everybody():
    group = Group()
    consumers = [group.join(f"c{n}") for n in range(3)]
    group.topic.add([None] * 3000)
    group.run()
    assert min(len(group.hands[consumer]) for consumer in consumers) > 500


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "join", "leave", "ack", "ack all", "nack", "grant", "time"]),
        st.integers(0, 1 << 30),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_a_key_is_with_one_consumer_and_in_order_in_every_history(history):
    group = Group()
    number = 0
    acked: set[int] = set()
    last: dict[bytes | None, int] = {}
    nacked: set[bytes | None] = set()
    for what, seed in history:
        draw = random.Random(seed)
        some = list(group.hands)
        chosen = draw.choice(some) if some else None
        if what == "add":
            group.topic.add(keys_of(draw.randrange(1, 40), draw, 8))
        elif what == "join":
            number += 1
            group.join(f"c{number % 5}", credit=draw.choice([0, 5, PLENTY]))
        elif what == "grant" and chosen:
            chosen.flow.grant(0, draw.randrange(50))
        elif what == "time":
            group.now_ns += 10**9
            group.sub.on_time(group.now_ns)
        elif what == "leave" and chosen:
            for offset in group.hands[chosen]:
                last.pop(group.topic.keys[offset], None)
            group.leave(chosen)
        elif chosen and group.hands[chosen]:
            hand = group.hands[chosen]
            part = (
                hand if what == "ack all" else draw.sample(hand, draw.randrange(1, len(hand) + 1))
            )
            if what == "nack":
                nacked |= {group.topic.keys[offset] for offset in part}
                pairs = [edge for offset in sorted(part) for edge in (offset, offset + 1)]
                group.sub.nack(chosen, pairs, draw.choice([0, 10**9]), group.now_ns, "test")
                group.hands[chosen] = [o for o in hand if o not in part]
            else:
                acked |= set(part)
                group.ack(chosen, list(part))
        for _, offsets in group.run():
            for offset in offsets:
                key = group.topic.keys[offset]
                if key not in nacked:
                    assert offset > last.get(key, -1) or offset not in acked
                    last[key] = offset
        holders = collections.defaultdict(set)
        for consumer, hand in group.hands.items():
            assert len(hand) == consumer.unacked
            for offset in hand:
                assert offset not in acked, "delivered after it was acked"
                holders[group.topic.keys[offset]].add(consumer)
        assert all(len(found) == 1 for found in holders.values()), "a key with two consumers"
    for consumer in list(group.hands):
        consumer.flow.grant(0, PLENTY)
    if group.hands:
        drain(group, acked)
        assert len(acked) + group.sub.ledger.blocked == group.topic.end


def drain(group: Group, acked: set[int]) -> None:
    """Ack everything that comes until nothing does."""
    for _ in range(1000):
        group.now_ns += 10**11
        group.sub.on_time(group.now_ns)
        group.run()
        if not any(group.hands.values()):
            break
        for consumer, hand in group.hands.items():
            acked |= set(hand)
            group.ack(consumer, list(hand))
    else:
        pytest.fail("messages come for ever")


def test_what_was_delayed_under_filters_finds_its_way_without_them():
    group = Group()
    groups = [group.join(f"c{n}", f"{n}*") for n in range(5)]
    group.topic.add([b"%d-key" % (n % 5) for n in range(50)])
    group.run()
    for consumer in groups:
        pairs = [edge for offset in group.hands[consumer] for edge in (offset, offset + 1)]
        group.sub.nack(consumer, pairs, 10**9, 0, "later")
        group.leave(consumer)
    plain = group.join("plain")
    group.sub.on_time(10**9)
    group.run()
    assert group.hands[plain] == list(range(50))


def test_so_many_masks_have_tables_and_the_others_go_to_the_first_who_takes_them(monkeypatch):
    monkeypatch.setattr("danube_fast.broker.subscription.routing.TABLES_MAX", 2)
    group = Group()
    for n in range(5):
        group.join(f"c{n}", f"*{n}*")
    keys = [b"%d%d" % (a, b) for a in range(5) for b in range(5)]
    group.topic.add(keys)
    group.run()
    for consumer, hand in group.hands.items():
        assert all(consumer.name[1:].encode() in keys[offset] for offset in hand)
    assert sorted(o for hand in group.hands.values() for o in hand) == list(range(25))


def test_a_frame_that_cannot_be_read_goes_to_somebody_who_will_say_so():
    group = Group()
    consumer = group.join("c")
    frame = encode_frame([b"x" * 100] * 20, keys=[b"k"] * 20, codec=Codec.LZ4)
    frame[HEADER_BYTES:] = bytes(len(frame) - HEADER_BYTES)
    group.topic.frames.append(Stored(1, 0, 20, 20, len(frame), 7, frame, 0))
    group.topic.keys += [b"k"] * 20
    group.run()
    assert group.hands[consumer] == list(range(20))


def test_extending_what_does_not_exist_does_nothing():
    group = Group()
    consumer = group.join("c")
    group.topic.add([b"k"] * 3)
    group.run()
    top = (1 << 64) - 1
    group.sub.extend(consumer, [top, 5, 0, top, -7, 2, 3, 3, 1], 10**12)
    assert consumer.unacked == 3
    group.ack(consumer, [0, 1, 2])
    assert group.sub.cursor == 3


def test_a_key_has_one_consumer_on_a_topic_that_keeps_nothing():
    group, draw = Group(tracks=False), random.Random(5)
    filtered = group.join("c0", "a*")
    others = [group.join(f"c{n}", "b*", "c*") for n in (1, 2)]
    keys: list[bytes | None] = [
        draw.choice((b"a", b"b", b"c", b"d")) + b"%d" % draw.randrange(50) for _ in range(1000)
    ]
    for at in range(0, 1000, 100):
        group.topic.add(keys[at : at + 100])
        group.run()
    owners: dict[bytes | None, Consumer] = {}
    for consumer, hand in group.hands.items():
        assert hand == sorted(hand)
        for offset in hand:
            assert owners.setdefault(keys[offset], consumer) is consumer
    taken = [keys[offset][:1] for offset in group.hands[filtered]]  # type: ignore[index]
    assert set(taken) == {b"a"}
    assert all(group.hands[each] for each in others)
    delivered = sum(map(len, group.hands.values()))
    skipped = sum(key[:1] == b"d" for key in keys if key is not None)
    assert (delivered, group.sub.router.skipped_count) == (1000 - skipped, skipped)  # type: ignore[union-attr]
    assert (group.sub.cursor, group.sub.ledger.unacked, group.sub.lost_count) == (1000, 0, 0)


def test_what_a_slow_consumer_does_not_take_before_it_is_gone_is_counted():
    """Nothing is kept: its messages wait as long as the topic has them, and hold up no other consumer."""
    group = Group(tracks=False)
    slow, quick = group.join("c0", credit=10), group.join("c1")
    keys: list[bytes | None] = [b"k%d" % (n % 500) for n in range(1000)]
    group.topic.add(keys)
    group.run()
    assert len(group.hands[slow]) == 10
    waiting = group.sub.ledger.waiting
    assert waiting == 1000 - 10 - len(group.hands[quick]) > 0
    group.topic.add(keys)
    gaps = group.sub.dispatch(
        group.topic.end,
        lambda _, offset: Gap(1000, "gone", lost=True) if offset < 1000 else group.topic.frames[1],
        0,
        [],
    )
    assert [(gap.start, gap.end, gap.lost) for gap in gaps] == [(gaps[0].start, 1000, True)]
    assert group.sub.lost_count == waiting


def test_what_waits_for_a_slow_consumer_of_a_topic_that_keeps_nothing_is_bounded():
    group = Group(tracks=False)
    group.join("c0", credit=1)
    quick = group.join("c1")
    keys: list[bytes | None] = [b"k%d" % n for n in range(65_536)]
    for _ in range(12):
        group.topic.add(keys)
        group.run()
    owned = len(group.hands[quick]) // 12
    assert group.hands[quick] == sorted(group.hands[quick])
    assert len(group.hands[quick]) == 12 * owned > 0, "it misses nothing"
    assert group.sub.ledger.waiting < AHEAD_MAX + 65_536
    assert group.sub.lost_count == 12 * (65_536 - owned) - 1 - group.sub.ledger.waiting
