"""Repair: all that objects hold sound is readable again, all else is told as lost, and nothing is made worse."""

from __future__ import annotations

import itertools
import random

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
    manifest_key,
)
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.superseding import SUPERSEDED_PREFIX
from tests.history.repair_rig import (
    TOPIC,
    TOPICS,
    World,
    contents,
    flip,
    held_by_sound_objects,
    history_of,
    load,
    named,
    readable,
    repair,
)
from tests.history.rig import (
    IDENTITY,
    START_NS,
    make_frame,
    make_frames,
    put_object,
)

SEEDS = 150
PREFIXES = (MANIFESTS_PREFIX, OBJECTS_PREFIX)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


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
    except (NotFound, FailedPrecondition) as error:
        is_empty = not any(key.startswith(PREFIXES) for key in before)
        assert (is_empty or not any(sound.values())) or "newer danube-fast" in str(error)  # noqa: PT017
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
    assert all(a.end_offset <= b.base_offset for a, b in itertools.pairwise(sections))
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
        # the mark of pruning alone may be of a topic that was deleted
        is_told = damage.reason == LOST or "there is only pruned" in damage.reason
        is_told |= damage.key.startswith(OBJECTS_PREFIX)
        assert is_told, damage
        assert "manifest says" not in damage.reason and "overlap" not in damage.reason


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_one_record(store: MemoryStore, number: int, how: str) -> None:
    """The newest one, if it is lost, is missed only by its owner."""
    log = history_of(store)
    wanted = log.manifest.sections
    key = manifest_key(5, number)
    store.delete([key]) if how == "lost" else flip(store, key)
    is_unseen = how == "lost" and number == 3
    done = repair(store, {5: ""} if is_unseen else None)
    (one,) = done.partitions
    text = "its newest records may be missing" if is_unseen else "record"
    assert one.reasons[0].startswith(text)
    # of the snapshot the first record is all that there is: what later ones add is known still
    assert load(store, 5).sections == wanted
    assert (one.lost, done.damages, one.put_aside) == ([], [], 3 if how == "lost" else 4)
    assert [found.key for found in one.named] == [object_key(1, number)]
    for hint in range(-1, 5):
        manifest = load(store, 5, hint)
        assert (manifest.number, manifest.sections) == (one.record, wanted)
    assert verify_history(store).damages == []


def test_names_of_producers_outlive_a_record_that_is_lost(store: MemoryStore) -> None:
    log = history_of(store)
    end = log.manifest.end_offset
    for name in ("one", "two", "three"):
        log.commit(TOPIC, 1, 1, first_offset=0, end_offset=end, producers={len(name): name})
    flip(store, manifest_key(5, 5))
    repair(store)
    assert load(store, 5).producers == {3: "one", 5: "three"}


def test_without_any_record(store: MemoryStore) -> None:
    """Only objects are left: they may be of a deleted topic, so that takes the operator's word."""
    log = history_of(store)
    store.delete([manifest_key(5, number) for number in range(4)])
    told = repair(store)
    assert told.partitions == []
    assert [each.key for each in told.unnamed] == [object_key(1, number) for number in range(4)]
    with pytest.raises(NotFound, match="nothing of partition 6"):
        repair(store, {6: ""})
    (one,) = repair(store, {5: TOPIC}).partitions
    manifest = load(store, 5, 3)
    assert (one.topic, manifest.topic) == (TOPIC, TOPIC)
    assert manifest.sections == log.manifest.sections
    with pytest.raises(InvalidArgument, match="is of /default/a, not of /default/x"):
        repair(store, {5: "/default/x"})


def test_what_was_given_up_does_not_come_back(store: MemoryStore) -> None:
    log = history_of(store)
    first, end = log.manifest.sections[2].base_offset, log.manifest.end_offset
    gone = [section.key for section in log.manifest.sections[:2]]
    log.commit(TOPIC, 1, 1, first_offset=first, end_offset=end, removed=gone)
    wanted = log.manifest.sections
    flip(store, manifest_key(5, 2))
    (one,) = repair(store).partitions
    assert (one.first_offset, load(store, 5).sections) == (first, wanted)
    assert repair(store).unnamed == []


