"""Fair turns: the credit that is lent out for a turn comes back, whoever shares it."""

from __future__ import annotations

import pytest

from danube_fast.broker.consumer import Consumer, Deliver, Flow, SubscriptionKind
from danube_fast.broker.fairness import TURN_BYTES, dispatch_fairly
from danube_fast.broker.partition import Partition
from danube_fast.broker.records import PartitionAssigned
from danube_fast.broker.subscription import Subscription

CREDIT = 1 << 30


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_no_credit_is_lost_however_many_share_it(names: list[str]) -> None:
    assigned = PartitionAssigned(1, "/default/x", 0, "reliable", "fsync", 1)
    partition = Partition(assigned, 0, 0)
    flow = Flow()
    flow.grant(CREDIT, CREDIT)
    for number, name in enumerate(names):
        sub, _ = partition.subscribe(name, SubscriptionKind.EXCLUSIVE, "earliest")
        sub.attach(Consumer(sub, 1, number, flow, name))
    other = Consumer(Subscription(2, "o", SubscriptionKind.SHARED, 0, tracks=True), 1, 9, flow, "o")
    flow.users[other] = None
    effects: list[Deliver] = []
    met, again = dispatch_fairly(partition, lambda _part, _offset: None, 0, effects)
    assert (met, again, effects) == ([], False, [])
    assert flow.byte_credit == CREDIT > TURN_BYTES
