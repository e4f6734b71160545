"""Subscriptions that a new partition of a growing topic begins with, before a producer can publish to it."""

from __future__ import annotations

from danube_fast.broker import records as r
from danube_fast.broker.messages import Assignment
from danube_fast.broker.subscription.consumer import SubscriptionKind
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.countdown import Countdown
from danube_fast.errors import DanubeError
from danube_fast.workers.shard.state import ShardState

__all__ = ["inherit"]


def inherit(state: ShardState, entry: Assignment, countdown: Countdown) -> None:
    """Make the missing subscriptions of an assignment, at the first message of the partition.

    `countdown` waits until they are durable.
    """
    partition = state.partition(entry.partition_id)
    if partition is None or not entry.subscriptions:
        return
    done = countdown.add()
    journal = state.journals[partition.log_slot]
    for inherited in entry.subscriptions:
        name, policy = inherited.subscription, inherited.failure_policy
        if name in partition.subscriptions:
            continue
        sub, _ = partition.subscribe(name, SubscriptionKind(inherited.type), "earliest")
        number = partition.partition_id
        journal.record(r.SubscriptionCreated(number, name, sub.kind.value, sub.cursor))
        if policy != FailurePolicy():
            sub.set_policy(policy)
            journal.record(r.PolicySet(number, name, policy))

    def recorded(error: DanubeError | None) -> None:
        for inherited in entry.subscriptions:
            sub = partition.subscriptions.get(inherited.subscription)
            if sub is not None and error is None:
                sub.note_recorded()
        done(error)

    journal.when_durable(recorded)
