"""Repair: all that objects hold sound is readable again, all else is told as lost, and nothing is made worse."""

from __future__ import annotations

import random

import msgspec
import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from danube_fast.frame.view import FrameView
from danube_fast.history import manifest as manifest_module
from danube_fast.history.audit import LOST, verify_history
from danube_fast.history.layout import BLOCK_BYTES, OBJECTS_PREFIX, object_key
from danube_fast.history.manifest import (
    MANIFESTS_PREFIX,
    ManifestLog,
    Section,
    lost_section,
    manifest_key,
)
from danube_fast.history.reader import HistoryReader
from danube_fast.history.repair import SUPERSEDED_PREFIX, Repair, repair_history
from danube_fast.history.stores.memory import MemoryStore
from tests.history.repair_rig import (
    TOPICS,
    World,
    held_by_sound_objects,
    load,
    named,
    readable,
)
from tests.history.rig import (
    IDENTITY,
    START_NS,
    change_object,
    make_frame,
    make_frames,
    put_history,
    put_object,
)

SEEDS = 150


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def repair(
    store: MemoryStore, adopted: dict[int, str] | None = None, *, is_dry: bool = False
) -> Repair:
    return repair_history(store, adopted or {}, START_NS, is_dry=is_dry)


def contents(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list()}


def newest_of(store: MemoryStore, partition_id: int) -> int:
    prefix = f"{MANIFESTS_PREFIX}{partition_id:010d}/"
    names = [info.key.removeprefix(prefix) for info in store.list(prefix)]
    return max((int(name) for name in names if name.isdigit()), default=-1)


# ---------------------------------------------------------------- any damage


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_damage(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number alone makes the store and its damage: `pytest 'tests/history/test_repair.py::test_any_damage[7]'`."""
    monkeypatch.setattr(manifest_module, "SNAPSHOT_EVERY", 5)
    world = World(seed)
    world.live(world.chance.randrange(1, 30))
    hints = {number: log.manifest.number for number, log in world.logs.items()}
    firsts = {number: log.manifest.first_offset for number, log in world.logs.items()}
    world.damage(world.chance.randrange(5))
    before, sound = contents(world.store), held_by_sound_objects(world.store)
    adopted = {n: TOPICS[n] for n in TOPICS if world.chance.random() < 0.3}
    adopted = {n: topic for n, topic in adopted.items() if sound[n] and hints[n] >= 0}
    ends = {number: end_of(world.store, number) for number in TOPICS}
    try:
        planned = repair(world.store, adopted, is_dry=True)
    except NotFound as error:
        assert "history" in str(error) or "nothing" in str(error)
        return
    except FailedPrecondition as error:
        assert "newer danube-fast" in str(error)
        return
    assert contents(world.store) == before, "a dry run has written"
    done = repair(world.store, adopted)
    assert (done.partitions, done.damages) == (planned.partitions, planned.damages)
    after = contents(world.store)
    for key, data in before.items():
        aside = [
            k
            for k in after
            if k.startswith(SUPERSEDED_PREFIX) and k.endswith(key[-23:].replace("/", "/")[-12:])
        ]
        assert after.get(key) == data or any(after[k] == data for k in aside), f"{key} is gone"
    repaired = {each.partition_id: each for each in done.partitions}
    for number in TOPICS:
        if number in repaired or newest_of(world.store, number) >= 0:
            check_partition(world, number, hints[number], firsts[number], sound[number])
            if ends[number] is not None:
                assert load(world.store, number).end_offset >= ends[number]
    check_audit(world.store)
    again = repair(world.store, adopted)
    assert again.partitions == []
    assert contents(world.store) == after
    adopt_all(world, hints, sound)


def adopt_all(world: World, hints: dict[int, int], sound: dict[int, set[int]]) -> None:
    """With the operator's word all comes back that any object has, and every owner can go on."""
    wanted = {n: TOPICS[n] for n in TOPICS if hints[n] >= 0 and sound[n]}
    repair(world.store, wanted)
    assert repair(world.store, wanted).partitions == []
    for number in wanted:
        log = ManifestLog(world.store, IDENTITY, number, world.epoch + 1)
        manifest = log.load(hints[number])
        got = readable(world.store, number, manifest)
        assert {each for each in sound[number] if each >= manifest.first_offset} <= got.keys()
        before = named(manifest.sections)
        add(log, manifest.end_offset + 1)
        assert named(load(world.store, number, log.manifest.number).sections) == before
    check_audit(world.store)


def end_of(store: MemoryStore, partition_id: int) -> int | None:
    try:
        return load(store, partition_id).end_offset
    except DanubeError:
        return None


def check_partition(
    world: World, partition_id: int, hint: int, first: int, sound: set[int]
) -> None:
    """Every hint leads to one manifest; what it has is right, whole where objects are, and told where they are not."""
    store = world.store
    manifest = load(store, partition_id)
    newest = newest_of(store, partition_id)
    is_repaired = manifest.number == newest and store.head(manifest_key(partition_id, 0)) is None
    for known in range(newest + 1 if not is_repaired else hint + 2):
        found = load(store, partition_id, known)
        assert (found.number, found.sections) == (manifest.number, manifest.sections)
    assert manifest.first_offset <= first
    got = readable(store, partition_id, manifest)
    by_offset = {FrameView(each).base_offset: bytes(each) for each in world.frames[partition_id]}
    reader = HistoryReader(store, partition_id, manifest)
    for base, data in by_offset.items():
        end = base + FrameView(data).offset_span
        if not manifest.first_offset <= base < end <= manifest.end_offset:
            continue
        if base in got:
            assert got[base] == data
            continue
        assert base not in sound, f"{base} of partition {partition_id} is in a sound object"
        with pytest.raises(DataLoss):
            reader.fetch(base, 1)
    sections = manifest.sections
    assert all(a.end_offset <= b.base_offset for a, b in zip(sections, sections[1:], strict=False))
    # an uploader goes on from it, and those before are fenced
    if is_repaired and newest > 0:
        with pytest.raises(FailedPrecondition, match="newer uploader"):
            add(world.logs[partition_id], manifest.end_offset + 1000)
    log = ManifestLog(store, IDENTITY, partition_id, world.epoch + 1)
    if newest < hint:
        # what is missing at the end only its owner knows: it names the command, and the word that is needed
        with pytest.raises(DataLoss, match=f"history repair .*--adopt {partition_id}$"):
            log.load(hint)
        return
    log.load(hint)
    assert log.manifest.sections == sections


def add(log: ManifestLog, end: int) -> None:
    log.commit(TOPICS[5], 1, 1, first_offset=log.manifest.first_offset, end_offset=end)


def check_audit(store: MemoryStore) -> None:
    """All that is still wrong is a loss that readers are told of."""
    try:
        report = verify_history(store)
    except NotFound:
        return
    for damage in report.damages:
        is_told = damage.reason == LOST or damage.key.startswith(OBJECTS_PREFIX)
        assert is_told, damage
        assert "manifest says" not in damage.reason and "overlap" not in damage.reason
