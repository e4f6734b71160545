"""Growth in the topic directory, and the changes that it tells of, over a store in memory."""

from __future__ import annotations

from typing import Any

import pytest

from danube_fast.broker.topics.changes import CHANGES_KEPT_MAX, Change, TopicChanges
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.clock import SystemClock
from danube_fast.errors import AlreadyExists, FailedPrecondition, Internal
from danube_fast.metadata.memory import MemoryStore
from danube_fast.types import TopicPattern
from tests.workers.test_topics import create, directory, options

WIDE = "/default/wide"


class Failing(MemoryStore):
    """Refuses transactions when it is told to."""

    refuses = False

    def transact(self, *arguments: Any, **more: Any) -> Any:
        if self.refuses:
            raise Internal("the disk is full")
        return super().transact(*arguments, **more)


class Doubtful(MemoryStore):
    """Writes, and reports a failure all the same, when it is told to."""

    doubts = False

    def cas(self, *arguments: Any) -> Any:
        revision = super().cas(*arguments)
        if self.doubts:
            raise Internal("the disk did not answer")
        return revision


def ids_of(topics: TopicDirectory) -> list[int]:
    return topics.require(WIDE).partition_ids


def test_new_partitions_are_part_of_the_topic_only_when_it_says_so() -> None:
    store = MemoryStore(SystemClock())
    topics = directory(store)
    record = create(topics, WIDE, partitions=2)
    new = topics.begin_growth(record, 5)
    assert [(part.topic, part.index) for part in new] == [(WIDE, n) for n in (2, 3, 4)]
    assert len(ids_of(topics)) == 2
    assert topics.partition_of(f"{WIDE}-part-2") is None
    for change in (
        lambda: topics.delete(WIDE),
        lambda: topics.set_durability(WIDE, "os"),
        lambda: topics.require_stable(WIDE),
    ):
        with pytest.raises(FailedPrecondition, match="just being given more partitions"):
            change()
    grown = topics.finish_growth(record)
    assert topics.end_growth(grown) == []
    assert grown.partition_ids == [*record.partition_ids, *(part.partition_id for part in new)]
    assert topics.partition_of(f"{WIDE}-part-4") == (grown, 4)
    again = directory(store)
    assert again.require(WIDE) == grown
    assert again.partitions(grown) == topics.partitions(grown)
    assert topics.deleted_in_logs([0, 1]) == []


def test_a_growth_that_ends_in_the_middle_leaves_partitions_to_be_dropped() -> None:
    for how in ("given up", "stopped"):
        store = MemoryStore(SystemClock())
        topics = directory(store)
        record = create(topics, WIDE, partitions=2)
        new = topics.begin_growth(record, 4)
        if how == "given up":
            assert topics.end_growth(record) == new
        else:
            topics = directory(store)
        assert topics.require(WIDE) == record
        dropped = [part.partition_id for part in new]
        assert sorted(topics.deleted_in_logs([0, 1])) == dropped
        assert topics.partition_count == 2
        topics.dropped(dropped)
        assert directory(store).deleted_in_logs([0, 1]) == []
        assert min(part.partition_id for part in topics.begin_growth(record, 4)) > max(dropped)


def test_a_store_that_fails() -> None:
    store = Failing(SystemClock())
    topics = directory(store)
    record = create(topics, WIDE, partitions=1)
    store.refuses = True
    with pytest.raises(Internal, match="disk is full"):
        topics.begin_growth(record, 3)
    store.refuses = False
    assert topics.require_stable(WIDE) == record
    assert topics.partition_count == 1
    topics.begin_growth(record, 3)
    assert len(topics.finish_growth(record).partition_ids) == 3


def test_names_in_the_way() -> None:
    topics = directory()
    create(topics, WIDE, partitions=2)
    create(topics, f"{WIDE}-part-3")
    topics.check_partition_names(WIDE, range(2, 3))
    with pytest.raises(AlreadyExists, match="partition 3"):
        topics.check_partition_names(WIDE, range(2, 5))
    with pytest.raises(AlreadyExists, match="is a partition"):
        topics.create(f"{WIDE}-part-1", options(), 0)


