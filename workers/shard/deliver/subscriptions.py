"""Subscriptions that end: deleted by an administrator, by a policy, or for a dead-letter topic that will not do."""

from __future__ import annotations

from danube_fast.broker import records as r
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.state import ShardState

__all__ = ["Subscriptions"]


class Subscriptions:
    """Delete subscriptions of one worker."""

    def __init__(self, state: ShardState, consumers: Consumers, gaps: Gaps) -> None:
        self._state, self._consumers, self._gaps = state, consumers, gaps

    def drop(
        self, partition: Partition, sub: Subscription, cause: DanubeError, done: Done | None = None
    ) -> None:
        """Delete a subscription, whose consumers hear of the cause; `done` when that is durable."""
        self._consumers.close_all(sub, cause.code, str(cause))
        partition.forget_subscription(sub.name)
        self._gaps.forget(partition.partition_id, sub.name)
        record = r.SubscriptionDeleted(partition.partition_id, sub.name)
        self._state.record(partition, record, done)
