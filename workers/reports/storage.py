"""The storage quota of namespaces and topics: workers report what they keep, the coordinator adds up.

    worker --StorageUsed {partition id: bytes} every second--> coordinator
           <--StorageFull {partition id: why}--------------------

While the coordinator is down its last answer stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.broker import messages as m
from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord
from danube_fast.roles import COORDINATOR
from danube_fast.types import parse_topic
from danube_fast.workers.process.mailbox import Mailbox, Request
from danube_fast.workers.shard.job import PeriodicJob

if TYPE_CHECKING:  # the coordinator, which every start waits for, imports this module and no shard
    from danube_fast.workers.shard.keep.retention import Retention
    from danube_fast.workers.shard.state import ShardState

__all__ = ["StorageQuotas", "StorageReports"]


class StorageReports(PeriodicJob):
    """Report how much each partition keeps. The worker's side."""

    interval_ns = 1_000_000_000

    def __init__(self, state: ShardState, retention: Retention) -> None:
        self._state, self._retention = state, retention
        self._said = False
        state.boot.mailbox.serve(m.StorageFull, self._full)

    def run(self, now_ns: int) -> None:
        """Report the partitions that have a quota."""
        retention = self._retention
        used = {
            partition.partition_id: retention.size_of(partition)
            for partition in retention.policed()
            if partition.policy.storage_bytes_max
        }
        if used or self._said:
            self._said = bool(used)
            self._state.boot.mailbox.notify(COORDINATOR, m.StorageUsed(used))

    def _full(self, request: Request[m.StorageFull]) -> None:
        full = request.message.full
        for partition in self._retention.policed():
            limited = partition.policy.storage_bytes_max
            text = full.get(partition.partition_id, "") if limited else ""
            self._state.gate.set(partition, Cause.STORAGE, text)


class StorageQuotas:
    """Compare what workers keep with the quotas. The coordinator's side."""

    def __init__(self, mailbox: Mailbox, topics: TopicDirectory) -> None:
        self._mailbox, self._topics = mailbox, topics
        self._used: dict[int, dict[int, int]] = {}
        """By worker: bytes by partition."""
        mailbox.serve(m.StorageUsed, self._report)

    def _report(self, request: Request[m.StorageUsed]) -> None:
        used = request.message.used
        for sizes in self._used.values():  # what has moved counts where it was reported last
            for partition_id in sizes.keys() & used.keys():
                del sizes[partition_id]
        self._used[request.peer] = used
        totals: dict[str, int] = {}
        for sizes in self._used.values():
            for partition_id, size in sizes.items():
                scope, _ = self._scope(self._topics.partition(partition_id))
                totals[scope] = totals.get(scope, 0) + size
        full: dict[int, str] = {}
        for partition_id in used:
            scope, limit = self._scope(self._topics.partition(partition_id))
            if limit and totals[scope] > limit:
                full[partition_id] = (
                    f"{scope} keeps {totals[scope]} bytes and its policy allows storage_bytes_max "
                    f"{limit}; let its subscriptions consume, purge a topic, or raise it"
                )
        self._mailbox.notify(request.peer, m.StorageFull(full))

    def _scope(self, partition: PartitionRecord | None) -> tuple[str, int]:
        """Find the quota that a partition counts against: its owner, and its size."""
        record = self._topics.topic(partition.topic) if partition is not None else None
        if record is None:
            return "", 0
        own = record.policy.get("storage_bytes_max")
        if own is not None:
            return f"topic {record.topic}", own
        namespace = parse_topic(record.topic).namespace
        limit = self._topics.namespaces.values(namespace).get("storage_bytes_max", 0)
        return f"namespace {namespace}", limit