def test_what_a_manifest_says_wins_over_orphans(store: MemoryStore) -> None:
    log = history_of(store)
    wanted = log.manifest.sections
    frames = make_frames(5, 0, 6, random.Random(9))
    put_object(store, {5: frames}, epoch=2)
    flip(store, manifest_key(5, 3))
    repair(store)
    assert load(store, 5).sections == wanted


def test_gaps_that_records_tell_of_are_no_loss(store: MemoryStore) -> None:
    log = ManifestLog(store, IDENTITY, 5, 1)
    for number, base in enumerate((0, 10, 20, 30)):
        sections = put_object(store, {5: [make_frame(5, base, [b"x"])]}, number=number)
        log.commit(TOPIC, 1, 1, first_offset=0, end_offset=base + 5, added=sections)
    flip(store, manifest_key(5, 2))
    (one,) = repair(store).partitions
    assert one.lost == [(15, 20), (21, 30)]  # offsets 1 to 15, and 31 to 35, were never used
    with pytest.raises(DataLoss, match="offsets 15 to 20 of /default/a are lost"):
        HistoryReader(store, 5, load(store, 5)).fetch(15, 1)


def test_a_loss_is_told_and_mended_once_its_object_is_back(store: MemoryStore) -> None:
    log = history_of(store)
    section, wanted = log.manifest.sections[1], log.manifest.sections
    kept = store.read(section.key)
    store.delete([section.key, manifest_key(5, 1)])
    done = repair(store)
    lost = (section.base_offset, section.end_offset)
    assert done.partitions[0].lost == [lost]
    (damage,) = verify_history(store).damages
    assert (damage.base_offset, damage.end_offset, damage.reason) == (*lost, LOST)
    assert done.damages == [damage]
    reader = HistoryReader(store, 5, load(store, 5))
    with pytest.raises(DataLoss, match=f"offsets {lost[0]} to {lost[1]} of /default/a are lost"):
        reader.fetch(lost[0], 1)
    found = reader.find_time(START_NS + lost[0])
    assert found == lost[1], "a search for a time passes by what is lost"
    assert (repair(store).partitions, repair(store).damages) == ([], [damage])
    store.create(section.key, kept)
    assert repair(store).partitions[0].named[0].key == section.key
    assert load(store, 5).sections == wanted


def test_only_the_sound_blocks_of_a_damaged_object_are_taken(store: MemoryStore) -> None:
    """Another object has what it has lost, and more: no offset is in two places then."""
    frames = [make_frame(5, offset, [bytes(BLOCK_BYTES)]) for offset in range(6)]
    (section,) = put_object(store, {5: frames}, part_bytes=1 << 20)
    put_object(store, {5: frames[:2]}, number=1, part_bytes=1 << 20)
    log = ManifestLog(store, IDENTITY, 5, 1)
    log.commit(TOPIC, 1, 1, first_offset=0, end_offset=6, added=[section])
    for number in (1, 4):
        flip(store, section.key, section.position + number * len(frames[0]) + 500)
    done = repair(store)
    (one,) = done.partitions
    assert one.named == []
    assert [(each.key, each.base_offset, each.end_offset) for each in one.copied] == [
        (section.key, 0, 1),
        (section.key, 2, 4),
        (section.key, 5, 6),
        (object_key(1, 1), 1, 2),
    ]
    assert one.lost == [(4, 5)]
    manifest = load(store, 5)
    assert named(manifest.sections) == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    assert sorted(readable(store, 5, manifest)) == [0, 1, 2, 3, 5]
    (damage,) = verify_history(store).damages
    assert damage.reason == LOST
    assert repair(store).partitions == []


def test_an_object_that_is_damaged_stays_named_if_no_other_has_its_messages(
    store: MemoryStore,
) -> None:
    log = history_of(store)
    before = contents(store)
    flip(store, object_key(1, 2), log.manifest.sections[2].position + 130)
    done = repair(store)
    assert (done.partitions, len(done.damages)) == ([], 1)
    assert contents(store).keys() == before.keys()


