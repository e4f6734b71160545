"""The quota of a namespace: what may be set, who has it, how many topics there may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import admin
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.policy import TopicPolicy, merge_values
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota
from danube_fast.broker.topics.records import TopicOptions
from danube_fast.clock import SystemClock
from danube_fast.errors import InvalidArgument, NotFound, PermissionDenied, ResourceExhausted
from danube_fast.metadata.memory import MemoryStore
from danube_fast.types import REPLY_TOPICS, Permission


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def directory(store: MemoryStore) -> TopicDirectory:
    return TopicDirectory(store, log_count=1, partitions_per_topic_max=8)


def create(topics: TopicDirectory, name: str) -> None:
    topics.create(name, TopicOptions.parse({}), 1)


def test_no_name_is_both_of_a_policy_and_of_a_quota() -> None:
    assert not set(NamespaceQuota.__struct_fields__) & set(TopicPolicy.__struct_fields__)
    with pytest.raises(InvalidArgument, match="namespaces set-quota"):
        merge_values({}, {"namespace_topics_max": 1})
    with pytest.raises(InvalidArgument, match="there are:"):
        merge_values({}, {"producers_max": 1}, NamespaceQuota)


def test_a_quota_is_kept_and_taken_back_and_no_topic_inherits_it(store: MemoryStore) -> None:
    topics = directory(store)
    topics.namespaces.create("iot", 1)
    create(topics, "/iot/a")
    topics.commit()
    before = topics.policy_of(topics.require("/iot/a"))
    topics.namespaces.set_quota("iot", {"namespace_storage_bytes_max": "1MiB"}, 1)
    again = directory(store)
    assert again.namespaces.quota("iot") == NamespaceQuota(namespace_storage_bytes_max=1 << 20)
    assert again.namespaces.with_quota() == ["iot"]
    assert again.policy_of(again.require("/iot/a")) == before
    assert again.quota_of(again.require("/iot/a")).namespace_storage_bytes_max == 1 << 20
    again.namespaces.set_quota("iot", {"namespace_storage_bytes_max": None}, 1)
    assert again.namespaces.quota("iot") == NO_QUOTA and not again.namespaces.with_quota()
    with pytest.raises(NotFound):
        again.namespaces.set_quota("nowhere", {}, 1)


def test_each_change_of_a_quota_is_told_once_it_is_recorded(store: MemoryStore) -> None:
    namespaces = directory(store).namespaces
    told: list[tuple[str, int]] = []
    namespaces.quota_listeners.append(
        lambda name: told.append((name, namespaces.quota(name).namespace_topics_max))
    )
    namespaces.create("iot", 1)
    namespaces.set_quota("iot", {"namespace_topics_max": 2}, 1)
    namespaces.set_values("iot", {"producers_max": 1}, [], 1)
    namespaces.delete("iot", [])
    assert told == [("iot", 0), ("iot", 2), ("iot", 0)]
    with pytest.raises(NotFound):
        namespaces.set_quota("iot", {}, 1)
    assert len(told) == 3


def test_topics_are_counted_from_their_creation_to_their_end(store: MemoryStore) -> None:
    topics = directory(store)
    topics.namespaces.create("iot", 1)
    topics.namespaces.set_quota("iot", {"namespace_topics_max": 2}, 1)
    create(topics, "/iot/a")
    create(topics, "/iot/b")
    create(topics, "/default/free")
    with pytest.raises(
        ResourceExhausted, match=r"namespace iot has 2 topics.*namespace_topics_max 2"
    ):
        create(topics, "/iot/c")
    assert not topics.commit()
    again = directory(store)
    with pytest.raises(ResourceExhausted):
        create(again, "/iot/c")
    again.delete("/iot/a")
    create(again, "/iot/c")
    assert again.namespaces.topic_count("iot") == 2


def test_reply_topics_are_not_counted(store: MemoryStore) -> None:
    topics = directory(store)
    topics.namespaces.set_quota("system", {"namespace_topics_max": 1}, 1)
    for number in range(3):
        create(topics, f"{REPLY_TOPICS}{number}")
    create(topics, "/system/one")
    with pytest.raises(ResourceExhausted):
        create(topics, "/system/two")
    assert topics.namespaces.topic_count("system") == 1


def test_a_topic_that_could_not_be_recorded_takes_no_place(store: MemoryStore) -> None:
    first, second = directory(store), directory(store)
    first.namespaces.set_quota("default", {"namespace_topics_max": 1}, 1)
    create(second, "/default/a")
    assert not second.commit()
    create(first, "/default/a")
    assert len(first.commit()) == 1
    assert first.namespaces.topic_count("default") == 0


@pytest.mark.parametrize("right", list(Permission))
def test_who_manages_a_namespace_does_not_lose_its_quota_by_making_it_anew(
    right: Permission,
) -> None:
    quotas, deleted = {"shop": NamespaceQuota(namespace_topics_max=3)}, []
    namespaces = SimpleNamespace(
        quota=lambda name: quotas.get(name, NO_QUOTA), delete=lambda name, topics: deleted.append(name)
    )  # fmt: skip
    topics = SimpleNamespace(namespaces=namespaces, topics=lambda namespace: [])
    context: Any = SimpleNamespace(topics=topics)
    errors: list[Any] = []

    def authorize(principal: str, permission: Permission, resource: str) -> None:
        if permission not in (Permission.MANAGE_NAMESPACE, right):
            raise PermissionDenied(f"{principal} may not {permission} {resource}")

    def delete(namespace: str) -> None:
        answer = admin.Answer(lambda value, error: errors.append(error))
        asked = {"namespace": namespace}
        rights: Any = SimpleNamespace(authorize=authorize)
        admin.run(context, rights, "kim", "delete_namespace", asked, answer)

    delete("shop")
    may = right is Permission.MANAGE_CLUSTER
    assert [type(error) for error in errors] == [type(None) if may else PermissionDenied]
    delete("other")
    assert errors[-1] is None and deleted == (["shop", "other"] if may else ["other"])
