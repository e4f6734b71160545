"""Manifests: one history, whichever uploader writes it, whatever answers are lost and however late a listing is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, Unavailable
from danube_fast.history import manifest as manifest_module
from danube_fast.history.epochs import check_owner
from danube_fast.history.manifest import (
    SNAPSHOT_EVERY,
    Manifest,
    ManifestLog,
    Record,
    Section,
    manifest_key,
)
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.store import ObjectInfo
from tests.history.rig import IDENTITY, put_history

PARTITION = 5


def section(base: int, end: int, key: str = "") -> Section:
    return Section(
        key=key or f"objects/{base}", position=64, byte_count=100, base_offset=base, end_offset=end,
        message_count=end - base, append_min_ns=base, append_max_ns=end - 1, publish_min_ns=0,
        publish_max_ns=0, blocks_position=164, block_count=1, blocks_crc=0,
    )  # fmt: skip


def log_of(store: MemoryStore, epoch: int = 1, partition_id: int = PARTITION) -> ManifestLog:
    return ManifestLog(store, IDENTITY, partition_id, epoch)


def add(log: ManifestLog, end: int) -> Manifest:
    """Commit one section more, up to `end`."""
    begun = log.manifest.end_offset
    return log.commit(
        "/default/t", 1, 1, first_offset=0, end_offset=end, added=[section(begun, end)]
    )


def ranges(manifest: Manifest) -> list[tuple[int, int]]:
    return [(found.base_offset, found.end_offset) for found in manifest.sections]


class LateStore(MemoryStore):
    """A store whose listings are late, and whose answers get lost when a test says so."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(SystemClock())
        self.chance = random.Random(seed)
        self.lose = 0.0

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        infos = list(super().list(prefix))
        yield from infos[: self.chance.randrange(len(infos) + 1)]

    def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
        if self.chance.random() < self.lose:
            if self.chance.random() < 0.5:
                super().create(key, data)
            raise Unavailable("the answer was lost")
        super().create(key, data)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


def test_a_partition_without_history(store: MemoryStore) -> None:
    manifest = log_of(store).load()
    assert (manifest.number, manifest.end_offset, manifest.sections) == (-1, 0, [])
    assert manifest.find(0) is None


