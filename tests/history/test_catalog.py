"""The catalog: every partition as its manifest tells it, and each manifest that cannot be trusted."""

from __future__ import annotations

import msgspec
import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss, FailedPrecondition, PermissionDenied
from danube_fast.history.catalog import load_partition, read_catalog
from danube_fast.history.manifest import (
    SNAPSHOT_EVERY,
    ManifestLog,
    ManifestReader,
    Record,
    manifest_key,
    manifest_prefix,
)
from danube_fast.history.stores.memory import MemoryStore
from tests.history.rig import IDENTITY, change_object, put_history

TOPICS = {5: "/default/a", 6: "/default/a", 7: "/default/b"}
OTHER = b"another identity"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def put_record(store: MemoryStore, partition_id: int, number: int, **fields: object) -> None:
    record = Record(
        identity=IDENTITY, partition_id=partition_id, topic="/default/a", incarnation=1, number=number,
        previous=number - 1, snapshot=0, owner_epoch=1, uploader_epoch=1, first_offset=0, end_offset=0,
    )  # fmt: skip
    record = msgspec.structs.replace(record, **fields)
    store.create(manifest_key(partition_id, number), record.encode())


def test_every_partition_is_found_without_knowing_the_broker(store: MemoryStore) -> None:
    logs = put_history(store, 3, TOPICS)
    catalog = read_catalog(store)
    assert (catalog.identity, catalog.damages) == (IDENTITY, [])
    assert [each.partition_id for each in catalog.partitions] == [5, 6, 7]
    for each in catalog.partitions:
        assert vars(each.manifest) == vars(logs[each.partition_id].manifest)
    assert [each.partition_id for each in catalog.of_topic("/default/a")] == [5, 6]
    assert catalog.of_topic("/default/c") == []


def test_an_empty_store_has_no_partitions(store: MemoryStore) -> None:
    assert read_catalog(store) == (b"", [], [])
    store.create("probe/x", b"")
    store.create("manifests/README", b"not a partition")
    assert read_catalog(store) == (b"", [], [])


def test_progress_is_told(store: MemoryStore) -> None:
    put_history(store, 1, TOPICS)
    told: list[tuple[str, int, int]] = []
    read_catalog(store, lambda *words: told.append(words))
    assert told == [("manifests", done, 3) for done in range(3)]


def test_a_reader_takes_the_identity_of_the_first_record(store: MemoryStore) -> None:
    put_history(store, 2, {5: "/default/a"})
    reader = ManifestReader(store, None, 5)
    assert reader.load().number == 1
    assert reader.identity == IDENTITY
    put_record(store, 5, 2, identity=OTHER)
    with pytest.raises(FailedPrecondition, match="another broker"):
        ManifestReader(store, None, 5).load()
    with pytest.raises(FailedPrecondition, match="another broker"):
        ManifestReader(store, OTHER, 5).load(0)


def test_a_reader_takes_the_records_of_any_uploader(store: MemoryStore) -> None:
    put_history(store, 1, {5: "/default/a"})
    newer = ManifestLog(store, IDENTITY, 5, 9)
    newer.load()
    newer.commit("/default/a", 1, 1, first_offset=0, end_offset=50)
    assert ManifestReader(store, None, 5).load().uploader_epoch == 9


def test_a_foreign_manifest_is_damage_and_hides_nothing(store: MemoryStore) -> None:
    put_history(store, 2, {6: "/default/a", 7: "/default/b"})
    foreign = ManifestLog(store, OTHER, 5, 1)
    foreign.commit("/default/c", 1, 1, first_offset=3, end_offset=8)
    catalog = read_catalog(store)
    assert catalog.identity == IDENTITY
    assert [each.partition_id for each in catalog.partitions] == [5, 6, 7]
    (damage,) = catalog.damages
    assert (damage.key, damage.topic, damage.partition_id) == (manifest_prefix(5), "/default/c", 5)
    assert (damage.base_offset, damage.end_offset) == (3, 8)
    assert OTHER.hex() in damage.reason and IDENTITY.hex() in damage.reason
    assert "of its own" in damage.remedy


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_record_is_damage_and_hides_nothing(store: MemoryStore, number: int) -> None:
    put_history(store, 3, TOPICS)
    key = manifest_key(6, number)
    change_object(store, key, lambda data: data.__setitem__(40, data[40] ^ 1))
    catalog = read_catalog(store)
    assert [each.partition_id for each in catalog.partitions] == [5, 7]
    (damage,) = catalog.damages
    assert (damage.partition_id, damage.topic) == (6, None)
    assert key in damage.reason and "restore it" in damage.remedy


def test_a_missing_record_is_damage(store: MemoryStore) -> None:
    put_history(store, 3, TOPICS)
    store.delete([manifest_key(6, 1)])
    (damage,) = read_catalog(store).damages
    assert f"{manifest_key(6, 1)} is missing" in damage.reason


def test_records_that_all_went_are_damage(store: MemoryStore) -> None:
    put_history(store, 1, TOPICS)
    store.create(f"{manifest_prefix(9)}pruned", b"")
    (damage,) = read_catalog(store).damages
    assert damage.partition_id == 9
    assert "were pruned" in damage.reason


@pytest.mark.parametrize("links", [{"snapshot": 7}, {"previous": 7}, {"snapshot": -5}])
def test_links_that_do_not_lead_back_end(store: MemoryStore, links: dict[str, int]) -> None:
    """They would be followed for ever."""
    put_record(store, 5, 0, **links)
    with pytest.raises(DataLoss, match="not before it"):
        load_partition(store, 5, 0)


def test_records_that_are_pruned_meanwhile_are_no_damage(store: MemoryStore) -> None:
    """The newest record was read, and a living uploader prunes what it builds on."""
    (log,) = put_history(store, 3, {5: "/default/a"}).values()
    read = store.read

    def read_while_it_goes_on(key: str, start: int = 0, count: int | None = None) -> bytes:
        store.read = read  # type: ignore[method-assign]
        data = read(key, start, count)
        for _ in range(SNAPSHOT_EVERY):
            log.commit("/default/a", 1, 1, first_offset=0, end_offset=log.manifest.end_offset)
        log.prune(0)
        store.delete([manifest_key(5, 2)])
        return data

    store.read = read_while_it_goes_on  # type: ignore[method-assign]
    catalog = read_catalog(store)
    assert catalog.damages == []
    assert catalog.partitions[0].manifest.number == log.manifest.number > SNAPSHOT_EVERY


def test_a_refusal_of_the_store_is_no_damage(store: MemoryStore) -> None:
    put_history(store, 1, TOPICS)

    def refuse(*_: object) -> bytes:
        raise PermissionDenied("no")

    store.read = refuse  # type: ignore[method-assign]
    with pytest.raises(PermissionDenied):
        read_catalog(store)