def test_what_is_behind_a_sound_end_takes_a_word(store: MemoryStore) -> None:
    """An object that was cut short there may be of a log that is no more."""
    log = history_of(store)
    end = log.manifest.end_offset
    orphan = put_object(store, {5: [make_frame(5, end, [b"x"])]}, number=9)[0]
    flip(store, manifest_key(5, 1))
    done = repair(store)
    assert [each.key for each in done.unnamed] == [orphan.key]
    assert load(store, 5).end_offset == end
    done = repair(store, {5: ""})
    assert (done.partitions[0].end_offset, done.unnamed) == (end + 1, [])
    assert load(store, 5).sections[-1] == orphan


def test_older_uploaders_are_fenced(store: MemoryStore) -> None:
    """A snapshot has the highest epoch of the store, whichever partition had it."""
    log = history_of(store)
    newer = ManifestLog(store, IDENTITY, 6, 7)
    newer.commit(TOPIC, 1, 1, first_offset=0, end_offset=0)
    flip(store, manifest_key(5, 1))
    repair(store)
    with pytest.raises(FailedPrecondition, match="newer uploader"):
        ManifestLog(store, IDENTITY, 5, 6).load()
    with pytest.raises(FailedPrecondition, match="newer uploader"):
        add(log, 1000)
    ManifestLog(store, IDENTITY, 5, 7).load()


# ---------------------------------------------------------------- what is refused


def test_a_store_of_two_brokers_is_refused(store: MemoryStore) -> None:
    history_of(store)
    flip(store, manifest_key(5, 2))
    ManifestLog(store, b"another identity", 9, 1).commit(
        "/default/c", 1, 1, first_offset=0, end_offset=0
    )
    with pytest.raises(FailedPrecondition, match="two brokers"):
        repair(store)


def test_a_record_of_a_newer_format(store: MemoryStore) -> None:
    """The newest one is another version's; one before others is damaged."""
    history_of(store)
    flip(store, manifest_key(5, 3), 8)
    with pytest.raises(FailedPrecondition, match="start the newer danube-fast"):
        repair(store)
    flip(store, manifest_key(5, 3), 8)
    flip(store, manifest_key(5, 1), 8)
    assert len(repair(store).partitions) == 1


def test_a_store_that_changes_meanwhile_is_refused(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker uses it."""
    history_of(store)
    flip(store, manifest_key(5, 1))
    calls = itertools.count()
    read = store.read

    def read_and_make(key: str, start: int = 0, count: int | None = None) -> bytes:
        if next(calls) == 9:
            store.create(object_key(2, 1), b"")
        return read(key, start, count)

    monkeypatch.setattr(store, "read", read_and_make)
    with pytest.raises(FailedPrecondition, match="stop the broker that uses it"):
        repair(store)
    assert not list(store.list(SUPERSEDED_PREFIX))


def test_an_empty_store(store: MemoryStore) -> None:
    with pytest.raises(NotFound, match="there is no history"):
        repair(store)


class CutStore(MemoryStore):
    """A store that is away after so many writes."""

    left = 1 << 30

    def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
        self._count()
        super().create(key, data)

    def delete(self, keys: list[str]) -> None:  # type: ignore[override]
        self._count()
        super().delete(keys)

    def _count(self) -> None:
        if not self.left:
            raise Unavailable("the store is away")
        self.left -= 1


def test_a_repair_that_is_cut_short_is_gone_on_with() -> None:
    """After any of its writes nothing is worse than before, and the next one ends it."""
    for cut in itertools.count():
        store = CutStore(SystemClock())
        wanted = history_of(store).manifest.sections  # type: ignore[arg-type]
        flip(store, manifest_key(5, 1))
        store.delete([manifest_key(5, 2)])
        store.left = cut
        try:
            repair(store)
        except Unavailable:
            store.left = 1 << 30
            for hint in range(-1, 4):
                try:
                    manifest = load(store, 5, hint)
                except DataLoss:
                    continue
                assert manifest.sections == wanted
            repair(store)
            assert repair(store).partitions == []
            assert {load(store, 5, hint).end_offset for hint in range(-1, 4)} == {
                wanted[-1].end_offset
            }
            assert load(store, 5).sections == wanted
            continue
        assert cut == 9, "a hold, a snapshot, the mark, and three records that are put aside"
        return
