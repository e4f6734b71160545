"""The check of a store: every kind of damage is named with its offsets, and nothing sound is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec
import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import NotFound, PermissionDenied, Unavailable
from danube_fast.history.audit import Verification, verify_history
from danube_fast.history.catalog import Damage
from danube_fast.history.layout import BLOCK_BYTES, object_key
from danube_fast.history.manifest import ManifestLog, Section, manifest_key
from danube_fast.history.objects import verify_object
from danube_fast.history.stores.memory import MemoryStore
from tests.history.rig import (
    IDENTITY,
    change_object,
    make_frame,
    make_frames,
    put_history,
    put_object,
)

TOPICS = {5: "/default/a", 6: "/default/a", 7: "/default/b"}
OTHER = b"another identity"


class ReadStore(MemoryStore):
    """A store that refuses every write once it is sealed."""

    is_sealed = False

    def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
        self._refuse()
        super().create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self._refuse()
        super().delete(keys)

    def begin(self, key: str) -> NoReturn:  # type: ignore[override]
        raise AssertionError("reading began an upload")

    def _refuse(self) -> None:
        assert not self.is_sealed, "reading has written"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def flip(store: MemoryStore, key: str, at: int) -> None:
    change_object(store, key, lambda data: data.__setitem__(at, data[at] ^ 0x10))


def where(damage: Damage) -> tuple[str, str | None, int | None, int | None, int | None]:
    return damage.key, damage.topic, damage.partition_id, damage.base_offset, damage.end_offset


def of_section(log: ManifestLog, partition_id: int, place: int) -> tuple[object, ...]:
    section = log.manifest.sections[place]
    return (
        section.key, TOPICS[partition_id], partition_id, section.base_offset, section.end_offset,
    )  # fmt: skip


def lie(store: MemoryStore, **fields: object) -> Verification:
    """Verify a store whose only section says this."""
    frames = make_frames(5, 10, 4, random.Random(3))
    (section,) = put_object(store, {5: frames})
    log = ManifestLog(store, IDENTITY, 5, 1)
    log.commit(
        "/default/a", 1, 1, first_offset=0, end_offset=section.end_offset,
        added=[msgspec.structs.replace(section, **fields)],
    )  # fmt: skip
    return verify_history(store)


def test_sound_history() -> None:
    store = ReadStore(SystemClock())
    sealed = MemoryStore(SystemClock())
    logs = put_history(sealed, 3, TOPICS)
    store._objects, store.is_sealed = sealed._objects, True
    told: list[tuple[str, int, int]] = []
    report = verify_history(store, None, lambda *words: told.append(words))
    sections = [section for log in logs.values() for section in log.manifest.sections]
    assert report == Verification(
        store="memory://", identity=IDENTITY.hex(), partitions=3, objects=3,
        messages=sum(section.message_count for section in sections),
        bytes=sum(section.byte_count for section in sections), damages=[], orphans=[],
    )  # fmt: skip
    assert told[-1][0] == "bytes" and 0 < told[-1][1] < told[-1][2] == report.bytes


def test_one_topic(store: MemoryStore) -> None:
    put_history(store, 3, TOPICS)
    report = verify_history(store, "/default/b")
    assert (report.partitions, report.objects, report.orphans) == (1, 3, None)
    with pytest.raises(NotFound, match="no history of /default/c"):
        verify_history(store, "/default/c")


def test_an_empty_store_is_not_called_sound(store: MemoryStore) -> None:
    with pytest.raises(NotFound, match="no history in memory"):
        verify_history(store)
    put_object(store, {5: [make_frame(5, 0, [b"x"])]})
    with pytest.raises(NotFound, match="1 objects and no manifest"):
        verify_history(store)


def test_a_flipped_byte_is_damage_of_its_partition_alone(store: MemoryStore) -> None:
    logs = put_history(store, 3, TOPICS)
    section = logs[6].manifest.sections[1]
    flip(store, section.key, section.position + 130)
    (damage,) = verify_history(store).damages
    assert where(damage) == of_section(logs[6], 6, 1)
    assert "crc" in damage.reason
    assert damage.remedy.startswith("restore it from a copy")
    assert verify_history(store, "/default/a").damages == [damage]
    (other,) = verify_history(store, "/default/b").damages
    assert (other.key, other.partition_id, other.base_offset) == (section.key, None, None)
    assert "can be read" in other.reason


def test_every_flipped_byte_is_damage(store: MemoryStore) -> None:
    logs = put_history(store, 1, {5: "/default/a", 6: "/default/b"}, frame_count=1, bytes_max=20)
    key = object_key(1, 0)
    whole = store.read(key)
    for at in range(len(whole)):
        flip(store, key, at)
        damages = verify_history(store).damages
        flip(store, key, at)
        assert len(damages) == 1, at
        assert damages[0].key == key
        for partition_id, log in logs.items():
            (section,) = log.manifest.sections
            rows = range(section.blocks_position, section.blocks_position + 80)
            is_own = at in range(section.position, section.position + section.byte_count)
            assert (damages[0].partition_id == partition_id) == (is_own or at in rows), at
    assert verify_history(store).damages == []


def test_damage_is_as_narrow_as_its_blocks(store: MemoryStore) -> None:
    frames = [make_frame(5, offset, [bytes(BLOCK_BYTES)]) for offset in range(6)]
    (section,) = put_object(store, {5: frames}, part_bytes=1 << 20)
    log = ManifestLog(store, IDENTITY, 5, 1)
    log.commit("/default/a", 1, 1, first_offset=0, end_offset=6, added=[section])
    for number in (1, 2, 5):
        flip(store, section.key, section.position + number * len(frames[0]) + 500)
    ranges = [(each.base_offset, each.end_offset) for each in verify_history(store).damages]
    assert ranges == [(1, 3), (5, 6)]


def test_a_missing_object_is_damage_of_each_partition(store: MemoryStore) -> None:
    logs = put_history(store, 3, TOPICS)
    store.delete([object_key(1, 1)])
    damages = verify_history(store).damages
    assert [where(damage) for damage in damages] == [
        of_section(log, partition_id, 1) for partition_id, log in logs.items()
    ]
    assert {damage.reason for damage in damages} == {"there is no such object"}


def test_a_truncated_object_is_damage(store: MemoryStore) -> None:
    logs = put_history(store, 1, {5: "/default/a"})
    change_object(store, object_key(1, 0), lambda data: data.__delitem__(slice(-70, None)))
    assert [where(each) for each in verify_history(store).damages] == [of_section(logs[5], 5, 0)]


@pytest.mark.parametrize("name", [n for n in Section.__struct_fields__ if n != "key"])
def test_a_section_that_lies_is_damage(store: MemoryStore, name: str) -> None:
    (section,) = put_object(
        MemoryStore(SystemClock()), {5: make_frames(5, 10, 4, random.Random(3))}
    )
    (damage,) = lie(store, **{name: getattr(section, name) - 1}).damages
    assert (damage.key, damage.partition_id) == (section.key, 5)
    assert name in damage.reason and "manifest says" in damage.reason
    assert "restore manifests/0000000005/" in damage.remedy


def test_a_section_that_names_another_object_is_damage(store: MemoryStore) -> None:
    put_object(store, {6: make_frames(6, 10, 4, random.Random(3))}, number=1)
    (damage,) = lie(store, key=object_key(1, 1)).damages
    assert "nothing of partition 5" in damage.reason


def test_a_section_without_a_possible_key_is_damage(store: MemoryStore) -> None:
    (damage,) = lie(store, key="../outside").damages
    assert "not a key" in damage.reason


def test_sections_that_overlap_are_damage(store: MemoryStore) -> None:
    log = ManifestLog(store, IDENTITY, 5, 1)
    for number, base in enumerate((0, 3, 4)):
        frame = make_frame(5, base, [b"x"] * 4)
        (section,) = put_object(store, {5: [frame]}, number=number)
        log.commit("/default/a", 1, 1, first_offset=0, end_offset=8, added=[section])
    damages = verify_history(store).damages
    assert [(each.base_offset, each.end_offset) for each in damages] == [(3, 7), (4, 8)]
    assert all("overlap" in each.reason for each in damages)


def test_a_section_behind_the_end_of_its_manifest_is_damage(store: MemoryStore) -> None:
    (log,) = put_history(store, 2, {5: "/default/a"}).values()
    log.commit("/default/a", 1, 1, first_offset=0, end_offset=log.manifest.end_offset - 1)
    (damage,) = verify_history(store).damages
    assert where(damage) == of_section(log, 5, 1)
    assert "ends at offset" in damage.reason


def test_a_foreign_manifest_is_damage_and_the_rest_is_checked(store: MemoryStore) -> None:
    put_history(store, 2, TOPICS)
    ManifestLog(store, OTHER, 9, 1).commit("/default/c", 1, 1, first_offset=0, end_offset=0)
    report = verify_history(store)
    (damage,) = report.damages
    assert (damage.partition_id, report.identity, report.orphans) == (9, IDENTITY.hex(), [])
    assert verify_history(store, "/default/a").damages == []


def test_an_object_of_another_broker_is_damage(store: MemoryStore) -> None:
    (section,) = put_object(store, {5: [make_frame(5, 0, [b"x"])]})
    log = ManifestLog(store, OTHER, 5, 1)
    log.commit("/default/a", 1, 1, first_offset=0, end_offset=1, added=[section])
    (damage,) = verify_history(store).damages
    assert "another broker" in damage.reason


def test_orphans_are_told_and_stay(store: MemoryStore) -> None:
    put_history(store, 2, TOPICS)
    put_object(store, {5: [make_frame(5, 900, [b"x"])]}, number=7)
    report = verify_history(store)
    assert report.orphans is not None
    assert [orphan.key for orphan in report.orphans] == [object_key(1, 7)]
    assert report.damages == []
    verify_object(store, object_key(1, 7), IDENTITY)


def test_no_object_is_called_an_orphan_when_a_manifest_cannot_be_read(store: MemoryStore) -> None:
    put_history(store, 2, TOPICS)
    flip(store, manifest_key(6, 1), 40)
    report = verify_history(store)
    assert (len(report.damages), report.partitions, report.orphans) == (1, 2, None)


def meanwhile(store: MemoryStore, name: str, act: Callable[[], object], begins: str = "") -> None:
    """Let something happen at the first call of a method for a key or prefix that begins so."""
    method = getattr(store, name)

    def act_first(key: str) -> Any:
        if key.startswith(begins):
            setattr(store, name, method)
            act()
        return method(key)

    setattr(store, name, act_first)


def remove_first(store: MemoryStore, logs: dict[int, ManifestLog]) -> None:
    """Retention of all partitions lets the first object go."""
    key = object_key(1, 0)
    for partition_id, log in logs.items():
        first, end = log.manifest.sections[1].base_offset, log.manifest.end_offset
        log.commit(TOPICS[partition_id], 1, 1, first_offset=first, end_offset=end, removed=[key])
    store.delete([key])


@pytest.mark.parametrize(("name", "begins"), [("list", "manifests/"), ("head", "objects/")])
def test_what_retention_removes_meanwhile_is_no_damage(
    store: MemoryStore, name: str, begins: str
) -> None:
    logs = put_history(store, 3, TOPICS)
    meanwhile(store, name, lambda: remove_first(store, logs), begins)
    report = verify_history(store)
    assert (report.damages, report.orphans) == ([], [])
    assert store.head(object_key(1, 0)) is None


@pytest.mark.parametrize(("name", "begins"), [("list", "manifests/"), ("head", "objects/")])
def test_what_an_uploader_adds_meanwhile_is_no_orphan(
    store: MemoryStore, name: str, begins: str
) -> None:
    (log,) = put_history(store, 2, {5: "/default/a"}).values()
    end = log.manifest.end_offset

    def add() -> None:
        sections = put_object(store, {5: [make_frame(5, end, [b"x"])]}, number=2)
        log.commit("/default/a", 1, 1, first_offset=0, end_offset=end + 1, added=sections)

    meanwhile(store, name, add, begins)
    report = verify_history(store)
    assert (report.damages, report.orphans) == ([], [])
    assert store.head(object_key(1, 2)) is not None


@pytest.mark.parametrize("error", [PermissionDenied, Unavailable])
def test_an_error_of_the_store_is_no_damage(store: MemoryStore, error: type[Exception]) -> None:
    put_history(store, 2, TOPICS)
    read = store.read

    def refuse(key: str, start: int = 0, count: int | None = None) -> bytes:
        if key.startswith("objects/"):
            raise error("the store says no")
        return read(key, start, count)

    store.read = refuse  # type: ignore[method-assign]
    with pytest.raises(error, match="says no"):
        verify_history(store)
