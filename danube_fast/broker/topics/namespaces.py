"""Namespaces: which there are, and what each sets for its topics. Kept in the metadata store.

/namespaces/{namespace}        NamespaceRecord
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from danube_fast.broker.topics.policy import effective, merge_values
from danube_fast.broker.topics.records import NamespaceRecord, TopicRecord
from danube_fast.broker.topics.store import Store
from danube_fast.errors import AlreadyExists, FailedPrecondition, NotFound
from danube_fast.types import check_namespace

__all__ = ["Namespaces"]

NAMESPACES_ALWAYS = ("default", "system")


class Namespaces:
    """The namespaces of a broker; the coordinator is the only writer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, NamespaceRecord] = {}
        for _, entry in store.list("/namespaces/"):
            record = msgspec.json.decode(entry.value, type=NamespaceRecord)
            self._records[record.namespace] = record

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
        del self._records[namespace]

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

    def _write(self, record: NamespaceRecord) -> None:
        self._store.put(f"/namespaces/{record.namespace}", msgspec.json.encode(record))
        self._records[record.namespace] = record
