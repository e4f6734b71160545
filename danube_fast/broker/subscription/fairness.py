"""Fair turns among partitions that draw on one credit: those of a consumer of many topics. IO-free.

Without it the first partition with a backlog would take all credit, again and again, and the others
of its consumer would wait until it is read to its end. So a turn is bounded: the rest of the credit
is lent out while a partition is dispatched, and who was served goes behind the others.
"""

from __future__ import annotations

from danube_fast.broker.partition import Partition, ReadLog
from danube_fast.broker.subscription.consumer import Consumer, Deliver, Flow
from danube_fast.broker.subscription.obstacle import Obstacle

__all__ = ["TURN_BYTES", "dispatch_fairly"]

TURN_BYTES = 256 * 1024
"""About so much a partition hands out in one turn, if others share its consumer's credit."""


def dispatch_fairly(
    partition: Partition, read_log: ReadLog, now_ns: int, effects: list[Deliver]
) -> tuple[list[Obstacle], bool]:
    """`partition.dispatch`, for one turn. What was met, and whether it wants another turn."""
    sharing = [
        consumer
        for sub in (*partition.subscriptions.values(), *partition.readers)
        for consumer in sub.consumers
        if len(consumer.flow.users) > 1
    ]
    if not sharing:
        return partition.dispatch(read_log, now_ns, effects), False
    known = len(effects)
    flows = dict.fromkeys(consumer.flow for consumer in sharing)  # each lends once
    lent = {flow: _lend(flow) for flow in flows}
    try:
        met = partition.dispatch(read_log, now_ns, effects)
    finally:
        again = [_take_back(flow, before) for flow, before in lent.items()]
    for consumer in dict.fromkeys(effect.consumer for effect in effects[known:]):
        _put_last(consumer)
    return met, any(again)


def _lend(flow: Flow) -> tuple[int, int, bool]:
    """Leave a turn's worth of credit. What was there, what is left, whether it had run out."""
    before, ran_out = flow.byte_credit, flow.ran_out
    flow.byte_credit = min(before, TURN_BYTES)
    flow.kept_bytes = before - flow.byte_credit
    return before, flow.byte_credit, ran_out


def _take_back(flow: Flow, before: tuple[int, int, bool]) -> bool:
    """Put the rest back; whether the turn was used up and there is more."""
    credit, turn, ran_out = before
    used_up = turn > 0 and flow.byte_credit <= 0
    flow.byte_credit += credit - turn
    flow.kept_bytes = 0
    if flow.willing:
        flow.ran_out = ran_out
    return used_up and flow.willing


def _put_last(consumer: Consumer) -> None:
    """Others of its flow go first when there is credit again."""
    users = consumer.flow.users
    if users.pop(consumer, 0) is None:
        users[consumer] = None