def test_what_was_committed_is_loaded(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    for end in (10, 25, 40):
        add(log, end)
    for hint in (-1, 0, 1, 2):
        manifest = log_of(store).load(hint)
        assert ranges(manifest) == [(0, 10), (10, 25), (25, 40)]
        assert (manifest.number, manifest.end_offset, manifest.topic) == (2, 40, "/default/t")
    assert [manifest.find(at).base_offset for at in (0, 9, 10, 39)] == [0, 0, 10, 25]
    assert manifest.find(40) is None
    assert manifest.find_time(24) == section(10, 25)
    assert manifest.find_time(40) is None


def test_objects_that_went(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    for end in (10, 20, 30):
        add(log, end)
    log.commit("t", 1, 1, first_offset=20, end_offset=30, removed=["objects/0", "objects/10"])
    assert ranges(log.manifest) == ranges(log_of(store).load()) == [(20, 30)]
    assert log.manifest.first_offset == 20


def test_snapshots_hold_everything(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    for end in range(1, 3 * SNAPSHOT_EVERY):
        add(log, end)
        if end > 5:
            log.commit(
                "t", 1, 1, first_offset=end - 5, end_offset=end, removed=[f"objects/{end - 6}"]
            )
    wanted = ranges(log.manifest)
    snapshot = log.manifest.snapshot
    assert snapshot > SNAPSHOT_EVERY
    assert log.prune(0) == snapshot
    assert log.prune(snapshot) == snapshot
    assert store.head(manifest_key(PARTITION, snapshot - 1)) is None
    assert ranges(log_of(store).load()) == wanted
    assert ranges(log_of(store).load(log.manifest.number)) == wanted


def test_names_of_producers_are_told_once_and_stay_in_snapshots(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    log.commit("t", 1, 1, first_offset=0, end_offset=1, producers={7: "first"})
    for end in range(2, 2 * SNAPSHOT_EVERY):
        add(log, end)
    log.commit("t", 1, 1, first_offset=0, end_offset=end, producers={1 << 62: "late"})
    names = {7: "first", 1 << 62: "late"}
    assert log.manifest.producers == log_of(store).load().producers == names
    record = log_of(store).read(log.manifest.number)
    assert not record.is_snapshot and record.producers == {1 << 62: "late"}
    log.prune(0)
    assert log_of(store).load().producers == names


def test_the_newest_names_of_producers_are_kept(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "PRODUCERS_MAX", 10)
    log = log_of(store)
    log.load()
    for number in range(2 * SNAPSHOT_EVERY):
        log.commit("t", 1, 1, first_offset=0, end_offset=0, producers={number: f"p{number}"})
    assert [*log.manifest.producers] == [*range(2 * SNAPSHOT_EVERY)][-10:]
    assert [*log_of(store).load().producers.items()] == [*log.manifest.producers.items()]
    assert len(log_of(store).read(log.manifest.snapshot).producers) == 10


def test_an_uploader_ends_when_a_newer_one_has_begun(store: MemoryStore) -> None:
    old, new = log_of(store, 1), log_of(store, 2)
    old.load()
    add(old, 10)
    new.load()
    add(new, 20)
    with pytest.raises(FailedPrecondition, match="newer uploader"):
        add(old, 15)
    with pytest.raises(FailedPrecondition, match="newer uploader"):
        log_of(store, 1).load()
    assert ranges(log_of(store, 2).load()) == [(0, 10), (10, 20)]


@pytest.mark.parametrize("records", [1, 10, SNAPSHOT_EVERY + 3])
def test_an_old_uploader_does_not_take_a_number_that_was_pruned(
    store: MemoryStore, records: int
) -> None:
    old, new = log_of(store, 1), log_of(store, 2)
    old.load()
    for end in range(1, records):
        add(old, end)
    new.load()
    for end in range(1000, 1000 + 3 * SNAPSHOT_EVERY):
        add(new, end)
    wanted = ranges(new.manifest)
    new.prune(0)
    before = {info.key for info in store.list()}
    with pytest.raises(FailedPrecondition, match="newer uploader"):
        add(old, 5000)
    assert {info.key for info in store.list()} == before
    assert ranges(log_of(store, 3).load()) == wanted


def test_a_hint_that_was_pruned_is_not_needed(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    for end in range(1, SNAPSHOT_EVERY + 5):
        add(log, end)
    log.prune(0)
    assert ranges(log_of(store, 2).load(3)) == ranges(log.manifest)


@pytest.mark.parametrize("hint", [0, 3])
def test_a_store_that_was_emptied_is_not_a_new_one(store: MemoryStore, hint: int) -> None:
    with pytest.raises(DataLoss, match="is missing, and was there"):
        log_of(store).load(hint)


def test_what_an_old_uploader_adds_unseen_is_void(store: MemoryStore) -> None:
    old, new = log_of(store, 1), log_of(store, 2)
    old.load()
    add(old, 10)
    new.load()
    add(old, 15)
    add(old, 17)
    add(new, 20)
    assert new.manifest.number == 3
    for hint in (-1, 0, 3):
        assert ranges(log_of(store, 3).load(hint)) == [(0, 10), (10, 20)]


def test_a_snapshot_of_an_old_uploader_that_is_void_is_not_begun_with(store: MemoryStore) -> None:
    old, new = log_of(store, 1), log_of(store, 2)
    old.load()
    for end in range(10, 10 * SNAPSHOT_EVERY + 1, 10):
        add(old, end)
    new.load()
    add(old, 10_000)
    assert old.manifest.snapshot == old.manifest.number == SNAPSHOT_EVERY
    wanted = ranges(add(new, 20_000))
    for number in (SNAPSHOT_EVERY, SNAPSHOT_EVERY + 1):
        assert ranges(log_of(store, 2).load(number)) == wanted


def test_a_lost_answer_is_not_a_second_record(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    create = store.create

    def lose(key: str, data: bytes) -> None:
        create(key, data)
        raise Unavailable("the answer was lost")

    store.create = lose  # type: ignore[method-assign,assignment]
    with pytest.raises(Unavailable):
        add(log, 10)
    store.create = create  # type: ignore[method-assign]
    add(log, 10)
    assert log.manifest.number == 0
    assert ranges(log_of(store).load()) == [(0, 10)]


def test_records_of_another_broker_are_refused(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    add(log, 10)
    other = ManifestLog(store, b"another identity", PARTITION, 1)
    with pytest.raises(FailedPrecondition, match="another broker"):
        other.load()


def test_a_record_of_another_partition_is_refused(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    add(log, 10)
    store.create(manifest_key(6, 0), store.read(manifest_key(PARTITION, 0)))
    with pytest.raises(DataLoss, match="holds the record"):
        log_of(store, 1, 6).load()


def test_a_record_that_is_missing_is_told(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    for end in (10, 20, 30):
        add(log, end)
    store.delete([manifest_key(PARTITION, 1)])
    with pytest.raises(DataLoss, match=r"000000000001 is missing"):
        log_of(store).load()


def test_a_listing_that_is_late_does_not_make_a_second_history(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    for end in range(1, SNAPSHOT_EVERY + 5):
        add(log, end)
    late = LateStore()
    late._objects = store._objects
    late.chance = random.Random(3)
    late.list = lambda prefix="": iter(())  # type: ignore[method-assign,misc,assignment]
    assert ranges(log_of(late, 2).load()) == ranges(log.manifest)
    log.prune(0)
    with pytest.raises(Unavailable, match="does not list the later ones yet"):
        log_of(late, 2).load()
    assert ranges(log_of(late, 2).load(log.manifest.number)) == ranges(log.manifest)


def test_every_flipped_byte_of_a_record_is_found(store: MemoryStore) -> None:
    log = log_of(store)
    log.load()
    add(log, 10)
    key = manifest_key(PARTITION, 0)
    whole = store.read(key)
    for at in range(len(whole)):
        if 20 <= at < 24:
            continue  # reserved
        for damaged in (whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], whole[:at]):
            store.delete([key])
            store.create(key, damaged)
            with pytest.raises((DataLoss, FailedPrecondition), match=key):
                log_of(store).load(0)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_record(noise: bytes) -> None:
    with pytest.raises((DataLoss, FailedPrecondition)):
        Record.decode(noise, "noise")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_uploaders_that_come_and_go_write_one_history(seed: int) -> None:
    """Uploaders begin, stop, wake again; answers are lost, listings are late.

    The model is what a worker does: it hears of a new epoch before that one's uploader reads the
    manifest, and from then on believes no other. What it has believed, it may have trimmed.
    """
    chance = random.Random(seed)
    store = LateStore(seed)
    living, trimmed = 0, 0
    uploaders: list[tuple[int, ManifestLog]] = []
    hint = -1
    for _ in range(60):
        store.lose = 0.3
        step = chance.random()
        if step < 0.15 or not uploaders:
            living += 1
            fresh = log_of(store, living)
            try:
                # a listing may show nothing of what there is: only the worker's hint is sure
                fresh.load(hint) if hint >= 0 else fresh.load()
            except DanubeError as error:
                pytest.fail(f"seed {seed}: epoch {living} cannot load: {error}")
            uploaders.append((living, fresh))
            continue
        epoch, log = chance.choice(uploaders[-3:])
        end = max(log.manifest.end_offset, trimmed) + chance.randrange(1, 10)
        begun = log.manifest.end_offset
        try:
            for _ in range(8):
                try:
                    log.commit(
                        "t", 1, 1, first_offset=0, end_offset=end, added=[section(begun, end)]
                    )
                    break
                except Unavailable:
                    continue
            else:
                uploaders.remove((epoch, log))
                continue
        except FailedPrecondition:
            assert epoch < living, f"seed {seed}: the living uploader was fenced"
            uploaders.remove((epoch, log))
            continue
        if epoch == living:
            trimmed, hint = log.manifest.end_offset, log.manifest.number
    store.lose = 0.0
    if hint < 0:
        return
    final = log_of(store, living + 1).load(hint)
    found = ranges(final)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found)), f"seed {seed}"
    assert final.end_offset >= trimmed, f"seed {seed}: trimmed messages are in no history"
    assert found[0][0] == 0
    assert found[-1][1] == final.end_offset


def test_the_store_of_another_broker_is_seen_at_once(store: MemoryStore) -> None:
    check_owner(store, IDENTITY)
    put_history(store, 1, {5: "/default/t", 9: "/default/u"})
    check_owner(store, IDENTITY)
    with pytest.raises(FailedPrecondition, match="history of another broker"):
        check_owner(store, b"another identity")
    store.create("manifests/0000000001/pruned", b"")  # no record
    with pytest.raises(FailedPrecondition, match="history of another broker"):
        check_owner(store, b"another identity")
