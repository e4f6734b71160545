"""Answers of administrative operations: the shapes that the command line, clients and tools see as maps.

Counts of a subscription are told by each worker for its partitions, and added up for the topic.
"""

from __future__ import annotations

from typing import Any

import msgspec

from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.topics.records import TopicRecord

__all__ = [
    "BrokerStatus",
    "ClientConnection",
    "ClientPage",
    "Clients",
    "ConsumerCounts",
    "LogStatus",
    "OpenConsumer",
    "OpenProducer",
    "PartitionCounts",
    "PartitionPlace",
    "ProcessStatus",
    "RebalanceStatus",
    "SubscriptionCounts",
    "SubscriptionTotals",
    "TopicDescription",
    "TopicStats",
    "TopicSummary",
]


class TopicSummary(msgspec.Struct, kw_only=True):
    """A topic in a list."""

    topic: str
    dispatch: str
    durability: str
    partitioned: bool
    partitions: int
    created_ns: int

    @classmethod
    def of(cls, record: TopicRecord, **more: Any) -> Any:
        """Sum a topic up; `more`: the fields of a subclass."""
        return cls(
            topic=record.topic, dispatch=record.dispatch, durability=record.durability,
            partitioned=record.partitioned, partitions=len(record.partition_ids),
            created_ns=record.created_ns, **more,
        )  # fmt: skip


class PartitionPlace(msgspec.Struct, kw_only=True):
    """Where a partition lives, and lived."""

    partition_id: int
    partition: str
    log_id: int
    worker: int
    moving_to: int | None
    extents: list[Any]


class TopicDescription(TopicSummary, kw_only=True):
    """A topic's settings and the places of its partitions."""

    incarnation: int
    epoch: int
    placement: list[PartitionPlace]


class ConsumerCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A consumer, what it holds, and its credit."""

    name: str
    session: int
    unacked: int
    byte_credit: int
    message_credit: int
    partition: str = ""
    """Name of the partition, where several are added up."""


class _Counts(msgspec.Struct, kw_only=True):
    """Counts that add up over the partitions of a topic."""

    lag_messages: int = 0
    unacked: int = 0
    waiting_redelivery: int = 0
    delayed: int = 0
    blocked: int = 0
    redelivered: int = 0
    dropped: int = 0
    dead_letters: int = 0
    skipped: int = 0
    lost: int = 0
    gaps: int = 0
    expired: int = 0


_ADDED_UP = _Counts.__struct_fields__


class SubscriptionCounts(_Counts, kw_only=True):
    """A subscription on one partition."""

    subscription: str
    type: str
    cursor: int
    lag_seconds: float
    dead_letter_fault: str
    last_gap: dict[str, Any] | None
    failure_policy: FailurePolicy
    policy_setter: str
    consumers: list[ConsumerCounts]


class SubscriptionTotals(_Counts, kw_only=True):
    """A subscription on all partitions of a topic."""

    subscription: str
    topic: str
    type: str
    consumers: list[ConsumerCounts] = []
    cursors: dict[str, int] = {}
    """By name of the partition."""
    lag_seconds: float = 0.0
    last_gap: dict[str, Any] | None = None
    failure_policy: FailurePolicy = FailurePolicy()
    policy_setter: str = ""
    """Principal that set it; empty if no one was asked who they are."""
    dead_letter_fault: str = ""

    def add(self, counts: SubscriptionCounts, partition: str) -> None:
        """Add the counts of one partition."""
        for name in _ADDED_UP:
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        self.lag_seconds = max(self.lag_seconds, counts.lag_seconds)
        gaps = [gap for gap in (self.last_gap, counts.last_gap) if gap]
        self.last_gap = max(gaps, key=lambda gap: gap["time_ns"], default=None)
        self.failure_policy, self.policy_setter = counts.failure_policy, counts.policy_setter
        self.dead_letter_fault = self.dead_letter_fault or counts.dead_letter_fault
        self.cursors[partition] = counts.cursor
        for consumer in counts.consumers:
            self.consumers.append(msgspec.structs.replace(consumer, partition=partition))

    @property
    def state(self) -> str:
        """Why the subscription stands where it does, in words."""
        if self.dead_letter_fault and not self.blocked:
            return f"{self._state()}; dead letters would have to wait: {self.dead_letter_fault}"
        return self._state()

    def _state(self) -> str:
        if not self.lag_messages:
            return "caught up"
        if self.dead_letter_fault and self.blocked:  # they need no consumer
            return f"blocked: {self.blocked} dead letters have to wait: {self.dead_letter_fault}"
        if not self.consumers:
            return "stalled: no consumer is connected"
        if all(min(each.byte_credit, each.message_credit) <= 0 for each in self.consumers):
            return "stalled: its consumers have not taken what they were sent"
        if self.blocked and self.blocked + self.unacked >= self.lag_messages:
            return (
                f"blocked: {self.blocked} messages failed too often; change the failure policy "
                "(danube-fast subscriptions set-failure-policy), skip them, or seek"
            )
        if self.unacked >= self.lag_messages:
            return "waiting: everything was delivered and is not acked yet"
        if self.delayed and self.delayed + self.unacked + self.blocked >= self.lag_messages:
            return f"waiting: {self.delayed} messages come again, or for the first time, later"
        return "moving"


class PartitionCounts(msgspec.Struct, kw_only=True):
    """Offsets, counts and subscriptions of one partition."""

    partition_id: int
    topic: str
    dispatch: str
    durability: str
    log_id: int
    first_offset: int
    end_offset: int
    next_offset: int
    messages_in: int
    bytes_in: int
    producers: int
    subscriptions: list[SubscriptionCounts]
    readers: int
    refusal: str
    partition: str = ""
    """Name of the partition, as the coordinator knows it."""


class TopicStats(TopicSummary, kw_only=True):
    """Counts of a topic: added up, and by partition."""

    messages_in: int
    bytes_in: int
    producers: int
    readers: int
    subscriptions: list[SubscriptionTotals]
    partition_stats: list[PartitionCounts]

    @classmethod
    def add_up(cls, record: TopicRecord, partitions: list[PartitionCounts]) -> TopicStats:
        """Add the partitions of a topic up."""
        totals: dict[str, SubscriptionTotals] = {}
        for partition in partitions:
            for sub in partition.subscriptions:
                name = sub.subscription
                total = totals.setdefault(
                    name, SubscriptionTotals(subscription=name, topic=record.topic, type=sub.type)
                )
                total.add(sub, partition.partition)
        names = ("messages_in", "bytes_in", "producers", "readers")
        sums = {name: sum(getattr(each, name) for each in partitions) for name in names}
        subscriptions = [totals[name] for name in sorted(totals)]
        stats: TopicStats = cls.of(
            record, **sums, subscriptions=subscriptions, partition_stats=partitions
        )
        return stats


class OpenProducer(msgspec.Struct, kw_only=True):
    """A producer on a connection."""

    topic: str
    partition: int
    name: str


class OpenConsumer(msgspec.Struct, kw_only=True):
    """A consumer on a connection, and how many messages it holds."""

    topic: str
    partition: int
    subscription: str
    type: str
    name: str
    unacked: int


class ClientConnection(msgspec.Struct, kw_only=True):
    """A connection of a client to a process, and what is open on it."""

    process: str = ""
    """Name of the process, as the coordinator knows it."""
    session: int
    client: str
    principal: str
    transport: str
    silent_ms: int
    producer_count: int
    consumer_count: int
    producers: list[OpenProducer]
    """The first of them."""
    consumers: list[OpenConsumer]
    """The first of them."""


class ClientPage(msgspec.Struct, kw_only=True):
    """Connections to one process, and whether there are more of them."""

    clients: list[ClientConnection]
    more: bool


class Clients(msgspec.Struct, kw_only=True):
    """Connections, and the place to go on from; empty at the end."""

    clients: list[ClientConnection]
    after: str


class ProcessStatus(msgspec.Struct, kw_only=True):
    """A process of the broker."""

    process: str
    pid: int
    state: str
    epoch: int
    restarts: int
    port: int
    """0: it has none, or not yet."""
    heartbeat_age_ms: int
    fault: str = ""
    """What it does without just now, and what to do; empty: all is well."""


class RebalanceStatus(msgspec.Struct, kw_only=True):
    """The way in which partitions move between workers, and how busy these are."""

    strategy: str
    moves: int
    """Since the coordinator started."""
    worker_loads: list[float]


class LogStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A log, its worker, and how far it has come, if the worker has said so: positions in bytes."""

    log_id: int
    worker: int
    oldest_position: int | None = None
    snapshot_position: int | None = None
    synced_position: int | None = None
    written_position: int | None = None


