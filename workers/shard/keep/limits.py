"""The limits of topics on one worker: numbers of producers and consumers, and rates of messages.

A rate is a bucket in shared memory, found by topic and subscription, so that all workers with partitions
of a topic draw on one. Publishes above the rate are refused as THROTTLED, with the time after which to
send again: no message is lost and no other client waits. Deliveries above it wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.admission.layout import PartitionWord, ProducerWord, is_passed_on
from danube_fast.broker.admission.rates import Rate
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Parting, SubscriptionKind
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import ResourceExhausted
from danube_fast.net.protocol import Pong, encode
from danube_fast.net.session import Session
from danube_fast.ring.buckets import Bucket, JointBucket
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.keep.namespaces import Namespaces
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.state import ShardState

__all__ = ["Limits"]

NO_RATES = (0, 0)
FRAMES_OF_RATE = 25
"""A frame has at most so small a part of a second's worth, shared by the workers, each of which may take one too many."""
FRAME_BYTES_MIN = 4096
UNKNOWN_NS = 50 * MILLISECOND_NS
"""How long publishers wait while the storage of their namespace is counted."""
_PROBE = encode(Pong(0))
"""Answers no request: sent to learn whether a connection is still there."""


class Limits:
    """Apply the limits of policies on one worker."""

    def __init__(self, state: ShardState, delivery: Delivery, consumers: Consumers) -> None:
        self._state, self._delivery, self._consumers = state, delivery, consumers
        self.namespaces = Namespaces(state)
        self._throttled: dict[int, Partition] = {}
        self._open_at_ns = 0
        state.policy_listeners.append(self._apply)

    def attach(self, intake: Intake) -> None:
        """Let publishes be charged here, and be told when to come again, or why they are refused."""
        intake.charge, intake.wait_ms = self.charge, self.wait_ms
        intake.namespace_text = self.namespaces.full_text

    def _apply(self, partition: Partition) -> None:
        """Give a partition and its subscriptions the rates of its policy."""
        policy = partition.policy
        row = self._state.tables.partitions[partition.slot]
        row[PartitionWord.MESSAGE_BYTES_MAX] = policy.message_bytes_max
        namespace = self.namespaces.apply(partition)
        rates = policy.publish_messages_per_second, policy.publish_bytes_per_second
        own = self._bucket(partition.rate, rates, partition)
        partition.set_rate(_joined(own, None if namespace is None else namespace.publish))
        row[PartitionWord.IS_PACED] = partition.rate is not None
        if partition.partition_id in self._throttled:
            self._let_in(partition, self._state.now_ns)
        for sub in partition.all_subscriptions():
            self.equip(partition, sub)
            self._consumers.touch(sub)

    @staticmethod
    def _key(partition: Partition, subscription: str) -> int:
        """Make the key of a bucket; the topic's incarnation is the same on all its partitions, and no other's."""
        text = f"{partition.assigned.incarnation}\n{subscription}"
        return (xxhash.xxh64_intdigest(text.encode()) & ((1 << 62) - 1)) or 1

    def equip(self, partition: Partition, sub: Subscription) -> None:
        """Give a subscription its rate, or none."""
        policy = partition.policy
        rates = policy.dispatch_messages_per_second, policy.dispatch_bytes_per_second
        if sub.kind is SubscriptionKind.READER:
            rates = NO_RATES
        own = self._bucket(sub.rate, rates, partition, sub.name or "\n")
        namespace = self.namespaces.of(partition)
        sub.set_rate(_joined(own, None if namespace is None else namespace.dispatch))

    def _bucket(
        self, before: Any, rates: tuple[int, int], partition: Partition, subscription: str = ""
    ) -> Bucket | None:
        """Make the bucket for these rates a second. New rates forgive the debt of `before`: the debt of one
        message a second could last for hours."""
        before = _own(before)
        if before is not None and before.rates != rates:
            before.forgive()
        if not any(rates):
            return None
        return Bucket(self._state.boot.buckets.address(self._key(partition, subscription)), *rates)

    # ------------------------------------------------------------ rates of publishers

    def charge(self, partition: Partition, rate: Rate, messages: int, byte_count: int) -> None:
        """Charge the bucket of a partition, and close the partition for a while if it is empty. That of its namespace is
        looked at by the admission kernel."""
        now_ns = self._state.now_ns
        rate.take(now_ns, messages, byte_count)
        own = _own(rate)
        wait_ns = 0 if own is None else own.wait_ns(now_ns)
        if wait_ns:
            text = f"{partition.topic} is published to faster than its policy allows"
            self._state.gate.close(partition, Cause.RATE, text)
            if not self._throttled:
                self._open_at_ns = now_ns + wait_ns
            self._open_at_ns = min(self._open_at_ns, now_ns + wait_ns)
            self._throttled[partition.partition_id] = partition

    def frame_limits(self, partition: Partition) -> tuple[int, int]:
        """Return the most bytes and messages that a frame should have, so that rates are kept within a tenth in each second;
        0: any number."""
        namespace, policy = self.namespaces.of(partition), partition.policy
        rates = [(policy.publish_messages_per_second, policy.publish_bytes_per_second)]
        if namespace is not None:
            rates.append(namespace.quota.publish_rates)
        messages, byte_count = (
            min(filter(None, each), default=0) for each in zip(*rates, strict=True)
        )
        part = FRAMES_OF_RATE * len(self._state.boot.config.processes.workers)
        return (
            max(byte_count // part, FRAME_BYTES_MIN) if byte_count else 0,
            max(messages // part, 1) if messages else 0,
        )

    def wait_ms(self, partition: Partition) -> int:
        """Tell after how long a throttled publisher should send again."""
        rate = partition.rate
        wait_ns = 0 if rate is None else rate.wait_ns(self._state.now_ns)
        if not wait_ns and self.namespaces.is_unknown(partition):
            wait_ns = UNKNOWN_NS
        return 1 + wait_ns // MILLISECOND_NS

    def let_in_again(self, now_ns: int) -> None:
        """Open partitions whose rate is not used up any more."""
        self.namespaces.begin_turn(now_ns)
        if not self._throttled or now_ns < self._open_at_ns:
            return
        waits = [self._let_in(partition, now_ns) for partition in list(self._throttled.values())]
        self._open_at_ns = now_ns + min(filter(None, waits), default=0)

    def _let_in(self, partition: Partition, now_ns: int) -> int:
        """Open a partition if its rate is not used up any more; how long it stays closed otherwise."""
        own = _own(partition.rate)
        wait_ns = 0 if own is None else own.wait_ns(now_ns)
        if not wait_ns:
            del self._throttled[partition.partition_id]
            self._state.gate.open(partition, Cause.RATE)
        return wait_ns

    # ------------------------------------------------------------ numbers

    def _reap(self, numbers: Iterable[int]) -> None:
        """Close those of these sessions whose connection has ended, so that they are not counted. A ROUTER
        notices that only when it sends."""
        for number in set(numbers):
            session = self._state.sessions.by_number(number)
            if session is None:
                continue
            self._delivery.send(session, [_PROBE])
            if session in self._delivery.gone:
                self._delivery.gone.remove(session)
                self._consumers.close_session(session, Parting.DIED)

    def reap_exclusive(self, sub: Subscription, session: Session) -> None:
        """Close the session with an exclusive subscription if its connection has ended, so that a process that
        was killed and restarted is not refused until the session timeout."""
        if sub.kind is SubscriptionKind.EXCLUSIVE:
            self._reap({consumer.session for consumer in sub.consumers} - {session.number})

    def check_handle(self, partition: Partition, session: int) -> None:
        """Raise ResourceExhausted if one more handle of that session, by its number, is too many for the namespace."""
        if self._state.sessions.by_number(session) is not None or is_passed_on(session):
            self.namespaces.take_handle(partition, lambda numbers: self._reap(numbers - {session}))

    def check_producer(self, partition: Partition, producer_id: int) -> None:
        """Raise ResourceExhausted if one more producer is too many."""
        limit = partition.policy.producers_max
        if not limit:
            return
        tables, session_of = self._state.tables, self._state.sessions.by_number
        rows = tables.producers[: tables.producer_count]
        mine = rows[:, ProducerWord.PARTITION_ID] == partition.partition_id
        others = mine & (rows[:, ProducerWord.PRODUCER_ID] != producer_id)
        sessions = rows[np.flatnonzero(others), ProducerWord.SESSION].tolist()

        def count_living() -> int:
            return sum(session_of(n) is not None or is_passed_on(n) for n in sessions)

        if count_living() >= limit:
            self._reap(sessions)
        _check_limit(partition, "producers_max", count_living(), partition.topic)

    def check_subscription(self, partition: Partition, name: str, session: Session) -> None:
        """Raise ResourceExhausted if a new subscription, or one more consumer of `session`, is too many."""
        try:
            self._check_subscription(partition, name)
        except ResourceExhausted:
            consumers = [c for sub in partition.subscriptions.values() for c in sub.consumers]
            self._reap({consumer.session for consumer in consumers} - {session.number})
            self._check_subscription(partition, name)

    @staticmethod
    def _check_subscription(partition: Partition, name: str) -> None:
        topic, subs = partition.topic, partition.subscriptions
        if name not in subs:
            _check_limit(partition, "subscriptions_max", len(subs), topic)
        count = sum(len(sub.consumers) for sub in subs.values())
        _check_limit(partition, "consumers_max", count, topic)
        if name in subs:
            count, owner = len(subs[name].consumers), f"subscription {name!r} on {topic}"
            _check_limit(partition, "consumers_per_subscription_max", count, owner)


def _own(rate: Rate | None) -> Bucket | None:
    """Return the bucket that is not a namespace's."""
    if isinstance(rate, JointBucket):
        return rate.own
    return rate if isinstance(rate, Bucket) else None


def _joined(own: Bucket | None, shared: Bucket | None) -> Rate | None:
    return own if shared is None else JointBucket(own, shared)


def _check_limit(partition: Partition, name: str, count: int, owner: str) -> None:
    """Raise ResourceExhausted if what `owner` has reaches the limit of that name."""
    limit, kind = getattr(partition.policy, name), name.split("_")[0]
    if limit and count >= limit:
        verb = "delete" if kind == "subscriptions" else "close"
        raise ResourceExhausted(
            f"{owner} has {count} {kind} and its policy allows {name} {limit}; {verb} one, or raise it: "
            f"danube-fast topics set-policy TOPIC {name}=N"
        )