def test_fewer_partitions_may_be_asked_for_than_there_are() -> None:
    topics = directory()
    record = create(topics, WIDE, partitions=4)
    for asked in (None, 1, 4):
        topics.check_options(record, options(partitions=asked))
    for asked in (0, 5):
        with pytest.raises(FailedPrecondition, match="has 4 partitions"):
            topics.check_options(record, options(partitions=asked))
    plain = create(topics, "/default/plain")
    with pytest.raises(FailedPrecondition, match="has 0 partitions"):
        topics.check_options(plain, options(partitions=1))


def test_changes_are_told_when_they_are_durable() -> None:
    topics = directory()
    changes = topics.changes
    begin = changes.count
    topics.create("/default/a", options(), 0)
    assert changes.behind(begin) == [], "it is told once it is committed"
    assert topics.commit() == []
    wide = create(topics, WIDE, partitions=1)
    topics.begin_growth(wide, 2)
    topics.end_growth(topics.finish_growth(wide))
    topics.delete("/default/a")
    assert changes.behind(begin) == [
        ("created", "/default/a"), ("created", WIDE), ("grown", WIDE), ("deleted", "/default/a"),
    ]  # fmt: skip
    assert changes.behind(changes.count) == []


def test_cursors_of_another_life_or_of_long_ago_are_unknown() -> None:
    changes, other = TopicChanges(), TopicChanges()
    begin = changes.cursor_at(0, 7)
    for wrong in (
        "",
        "x",
        "-1",
        "00",
        other.cursor_at(0, 7),
        begin + "1",
        begin + "00",
        begin[:-2],
        begin[:-1] + "g",
    ):
        assert changes.read(wrong) is None, wrong
    for place in range(len(begin)):
        torn = f"{begin[:place]}{int(begin[place], 16) ^ 1:x}{begin[place + 1 :]}"
        assert changes.read(torn) is None, torn
    assert changes.read(begin) == (0, 7)
    for number in range(CHANGES_KEPT_MAX):
        changes.note(Change.CREATED, f"/default/{number}")
    assert len(changes.behind(0) or []) == CHANGES_KEPT_MAX
    changes.note(Change.CREATED, "/default/more")
    assert changes.behind(0) is None and changes.behind(changes.count + 1) is None


def test_a_cursor_does_not_tell_how_much_has_changed() -> None:
    changes = TopicChanges()
    cursors = [
        changes.cursor_at(place, key) for place, key in ((0, 0), (0, 0), (1, 0), (1 << 40, -1))
    ]
    assert len(set(cursors)) == len(cursors) and len({*map(len, cursors)}) == 1
    assert [changes.read(each) for each in cursors] == [
        (0, 0),
        (0, 0),
        (1, 0),
        (1 << 40, -1),
    ]
    words = {each[16:32] for each in cursors}
    assert len(words) == len(cursors), "the same number looks another way each time"


def test_patterns() -> None:
    pattern = TopicPattern("/iot/dev-[0-9]*")
    assert pattern.matches("/iot/dev-7x")
    for topic in ("/iot/dev-x", "/iot2/dev-7", "/IOT/dev-7", "/iot/xdev-7"):
        assert not pattern.matches(topic)
    assert TopicPattern("/a.b/*").matches("/a.b/c")
    assert not TopicPattern("/a.b/*").matches("/axb/c"), "the namespace is no pattern"


def test_a_write_that_took_place_counts_whatever_the_store_said() -> None:
    """Partitions that a topic in the metadata names are never dropped as left over."""
    store = Doubtful(SystemClock())
    topics = directory(store)
    record = create(topics, WIDE, partitions=2)
    topics.begin_growth(record, 3)
    store.doubts = True
    grown = topics.finish_growth(record)
    assert topics.end_growth(grown) == []
    again = directory(store)
    assert again.require(WIDE) == grown
    assert len(again.partitions(grown)) == 3
    assert again.deleted_in_logs([0, 1]) == []
