"""A repair holds the objects that it tells of: a broker that is started afterwards deletes what no manifest names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import FailedPrecondition, Unavailable
from danube_fast.history.holds import HOLDS_PREFIX, Hold, list_holds
from danube_fast.history.layout import BLOCK_BYTES, OBJECTS_PREFIX
from danube_fast.history.manifest import ManifestLog, Section, manifest_key
from danube_fast.history.repair import HOLD_SECONDS, repair_history
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.superseding import SUPERSEDED_PREFIX
from tests.history.repair_rig import TOPIC, contents, flip, history_of, load, repair
from tests.history.rig import IDENTITY, START_NS, make_frame, put_object

CUTS_MAX = 100


class HookedStore(MemoryStore):
    """A store beside which something else works: before it creates a key, once."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.before: Callable[[str], bool] = lambda key: False
        """Works before a key is created; whether it has done its work."""

        self.left: int | None = None
        """Writes until it is away; None: it stays."""
        self.made: list[str] = []
        """Keys that were created, in their order."""

    def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
        if self.before(key):
            self.before = lambda key: False
        self._count()
        super().create(key, data)
        self.made.append(key)

    def delete(self, keys: list[str]) -> None:  # type: ignore[override]
        self._count()
        super().delete(keys)

    def _count(self) -> None:
        if self.left is not None:
            if not self.left:
                raise Unavailable("the store is away")
            self.left -= 1


@pytest.fixture
def store() -> HookedStore:
    return HookedStore()


def holds(store: MemoryStore) -> list[Hold]:
    return list_holds(store, START_NS)


def orphan(store: MemoryStore, offset: int, number: int = 9) -> str:
    return put_object(store, {5: [make_frame(5, offset, [b"x"])]}, number=number)[0].key


# ---------------------------------------------------------------- holds


def test_what_is_only_listed_is_held(store: HookedStore) -> None:
    """Even if there is nothing to repair."""
    key = orphan(store, history_of(store).manifest.end_offset)
    planned = repair(store, is_dry=True)
    assert (planned.held, planned.hold, planned.expires, holds(store)) == (1, "", 0, [])
    done = repair(store)
    (hold,) = holds(store)
    assert (done.partitions, [each.key for each in done.unnamed], hold.keys) == ([], [key], [key])
    assert (done.held, done.hold) == (1, hold.key)
    assert done.expires == START_NS // SECOND_NS + HOLD_SECONDS


def test_what_is_named_anew_or_copied_is_held(store: HookedStore) -> None:
    """With the copies, and the object of which no manifest names the rest any more."""
    frames = [make_frame(5, offset, [bytes(BLOCK_BYTES)]) for offset in range(4)]
    log = ManifestLog(store, IDENTITY, 5, 1)
    (damaged,) = put_object(store, {5: frames}, part_bytes=1 << 20)
    log.commit(TOPIC, 1, 1, first_offset=0, end_offset=4, added=[damaged])
    (unrecorded,) = put_object(store, {5: [make_frame(5, 4, [b"x"])]}, number=1)
    log.commit(TOPIC, 1, 1, first_offset=0, end_offset=5, added=[unrecorded])
    flip(store, manifest_key(5, 1))
    flip(store, damaged.key, damaged.position + 500)
    (source,) = put_object(store, {5: frames[:2]}, number=2, part_bytes=1 << 20)
    before = {info.key for info in store.list(OBJECTS_PREFIX)}
    planned = repair(store, is_dry=True)
    done = repair(store)
    copies = {info.key for info in store.list(OBJECTS_PREFIX)} - before
    assert [each.key for each in done.partitions[0].named] == [unrecorded.key]
    assert [each.key for each in done.partitions[0].copied] == [damaged.key, source.key]
    (hold,) = holds(store)
    assert set(hold.keys) == {damaged.key, unrecorded.key, source.key, *copies}
    assert len(copies) == 2
    assert planned.held == done.held == 5


def test_another_repair_takes_the_hold_that_there_is(store: HookedStore) -> None:
    """While half of its time is left: a command whose answer was lost can be given again."""
    orphan(store, history_of(store).manifest.end_offset)
    first = repair(store)
    before = contents(store)
    half_ns = HOLD_SECONDS * SECOND_NS // 2
    for later_ns in (0, half_ns):
        again = repair_history(store, {}, START_NS + later_ns, is_dry=False)
        assert (again.hold, contents(store)) == (first.hold, before)
    again = repair_history(store, {}, START_NS + half_ns + SECOND_NS, is_dry=False)
    assert again.hold != first.hold and again.expires > first.expires
    orphan(store, 1000, number=10)
    more = repair_history(store, {}, START_NS + half_ns + SECOND_NS, is_dry=False)
    assert (more.held, more.hold != again.hold) == (2, True)


def test_a_damaged_hold_is_no_hindrance(store: HookedStore) -> None:
    orphan(store, history_of(store).manifest.end_offset)
    store.create(f"{HOLDS_PREFIX}{(START_NS // 10**6) + 1000:015d}-0123456789abcdef", b"?")
    assert repair(store).hold


