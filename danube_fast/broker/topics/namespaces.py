"""Namespaces: which there are, and what each sets for its topics. Kept in the metadata store.

/namespaces/{namespace}        NamespaceRecord
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from danube_fast.broker.topics.policy import effective, merge_values
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota
from danube_fast.broker.topics.records import NamespaceRecord, TopicRecord
from danube_fast.broker.topics.store import Store
from danube_fast.errors import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted
from danube_fast.types import REPLY_TOPICS, TopicName, check_namespace, parse_topic

__all__ = ["Namespaces"]

NAMESPACES_ALWAYS = ("default", "system")


class Namespaces:
    """The namespaces of a broker; the coordinator is the only writer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, NamespaceRecord] = {}
        self._quotas: dict[str, NamespaceQuota] = {}
        self._topic_counts: dict[str, int] = {}
        self.quota_listeners: list[Callable[[str], None]] = []
        """Called with the name of a namespace when it is made or deleted, and when its quota is set."""
        for _, entry in store.list("/namespaces/"):
            record = msgspec.json.decode(entry.value, type=NamespaceRecord)
            self._enter(record)

    def names(self) -> list[str]:
        """All namespaces, by name."""
        return sorted({*NAMESPACES_ALWAYS, *self._records})

    def require(self, namespace: str) -> None:
        """Raises NotFound if there is no such namespace."""
        if namespace not in self._records and namespace not in NAMESPACES_ALWAYS:
            raise NotFound(
                f"namespace {namespace} does not exist; create it with: danube-fast namespaces "
                f"create {namespace}"
            )

    def create(self, namespace: str, now_ns: int) -> None:
        """Make a namespace. Raises InvalidArgument or AlreadyExists."""
        check_namespace(namespace)
        if namespace in self.names():
            raise AlreadyExists(f"namespace {namespace} exists already; use it")
        self._write(NamespaceRecord(namespace, now_ns))
        self._tell(namespace)

    def delete(self, namespace: str, topics: list[TopicRecord]) -> None:
        """Remove a namespace, which has these topics. Raises NotFound or FailedPrecondition."""
        if namespace in NAMESPACES_ALWAYS:
            raise FailedPrecondition(f"namespace {namespace} always exists")
        self.require(namespace)
        if topics:
            raise FailedPrecondition(
                f"namespace {namespace} has {len(topics)} topics, {topics[0].topic} among them; "
                "delete them first"
            )
        self._store.delete(f"/namespaces/{namespace}")
        del self._records[namespace], self._quotas[namespace]
        self._tell(namespace)

    def values(self, namespace: str) -> dict[str, Any]:
        """The values that a namespace sets for its topics."""
        record = self._records.get(namespace)
        return record.policy if record is not None else {}

    def set_values(
        self, namespace: str, values: Mapping[str, Any], topics: list[TopicRecord], now_ns: int
    ) -> None:
        """Change some values for a namespace that has these topics. Raises NotFound, InvalidArgument."""
        self.require(namespace)
        before = self._records.get(namespace, NamespaceRecord(namespace, now_ns))
        merged = merge_values(before.policy, values)
        effective(merged, {})
        for topic in topics:
            effective(merged, topic.policy)
        self._write(msgspec.structs.replace(before, policy=merged))

    def quota(self, namespace: str) -> NamespaceQuota:
        """The quota of a namespace, which may not exist."""
        return self._quotas.get(namespace, NO_QUOTA)

    def with_quota(self) -> list[str]:
        """Namespaces that have a quota. Any thread may ask."""
        return [name for name, quota in list(self._quotas.items()) if quota != NO_QUOTA]

    def set_quota(self, namespace: str, values: Mapping[str, Any], now_ns: int) -> NamespaceQuota:
        """Change some values of a namespace's quota; the quota. Raises NotFound, InvalidArgument."""
        self.require(namespace)
        before = self._records.get(namespace, NamespaceRecord(namespace, now_ns))
        merged = merge_values(before.quota, values, NamespaceQuota)
        self._write(msgspec.structs.replace(before, quota=merged))
        self._tell(namespace)
        return self.quota(namespace)

    def topic_count(self, namespace: str) -> int:
        """Topics of a namespace that count against its quota: reply topics, which clients make and delete with
        themselves, do not."""
        return self._topic_counts.get(namespace, 0)

    def count_topic(self, topic: str, by: int) -> None:
        """Note a topic that came or went."""
        if not topic.startswith(REPLY_TOPICS):
            namespace = parse_topic(topic).namespace
            self._topic_counts[namespace] = self._topic_counts.get(namespace, 0) + by

    def check_room(self, topic: TopicName) -> None:
        """Raise ResourceExhausted if one more topic is too many for its namespace."""
        namespace, count = topic.namespace, self.topic_count(topic.namespace)
        limit = self.quota(namespace).namespace_topics_max
        if limit and count >= limit and not topic.startswith(REPLY_TOPICS):
            raise ResourceExhausted(
                f"namespace {namespace} has {count} topics and its quota is namespace_topics_max "
                f"{limit}; delete one, or have the quota raised: danube-fast namespaces set-quota "
                f"{namespace} namespace_topics_max=N"
            )

    def _enter(self, record: NamespaceRecord) -> None:
        self._records[record.namespace] = record
        self._quotas[record.namespace] = msgspec.convert(record.quota, NamespaceQuota)

    def _tell(self, namespace: str) -> None:
        for listener in self.quota_listeners:
            listener(namespace)

    def _write(self, record: NamespaceRecord) -> None:
        self._store.put(f"/namespaces/{record.namespace}", msgspec.json.encode(record))
        self._enter(record)
