"""Gap events: tell consumers which offsets they are moved over, and why, and count that for `describe`.

All reasons (lost, trimmed, purged, expired, never used) come through here: a consumer that sees offsets
jump without an event could not tell loss from order.
"""

from __future__ import annotations

import logging
from typing import Any

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Consumer, Gap
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import DanubeError
from danube_fast.net import protocol as p
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.state import ShardState

__all__ = ["Gaps"]

_log = logging.getLogger(__name__)


class Gaps:
    """Tell and count the gaps of subscriptions of one worker since it started."""

    def __init__(self, state: ShardState, delivery: Delivery, consumers: Consumers) -> None:
        self._state, self._delivery, self._consumers = state, delivery, consumers
        state.removal_listeners.append(lambda partition: self.forget(partition.partition_id))
        self._met: dict[tuple[int, str], tuple[int, dict[str, Any]]] = {}
        """Number of gaps, and the last one, by partition and subscription."""

    def tell(self, partition: Partition, sub: Subscription, gap: Gap) -> None:
        """Tell every consumer of a subscription of a gap."""
        for consumer in () if gap.is_silent else sub.consumers:
            self._send(partition, consumer, gap)
        if sub.name and not gap.is_silent:
            if sub.tracks and not sub.consumers:
                sub.pending_gaps.add(gap)
            key = (partition.partition_id, sub.name)
            count, _ = self._met.get(key, (0, {}))
            self._met[key] = (count + 1, {**_detail(gap), "time_ns": self._state.now_wall_ns})
        self._delivery.count_lost(partition, sub)
        self._consumers.touch(sub)

    def tell_pending(self, partition: Partition, consumer: Consumer) -> None:
        """Tell a new consumer what was lost while there was none."""
        sub: Subscription = consumer.subscription
        for gap in sub.pending_gaps.take():
            self._send(partition, consumer, gap)
            self._consumers.touch(sub)

    def refuse(self, sub: Subscription, error: DanubeError) -> None:
        """Close the consumers of a subscription whose next messages cannot be read."""
        _log.error("subscription %r: %s", sub.name, error)
        self._consumers.close_all(sub, error.code, str(error))

    def _send(self, partition: Partition, consumer: Consumer, gap: Gap) -> None:
        session = self._state.sessions.by_number(consumer.session)
        if session is not None:
            detail = {**_detail(gap), "topic": partition.topic}
            event = p.ConsumerEvent(consumer.consumer_id, p.EventKind.GAP.value, detail)
            self._delivery.send(session, [p.encode(event)])

    def of(self, partition: Partition, sub: Subscription) -> tuple[int, dict[str, Any] | None]:
        """Count the gaps that a subscription has met; the number, and the last one."""
        return self._met.get((partition.partition_id, sub.name), (0, None))

    def forget(self, partition_id: int, name: str | None = None) -> None:
        """Forget the gaps of a subscription that is gone, or with None all of a partition."""
        for key in [k for k in self._met if k[0] == partition_id and name in (None, k[1])]:
            del self._met[key]


def _detail(gap: Gap) -> dict[str, Any]:
    return {"start": gap.start, "end": gap.end, "reason": gap.reason, "lost": gap.lost}