class HistoryStatus(msgspec.Struct, kw_only=True):
    """The upload of history."""

    store: str
    fault: str
    """Why nothing can be uploaded just now; empty: all is well."""
    lag_bytes: int
    """Bytes that are not uploaded yet, about."""
    lag_seconds: int
    """Age of the oldest message that is not uploaded."""


class BrokerStatus(msgspec.Struct, kw_only=True):
    """Processes, logs and counters of a broker."""

    version: str
    supervisor_pid: int
    data_dir: str
    topics: int
    partitions: int
    rebalance: RebalanceStatus
    processes: list[ProcessStatus]
    logs: list[LogStatus]
    counters: dict[str, int]
    auth: str = "none"
    """`none`: all who reach the broker may do everything; `required`: clients prove who they are."""
    listen: str = ""
    """HOST:PORT where clients begin, with the port in use."""
    admin: str = ""
    """HOST:PORT where the admin port listens."""
    tls: bool = False
    """Whether the admin port speaks HTTPS."""
    tls_fault: str = ""
    """Why the newest TLS files are not in use, or refuse clients; empty: all is well, or there are none."""
    sign_on: str = ""
    """HOST:PORT where clients sign on, with the port in use; empty: nowhere."""
    sign_on_fault: str = ""
    """Why no client can sign on: its process cannot start, or has no TLS pair; empty: clients can, or there is none."""
    issuers_fault: str = ""
    """Why the newest file of trusted issuers, or of their keys, is not in use; empty: all are, or there are none."""
    server_keys: list[str] = []
    """Public keys of the broker that clients should pin, the newest first."""
    audit: str = "off"
    """`on` or `off`; or why the audit log cannot be written, so that administrative changes are refused."""
    audit_topic_fault: str = ""
    """Why `/system/audit` does not get the records just now, which are in the files all the same; empty: it does."""
    history: HistoryStatus | None = None
    """None: the broker has no store."""
