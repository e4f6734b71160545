"""What a store alone cannot tell takes the operator's word: of which topic a partition is, and whether it was deleted."""

from __future__ import annotations

import msgspec
import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import InvalidArgument
from danube_fast.history.audit import verify_history
from danube_fast.history.manifest import (
    PRUNED_NAME,
    ManifestLog,
    Record,
    manifest_key,
    manifest_prefix,
)
from danube_fast.history.stores.memory import MemoryStore
from tests.history.repair_rig import TOPIC, flip, history_of, load, named, repair
from tests.history.rig import IDENTITY, make_frame, put_object

PRUNED = f"{manifest_prefix(5)}{PRUNED_NAME}"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def test_a_topic_that_no_record_tells_can_be_said_afterwards(store: MemoryStore) -> None:
    """All records are damaged, so a repair brings back what objects have, and of no topic."""
    wanted = history_of(store).manifest.sections
    for number in range(4):
        flip(store, manifest_key(5, number))
    (one,) = repair(store).partitions
    assert (one.topic, load(store, 5).topic) == ("", "")
    assert load(store, 5).sections == wanted
    assert repair(store).partitions == []
    (one,) = repair(store, {5: TOPIC}).partitions
    assert one.reasons == [f"no record tells its topic: it was to be {TOPIC}"]
    assert (load(store, 5).topic, load(store, 5).sections) == (TOPIC, wanted)
    assert repair(store, {5: TOPIC}).partitions == []
    with pytest.raises(InvalidArgument, match="is of /default/a, not of /default/x"):
        repair(store, {5: "/default/x"})


def test_what_is_lost_stays_told_when_the_topic_is_said(store: MemoryStore) -> None:
    section = history_of(store).manifest.sections[1]
    store.delete([section.key])
    for number in range(4):
        flip(store, manifest_key(5, number))
    (before,) = repair(store).partitions
    manifest = load(store, 5)
    (one,) = repair(store, {5: TOPIC}).partitions
    assert (before.lost, one.lost) == ([(section.base_offset, section.end_offset)], [])
    assert load(store, 5).sections == manifest.sections


def test_a_partition_is_not_adopted_without_a_topic(store: MemoryStore) -> None:
    """No record tells it, and no broker would take the history."""
    history_of(store)
    store.delete([manifest_key(5, number) for number in range(4)])
    with pytest.raises(InvalidArgument, match="say it: --adopt 5=TOPIC"):
        repair(store, {5: ""})


def test_the_mark_of_pruning_alone_brings_nothing_back(store: MemoryStore) -> None:
    """The deletion of a topic leaves it last, and objects that are held or shared: it was cut short."""
    wanted = history_of(store).manifest.sections
    store.delete([manifest_key(5, number) for number in range(4)])
    store.create(PRUNED, b"")
    done = repair(store)
    assert done.partitions == []
    assert done.damages == verify_history(store).damages
    assert "repair with --adopt 5=TOPIC" in done.damages[0].remedy
    assert [each.key for each in done.unnamed] == [section.key for section in wanted]
    done = repair(store, {5: TOPIC})
    assert (done.damages, load(store, 5).sections) == ([], wanted)


def test_without_objects_the_mark_of_pruning_takes_a_word_too(store: MemoryStore) -> None:
    """The broker that has the topic goes on from an empty manifest, and tells what is lost."""
    history_of(store)
    store.delete([info.key for info in store.list()])
    store.create(PRUNED, b"")
    history_of_another(store)
    assert repair(store).partitions == []
    (one,) = repair(store, {5: TOPIC}).partitions
    assert (one.end_offset, load(store, 5, 3).sections) == (0, [])


def history_of_another(store: MemoryStore) -> None:
    ManifestLog(store, IDENTITY, 6, 1).commit(TOPIC, 1, 1, first_offset=0, end_offset=0)


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_record_that_does_not_count_is_not_the_end(store: MemoryStore, how: str) -> None:
    """The newest record that counts is lost; behind it stands one of an older uploader, which never counted."""
    history_of(store, 2)
    newer = ManifestLog(store, IDENTITY, 5, 2)
    end = newer.load().end_offset
    for number in range(2, 4):
        sections = put_object(store, {5: [make_frame(5, end, [b"x"])]}, epoch=2, number=number)
        end += 1
        newer.commit(TOPIC, 1, 1, first_offset=0, end_offset=end, added=sections)
    wanted = newer.manifest.sections
    old = msgspec.structs.replace(
        Record.decode(store.read(manifest_key(5, 1)), ""), number=4, previous=1, added=[]
    )
    store.create(manifest_key(5, 4), old.encode())
    assert load(store, 5).sections == wanted
    key = manifest_key(5, 3)
    store.delete([key]) if how == "lost" else flip(store, key)
    done = repair(store)
    assert len(done.partitions) == 1
    assert named(load(store, 5).sections) == named(wanted)