def test_nothing_is_held_if_there_is_nothing_to_tell(store: HookedStore) -> None:
    history_of(store)
    assert (repair(store).held, holds(store)) == (0, [])


# ---------------------------------------------------------------- an uploader that lives


def others(before: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in before.items() if not key.startswith(HOLDS_PREFIX)}


@pytest.mark.parametrize("instant", [HOLDS_PREFIX, "snapshot", "pruned", SUPERSEDED_PREFIX])
def test_a_record_that_comes_meanwhile(store: HookedStore, instant: str) -> None:
    """An uploader lives: all is as it was, and its record counts; another repair goes on from there."""
    log = history_of(store)
    flip(store, manifest_key(5, 2))
    before = contents(store)
    end = log.manifest.end_offset
    (section,) = put_object(store, {5: [make_frame(5, end, [b"x"])]}, number=4)
    before[section.key] = store.read(section.key)

    def upload(key: str) -> bool:
        is_now = key.startswith(instant) or key.endswith(instant)
        is_now |= instant == "snapshot" and key == manifest_key(5, 2 * 10**9)
        if is_now:
            store.before = lambda key: False
            log.commit(TOPIC, 1, 1, first_offset=0, end_offset=end + 1, added=[section])
        return is_now

    store.before = upload
    store.made.clear()
    with pytest.raises(FailedPrecondition, match="stop the broker that uses it") as refused:
        repair(store)
    assert manifest_key(5, 4) in str(refused.value)
    if instant == HOLDS_PREFIX:  # seen before the snapshot is made
        assert [key.partition("/")[0] for key in store.made] == ["manifests", "holds"]
    before[manifest_key(5, 4)] = store.read(manifest_key(5, 4))
    assert others(contents(store)) == before
    assert holds(store), "it must not be deleted by the broker that lives"
    (one,) = repair(store).partitions
    assert (one.put_aside, load(store, 5).sections) == (5, log.manifest.sections)


def test_an_uploader_that_has_lost_its_snapshot_is_fenced(store: HookedStore) -> None:
    """It takes its record back, so the repair goes on."""
    log = history_of(store)
    flip(store, manifest_key(5, 2))
    refused: list[FailedPrecondition] = []

    def upload(key: str) -> bool:
        is_now = key.startswith(SUPERSEDED_PREFIX) and key.endswith("1")
        if is_now:
            store.before = lambda key: False
            with pytest.raises(FailedPrecondition, match="newer uploader") as error:
                log.commit(TOPIC, 1, 1, first_offset=0, end_offset=1000)
            refused.append(error.value)
        return is_now

    store.before = upload
    wanted = log.manifest.sections
    assert len(repair(store).partitions) == len(refused) == 1
    assert load(store, 5).sections == wanted
    assert repair(store).partitions == []


def test_a_broker_that_goes_on_from_the_snapshot_keeps_it(store: HookedStore) -> None:
    wanted = history_of(store).manifest.sections
    flip(store, manifest_key(5, 2))

    def start(key: str) -> bool:
        is_now = key.startswith(SUPERSEDED_PREFIX)
        if is_now:
            store.before = lambda key: False
            log = ManifestLog(store, IDENTITY, 5, 2)
            log.load()
            log.commit(TOPIC, 1, 1, first_offset=0, end_offset=log.manifest.end_offset + 1)
        return is_now

    store.before = start
    with pytest.raises(FailedPrecondition, match="stop the broker that uses it"):
        repair(store)
    assert load(store, 5).sections == wanted
    assert load(store, 5).end_offset == wanted[-1].end_offset + 1
    assert repair(store).partitions == []


def test_putting_back_that_is_cut_short() -> None:
    """After any of its writes another repair ends it, and no message is lost."""
    for cut in range(CUTS_MAX):
        store = HookedStore()
        log = history_of(store)
        end = log.manifest.end_offset
        flip(store, manifest_key(5, 2))
        (section,) = put_object(store, {5: [make_frame(5, end, [b"x"])]}, number=4)
        store.before = partial(upload_and_cut, store, log, section, cut)
        try:
            repair(store)
        except Unavailable:
            store.left = None
        except FailedPrecondition:
            assert cut > 10, "records aside and back, the mark, the snapshot, what was put aside"
            return
        repair(store, {5: ""})
        for hint in range(-1, 5):
            assert load(store, 5, hint).sections == log.manifest.sections
        assert repair(store).partitions == []
    raise AssertionError(f"it has not ended after {CUTS_MAX} writes")


def upload_and_cut(
    store: HookedStore, log: ManifestLog, section: Section, cut: int, key: str
) -> bool:
    """Upload while records are put aside; the store is away after so many writes more."""
    is_now = key.startswith(SUPERSEDED_PREFIX)
    if is_now:
        store.before = lambda key: False
        log.commit(TOPIC, 1, 1, first_offset=0, end_offset=section.end_offset, added=[section])
        store.left = cut
    return is_now
