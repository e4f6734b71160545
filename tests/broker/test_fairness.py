"""Turns of partitions that share one consumer's credit, without any IO."""

from __future__ import annotations

from typing import Any

import pytest

from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionAssigned
from danube_fast.broker.subscription.consumer import (
    Consumer,
    Deliver,
    Flow,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.fairness import TURN_BYTES, dispatch_fairly

FRAME_BYTES = TURN_BYTES // 4


def partition(number: int, frames: int, flow: Flow) -> Partition:
    """With a backlog of so many frames of one message for one consumer."""
    assigned = PartitionAssigned(number, f"/default/{number}", 0, "reliable", "fsync", 1)
    made = Partition(assigned, 0, number)
    sub, _ = made.subscribe("s", SubscriptionKind.EXCLUSIVE, "earliest")
    sub.attach(Consumer(sub, 1, number, flow, "c"))
    for offset in range(frames):
        made.append(Stored(number, offset, offset + 1, 1, FRAME_BYTES, 7, bytes(8), 0))
    return made


def nothing(*_: Any) -> None:
    return None


def turn(dirty: list[Partition]) -> tuple[list[int], list[Partition]]:
    """One turn of each; whose frames went out, and who wants another."""
    out: list[int] = []
    again: list[Partition] = []
    for one in dirty:
        effects: list[Deliver] = []
        met, more = dispatch_fairly(one, nothing, 0, effects)
        assert not met
        out += [effect.stored.partition_id for effect in effects]
        if more:
            again.append(one)
    return out, again


def test_partitions_take_turns_while_credit_lasts() -> None:
    flow = Flow()
    flow.grant(100 * FRAME_BYTES, 1000)
    parts = [partition(number, frames, flow) for number, frames in ((1, 12), (2, 1), (3, 6))]
    out, again = turn(parts)
    assert out == [1] * 4 + [2] + [3] * 4
    assert [one.partition_id for one in again] == [1, 3]
    out, again = turn(again)
    assert out == [1] * 4 + [3] * 2
    out, again = turn(again)
    assert (out, turn(again)[0]) == ([1] * 4, [])
    assert flow.byte_credit == (100 - 19) * FRAME_BYTES
    assert not flow.ran_out


def test_who_was_served_stands_behind_when_there_is_credit_again() -> None:
    flow = Flow()
    parts = {number: partition(number, 20, flow) for number in (1, 2, 3)}
    served: list[int] = []
    for _ in range(6):
        flow.grant(4 * FRAME_BYTES, 1000)
        order = [parts[consumer.subscription.partition_id] for consumer in flow.users]
        out, _ = turn(order)
        served += dict.fromkeys(out)
        assert flow.byte_credit == 0
        assert flow.ran_out
    assert served == [1, 2, 3, 1, 2, 3]


def test_a_consumer_of_one_partition_takes_all_at_once() -> None:
    flow = Flow()
    flow.grant(100 * FRAME_BYTES, 1000)
    out, again = turn([partition(1, 50, flow)])
    assert (len(out), again) == (50, [])


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_no_credit_is_lost_however_many_subscriptions_share_it(names: list[str]) -> None:
    flow = Flow()
    flow.grant(100 * FRAME_BYTES, 1000)
    one = partition(1, 0, flow)
    for number, name in enumerate(names):
        sub, _ = one.subscribe(name, SubscriptionKind.EXCLUSIVE, "earliest")
        sub.attach(Consumer(sub, 1, number, flow, name))
    assert turn([one]) == ([], [])
    assert flow.byte_credit == 100 * FRAME_BYTES
