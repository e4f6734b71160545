"""The topic directory over a store in memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import TopicOptions, TopicRecord
from danube_fast.clock import SystemClock
from danube_fast.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from danube_fast.metadata.memory import MemoryStore


def directory(store: Any = None, log_count: int = 2) -> TopicDirectory:
    store = MemoryStore(SystemClock()) if store is None else store
    return TopicDirectory(store, log_count=log_count, partitions_per_topic_max=64)


def options(**values: Any) -> TopicOptions:
    return TopicOptions.parse(values)


def create(topics: TopicDirectory, name: str, **values: Any) -> TopicRecord:
    record = topics.create(name, options(**values), 0)
    assert topics.commit() == []
    return record


def test_defaults_and_reload() -> None:
    store = MemoryStore(SystemClock())
    topics = directory(store)
    plain = create(topics, "/default/a")
    parts = create(topics, "/default/b", partitions=3, durability="os")
    assert (plain.dispatch, plain.durability, plain.partitioned) == ("reliable", "fsync", False)
    assert [plain.partition_topic(0)] == ["/default/a"]
    assert [parts.partition_topic(i) for i in range(3)] == [
        f"/default/b-part-{i}" for i in range(3)
    ]
    again = directory(store)
    assert again.topics() == [plain, parts]
    assert again.partitions(parts) == topics.partitions(parts)
    assert create(again, "/default/c").incarnation > max(parts.partition_ids)


def test_placement_takes_the_log_with_the_fewest() -> None:
    store = MemoryStore(SystemClock())
    topics = directory(store, 4)
    for i in range(8):
        create(topics, f"/default/t{i}")
    assert [len(topics.partitions_in_logs([log])) for log in range(4)] == [2, 2, 2, 2]
    for i in range(8):
        if topics.partitions(topics.require(f"/default/t{i}"))[0].log_id != 3:
            topics.delete(f"/default/t{i}")
    create(topics, "/default/wide", partitions=6)
    assert [len(topics.partitions_in_logs([log])) for log in range(4)] == [2, 2, 2, 2]
    assert [len(directory(store, 4).partitions_in_logs([log])) for log in range(4)] == [2, 2, 2, 2]


def test_prefixes_are_not_confused() -> None:
    topics = directory()
    create(topics, "/default/ab")
    with pytest.raises(NotFound, match=r"topics create /default/a$"):
        topics.require("/default/a")
    create(topics, "/default/a")
    topics.delete("/default/a")
    assert [record.topic for record in topics.topics("default")] == ["/default/ab"]


def test_names_of_partitions() -> None:
    topics = directory()
    wide = create(topics, "/default/wide", partitions=2)
    assert topics.partition_of("/default/wide-part-1") == (wide, 1)
    for name in (
        "/default/wide-part-2",
        "/default/wide-part-01",
        "/default/wide",
        "/default/x-part-0",
    ):
        assert topics.partition_of(name) is None
    with pytest.raises(AlreadyExists, match="is a partition of"):
        create(topics, "/default/wide-part-1")
    create(topics, "/default/lone-part-1")
    with pytest.raises(AlreadyExists, match="lone-part-1"):
        create(topics, "/default/lone", partitions=2)
    create(topics, "/default/lone")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dispatch": "sometimes"}, "reliable"),
        ({"durability": "object"}, "history"),
        ({"durability": "never"}, "fsync"),
        ({"partitions": 65}, "64"),
        ({"partitions": -1}, "between"),
        ({"partitions": "three"}, "a whole number"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        directory().create("/default/x", options(**wrong), 0)


def test_existing_topic_against_options() -> None:
    topics = directory()
    record = create(topics, "/default/a", dispatch="non_reliable")
    topics.check_options(record, options())
    topics.check_options(record, options(dispatch="non_reliable", partitions=0))
    with pytest.raises(InvalidArgument, match="stores nothing"):
        options(dispatch="non_reliable", durability="os")
    with pytest.raises(FailedPrecondition, match="non_reliable"):
        topics.check_options(record, options(dispatch="reliable"))
    with pytest.raises(FailedPrecondition, match="partitions"):
        topics.check_options(record, options(partitions=4))
    with pytest.raises(FailedPrecondition, match="only a reliable"):
        topics.set_durability("/default/a", "os")


def test_namespaces() -> None:
    topics = directory()
    with pytest.raises(NotFound, match="namespaces create iot"):
        create(topics, "/iot/x")
    topics.namespaces.create("iot", 0)
    create(topics, "/iot/x")
    with pytest.raises(FailedPrecondition, match="/iot/x"):
        topics.namespaces.delete("iot", topics.topics("iot"))
    topics.delete("/iot/x")
    topics.namespaces.delete("iot", topics.topics("iot"))
    assert topics.namespaces.names() == ["default", "system"]
    with pytest.raises(FailedPrecondition):
        topics.namespaces.delete("default", [])
    with pytest.raises(InvalidArgument):
        topics.namespaces.create("a/b", 0)


class FailingStore(MemoryStore):
    """Fails every change once `left` changes were made, as a process that died would."""

    left = 1 << 60
    commits = 0

    def _write(self, *arguments: Any) -> None:
        if self.left <= 0:
            raise ResourceExhausted("no more")
        self.left -= 1
        self.commits += 1
        super()._write(*arguments)


def test_new_topics_share_commits_and_large_ones_take_several() -> None:
    store = FailingStore(SystemClock())
    topics = TopicDirectory(store, log_count=2, partitions_per_topic_max=500)
    for i in range(150):
        topics.create(f"/default/t{i}", options(), 0)
    assert topics.commit() == []
    assert store.commits <= 4
    topics.create("/default/wide", options(partitions=301), 0)
    assert topics.commit() == []
    assert store.commits <= 4 + 4
    again = TopicDirectory(store, log_count=2, partitions_per_topic_max=500)
    assert again.topics() == topics.topics()
    assert again.partition_count == topics.partition_count == 150 + 301
    _, gone = topics.delete("/default/wide")
    topics.dropped([record.partition_id for record in gone])
    assert len(store.list("/partitions/")) == 150


def test_a_deleted_partition_is_remembered_until_its_worker_dropped_it() -> None:
    store = FailingStore(SystemClock())
    topics = directory(store, log_count=1)
    create(topics, "/default/a", partitions=3)
    (first, *rest) = topics.topic("/default/a").partition_ids
    topics.delete("/default/a")
    assert topics.deleted_in_logs([0]) == [first, *rest] and topics.deleted_in_logs([1]) == []
    assert topics.partition(first) is None
    store.left = 0
    topics.dropped([first])  # the store cannot forget it just now
    store.left = 1 << 60
    topics = directory(store, log_count=1)
    assert topics.deleted_in_logs([0]) == [first, *rest]
    topics.dropped([first, 999])
    assert topics.deleted_in_logs([0]) == rest
    topics.dropped(rest)
    assert directory(store, log_count=1).deleted_in_logs([0]) == []
    assert store.list("/partitions/") == []


def test_what_cannot_be_recorded_does_not_exist() -> None:
    store = FailingStore(SystemClock())
    topics = directory(store)
    create(topics, "/default/there")
    store.left = 0
    one = topics.create("/default/one", options(), 0)
    two = topics.create("/default/two", options(partitions=3), 0)
    with pytest.raises(FailedPrecondition, match="try again"):
        topics.delete("/default/one")
    failed = topics.commit()
    assert [(made.record, len(made.partitions)) for made in failed] == [(one, 1), (two, 3)]
    assert all(isinstance(made.error, ResourceExhausted) for made in failed)
    assert [record.topic for record in topics.topics()] == ["/default/there"]
    assert topics.partition_count == 1
    store.left = 1 << 60
    again = create(topics, "/default/one")
    assert again.incarnation > two.incarnation
    assert directory(store).topics() == topics.topics()


def test_two_writers_of_one_store() -> None:
    """Another process made a topic meanwhile: only that one fails, and nothing of it is changed."""
    store = MemoryStore(SystemClock())
    mine, other = directory(store), directory(store)
    theirs = create(other, "/default/b", dispatch="non_reliable")
    for name in ("a", "b", "c"):
        mine.create(f"/default/{name}", options(), 0)
    (failed,) = mine.commit()
    assert failed.record.topic == "/default/b"
    assert isinstance(failed.error, AlreadyExists)
    assert mine.partition_count == 2
    again = directory(store)
    assert again.topic("/default/b") == theirs
    assert again.partitions(theirs) == other.partitions(theirs)
    assert [record.topic for record in mine.topics()] == ["/default/a", "/default/c"]


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=12),
    cut=st.integers(0, 20),
)
def test_a_kill_between_any_two_writes(steps: list[tuple[bool, int, int]], cut: int) -> None:
    """Whatever was answered is there after a reload, whole; ids are never used twice."""
    store = FailingStore(SystemClock())
    topics = directory(store)
    store.left = cut
    used: set[int] = set()
    alive: dict[str, int] = {}
    unsure = ""
    for make, number, partitions in steps:
        name = f"/default/t{number}"
        unsure = name
        try:
            if make:
                record = topics.create(name, options(partitions=partitions), 0)
                assert not used & {record.incarnation, *record.partition_ids}
                used |= {record.incarnation, *record.partition_ids}
                if topics.commit():
                    break
                alive[name] = record.incarnation
            else:
                topics.delete(name)
                del alive[name]
        except (AlreadyExists, NotFound):
            pass
        except ResourceExhausted:
            break
        unsure = ""
    store.left = 1 << 60
    again = directory(store)
    found = {record.topic: record.incarnation for record in again.topics()}
    found.pop(unsure, None)
    recorded = set(alive.values())
    alive.pop(unsure, None)
    assert found == alive
    listed = {pid for record in again.topics() for pid in record.partition_ids}
    stored = {int(key.rpartition("/")[2]) for key, _ in store.list("/partitions/")}
    assert listed == {p.partition_id for p in again.partitions_in_logs(range(2))}
    assert stored - listed == set(again.deleted_in_logs(range(2)))
    fresh = create(again, "/default/new", partitions=2)
    assert not {fresh.incarnation, *fresh.partition_ids} & (recorded | listed)


def test_a_non_reliable_topic_is_not_compacted() -> None:
    topics = directory()
    create(topics, "/default/fast", dispatch="non_reliable")
    with pytest.raises(FailedPrecondition, match="keeps no messages"):
        topics.set_policy("/default/fast", {"compaction": True})
    create(topics, "/default/kept")
    assert topics.set_policy("/default/kept", {"compaction": True}).policy == {"compaction": True}
