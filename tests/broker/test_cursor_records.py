"""Records of a subscription's cursor: replayed, they give the state that they were written from."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.ledger import ledger
from danube_fast.broker.ledger.layout import State
from danube_fast.broker.records import Acked, Cursor, decode_record, encode_record
from danube_fast.broker.subscription.consumer import Consumer, Flow, SubscriptionKind
from danube_fast.broker.subscription.subscription import Subscription

END = 60
ACK, MANY, SEEK, RECORD = "ack", "many", "seek", "record"
step = st.one_of(
    st.tuples(st.just(ACK), st.integers(0, END), st.integers(1, 9)),
    st.tuples(st.just(MANY), st.lists(st.integers(0, END), min_size=1, max_size=30)),
    st.tuples(st.just(SEEK), st.integers(0, END)),
    st.tuples(st.just(RECORD)),
)


def fresh() -> Subscription:
    return Subscription(1, "s", SubscriptionKind.SHARED, 0, tracks=True)


def state(sub: Subscription) -> tuple[int, list[int]]:
    return sub.cursor, sub.ledger.settled_pairs()


def ack_many(sub: Subscription, offsets: list[int]) -> None:
    """By way of a consumer that holds them, in one sweep."""
    consumer = Consumer(sub, 1, 1, Flow(), "c")
    sub.attach(consumer)
    for offset in offsets:
        if offset >= sub.cursor and sub.ledger.state_of(offset)[0] == State.FRESH:
            sub.ledger.deliver(offset, offset + 1, consumer.slot, 0)
    sub.ack(consumer, [edge for offset in sorted(offsets) for edge in (offset, offset + 1)])
    sub.detach(consumer)


def replayed(base: Subscription, records: list[bytes]) -> Subscription:
    for data in records:
        record = decode_record(data)
        if isinstance(record, Cursor):
            base.restore(record.cursor, record.acked)
        else:
            assert isinstance(record, Acked)
            base.restore_acked(record.ranges)
    return base


@settings(deadline=None)
@given(st.lists(step, max_size=40), st.data())
def test_replay_gives_the_state_back(steps: list[tuple], data: st.DataObject) -> None:
    """From the beginning, and from a snapshot that knows more than the records before it."""
    normal = ledger.RANGES_AT_ONCE
    ledger.RANGES_AT_ONCE = 3
    try:
        sub = fresh()
        records: list[bytes] = []
        snapshots = []
        for kind, *arguments in [*steps, (RECORD,)]:
            if kind == ACK:
                sub.settle(arguments[0], arguments[0] + arguments[1])
            elif kind == MANY:
                ack_many(sub, arguments[0])
            elif kind == SEEK:
                sub.seek(arguments[0])
            else:
                records += map(encode_record, sub.cursor_records())
            snapshots.append((len(records), state(sub)))
        assert not sub.cursor_dirty
        assert state(replayed(fresh(), records)) == state(sub)
        first, (cursor, acked) = data.draw(st.sampled_from(snapshots))
        base = fresh()
        base.restore(cursor, acked)
        again = replayed(base, records[data.draw(st.integers(0, first)) :])
        assert state(again) == state(sub)
        assert again.next_offset == again.cursor
    finally:
        ledger.RANGES_AT_ONCE = normal


def test_a_record_holds_only_what_is_new() -> None:
    sub = fresh()
    for offset in range(1, 20_001, 2):
        sub.settle(offset, offset + 1)
    assert len(sub.cursor_records()) == 10
    sub.settle(30_000, 30_001)
    assert sub.cursor_records() == [Acked(1, "s", [30_000, 30_001])]
    assert sub.cursor_records() == []
