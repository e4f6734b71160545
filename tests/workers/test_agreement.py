"""Whether a log and its history have one past: kills before a frontier, older copies, and objects that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.history.manifest import Section, lost_section
from danube_fast.history.objects import verify_object
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.uploader.agreement import find_agreement
from danube_fast.workers.uploader.checkpoint import Checkpoints
from danube_fast.workers.uploader.rounds import Rounds, _Owned
from tests.history.rig import IDENTITY, change_object, put_object
from tests.workers.uploader_rig import PARTITION, TOPIC, WORKER, Bench, FakeLog, frames_from

TOLD, UNTOLD = 100, 200
"""Up to where owners know that they are uploaded, and where history ends."""
OLD = frames_from(0, 10)
"""Every life has these."""


class Store(Bench):
    """A store with two objects of the partition, the second one behind what its owner knows."""

    def __init__(self, *, life: int = 0, part_bytes: int = 1 << 20) -> None:
        super().__init__(MemoryStore(VirtualClock()), part_bytes=part_bytes)
        self.sections: list[Section] = []
        parts = OLD, frames_from(TOLD, 10, life)
        for number, frames in enumerate(parts):
            (section,) = put_object(self.store, {PARTITION: frames}, number=number)
            self.sections.append(section)
            self.commit(section.end_offset, added=[section])

    def commit(self, end: int, **changes: Any) -> None:
        """Make a record more."""
        self.load().commit(TOPIC, 1, end_offset=end, **changes)

    def expire(self) -> None:
        """Take all sections out, as retention does."""
        self.commit(0, first_offset=UNTOLD, removed=[section.key for section in self.sections])

    def agrees(self, log: FakeLog, uploaded_until: int = TOLD) -> bool:
        """Compare them. Raises as `find_agreement`."""
        self.logs[PARTITION] = log
        backlog = log.backlog(uploaded_until)
        return bool(self.run(find_agreement(self.state, WORKER, backlog, self.load())))

    def named(self) -> list[tuple[int, int]]:
        """Offsets of the sections, each of which is sound."""
        found = self.load().manifest.sections
        for section in found:
            verify_object(self.store, section.key, IDENTITY)
        return [(section.base_offset, section.end_offset) for section in found]


@pytest.fixture(params=[1, 3, 50])
def make_log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A log whose index knows so many frames as one run."""

    def make(frames: Sequence[bytearray], old: Sequence[bytearray] = OLD) -> FakeLog:
        return FakeLog(tmp_path, [*old, *frames], run_frames=request.param)

    return make


def test_an_uploader_that_ended_before_it_could_tell(make_log: Any) -> None:
    store = Store()
    log = make_log(frames_from(TOLD, 30))
    assert store.agrees(log)
    log.synced_until = TOLD
    assert not store.agrees(log)
    del store.logs[PARTITION]
    backlog = log.backlog(TOLD)
    assert not store.run(find_agreement(store.state, WORKER, backlog, store.load()))


def test_other_messages_have_the_offsets(make_log: Any) -> None:
    """However far the log is, also if a purge was between, and in the midst of the last frame."""
    store = Store(life=1)
    log = make_log(frames_from(TOLD, 30))
    with pytest.raises(FailedPrecondition, match=f"{TOPIC} with offsets 190 to 200.*older copy"):
        store.agrees(log)
    log.first_offset = UNTOLD - 5
    with pytest.raises(FailedPrecondition, match=f"{TOPIC} with offsets 190 to 200.*older copy"):
        store.agrees(log)
    log.first_offset = UNTOLD
    assert store.agrees(log), "nothing of the log has the offsets any more"
    with pytest.raises(FailedPrecondition, match="ends at 150: the log is an older copy"):
        store.agrees(make_log(frames_from(TOLD, 5)))


def test_a_history_that_has_expired_is_ahead_of_an_older_copy(make_log: Any) -> None:
    """It looks as if it had never had anything; but its owner would know, or the log has nothing there."""
    store = Store(life=1)
    store.expire()
    log = make_log(frames_from(TOLD, 30))
    with pytest.raises(FailedPrecondition, match=f"{TOPIC} up to offset {UNTOLD}.*older copy"):
        store.agrees(log)
    with pytest.raises(FailedPrecondition, match="ends at 150: the log is an older copy"):
        store.agrees(make_log(frames_from(TOLD, 5)))
    log.synced_until = TOLD
    assert not store.agrees(log)
    log.synced_until = log.end_offset
    log.first_offset = UNTOLD - 1
    with pytest.raises(FailedPrecondition, match="older copy"):
        store.agrees(log)
    log.first_offset = UNTOLD
    assert store.agrees(log)
    log.first_offset = 0
    assert store.agrees(log, uploaded_until=UNTOLD)


def test_offsets_that_no_message_has_expire_with_none(make_log: Any) -> None:
    """A manifest may end behind its last section: of offsets that were never used, or given up before an upload."""
    store = Store()
    store.commit(250)
    assert store.agrees(make_log([*frames_from(TOLD, 10), *frames_from(250, 5)]))
    with pytest.raises(FailedPrecondition, match=r"behind 200 has expired.*older copy"):
        store.agrees(make_log(frames_from(TOLD, 30)))
    with pytest.raises(FailedPrecondition, match=r"behind 200 has expired.*older copy"):
        store.agrees(make_log([*frames_from(TOLD, 10), *frames_from(240, 10)]))


@pytest.mark.parametrize(("told", "left"), [(TOLD, 2), (UNTOLD, 0)])
def test_what_its_owner_was_not_told_of_does_not_expire(
    make_log: Any, tmp_path: Path, told: int, left: int
) -> None:
    """Else the next uploader would find what only an older copy has: a manifest that is further, and names nothing."""
    store = Store()
    store.logs[PARTITION] = log = make_log(frames_from(TOLD, 30))
    store.load().note_agreement()
    rounds = Rounds(store.state, Checkpoints(tmp_path))
    backlog = log.backlog(told, retention_seconds=1)
    store.run(rounds._give_up_old([_Owned(WORKER, backlog)]))
    assert len(store.load().manifest.sections) == left


@pytest.mark.parametrize(("first", "told"), [(0, None), (50, 50), (UNTOLD, UNTOLD), (900, UNTOLD)])
def test_an_owner_is_told_of_what_has_gone_if_nothing_else_goes(
    make_log: Any, tmp_path: Path, first: int, told: int | None
) -> None:
    """An uploader ended before it could, or the log is older. Of what is behind the end a purge says nothing: it may
    be of another life."""
    store = Store()
    store.logs[PARTITION] = log = make_log(frames_from(TOLD, 30))
    gone = [section.key for section in store.sections if section.end_offset <= first]
    store.commit(0, first_offset=first, removed=gone)
    store.histories.clear()  # as it is at the start
    rounds = Rounds(store.state, Checkpoints(tmp_path))
    backlog = log.backlog(UNTOLD, retention_seconds=10**9)
    assert store.run(rounds._give_up_old([_Owned(WORKER, backlog)])) == (told is not None)
    assert [each.first_offset for each in store.told] == ([] if told is None else [told])
    log.first_offset = first
    assert not store.run(rounds._give_up_old([_Owned(WORKER, log.backlog(UNTOLD))]))


def test_an_owner_of_an_older_copy_is_told_nothing(make_log: Any, tmp_path: Path) -> None:
    """What has expired in another life is behind what it knows, or before."""
    store = Store(life=1)
    store.commit(0, first_offset=50)
    store.histories.clear()
    store.logs[PARTITION] = log = make_log(frames_from(TOLD, 30))
    rounds = Rounds(store.state, Checkpoints(tmp_path))
    owned = [_Owned(WORKER, log.backlog(TOLD, retention_seconds=10**9))]
    assert not store.run(rounds._give_up_old(owned))
    assert rounds.fault is not None
    assert not store.run(rounds._tell_what_is_known(owned))
    assert not store.told


def test_a_purge_beyond_the_end_does_not_reach_what_is_uploaded_later() -> None:
    store = Store()
    store.commit(0, first_offset=UNTOLD + 100)
    store.commit(UNTOLD + 50)
    assert store.load().manifest.first_offset == UNTOLD


def lose(store: Store, section: Section) -> None:
    store.store.delete([section.key])


def damage(store: Store, section: Section) -> None:
    """Change the last block."""
    at = section.position + section.byte_count - 1
    change_object(store.store, section.key, lambda data: data.__setitem__(at, data[at] ^ 1))


@pytest.mark.parametrize("part_bytes", [1 << 20, 2000])
@pytest.mark.parametrize("harm", [lose, damage])
def test_what_is_lost_and_in_the_log_is_uploaded_again(
    make_log: Any, harm: Any, part_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition would stand aside for ever, and its log grow."""
    store = Store(part_bytes=part_bytes)
    before = store.sections[-1]
    harm(store, before)
    assert store.agrees(make_log(frames_from(TOLD, 30)))
    assert store.named() == [(0, TOLD), (TOLD, UNTOLD)]
    after = store.load().manifest.sections[-1]
    assert after.key != before.key
    assert (after.byte_count, after.append_max_ns) == (before.byte_count, before.append_max_ns)
    assert before.key in caplog.text
    assert not store.state.writing
    assert not list(store.store.uploads())


def test_all_of_several_that_are_lost(make_log: Any) -> None:
    store = Store()
    (third,) = put_object(store.store, {PARTITION: frames_from(UNTOLD, 10)}, number=2)
    store.commit(third.end_offset, added=[third])
    for section in (store.sections[-1], third):
        lose(store, section)
    assert store.agrees(make_log(frames_from(TOLD, 30)))
    assert store.named() == [(0, TOLD), (TOLD, UNTOLD), (UNTOLD, 300)]


def test_of_two_sections_in_an_object_both_stay_named(make_log: Any) -> None:
    """A record takes out all that one object has of a partition."""
    store = Store()
    other = store.sections[0]
    key = store.sections[-1].key
    shared = [replace(section, key=key) for section in store.sections]
    store.commit(0, removed=[other.key, key], added=shared)
    lose(store, shared[1])
    assert store.agrees(make_log(frames_from(TOLD, 30)))
    found = store.load().manifest.sections
    assert found[0] == shared[0]
    assert found[1].key != key


def test_what_is_lost_and_not_in_the_log_is_told(make_log: Any) -> None:
    """Of an older copy, and where a purge has taken a part of it; all of it gone is no harm any more."""
    store = Store(life=1)
    lose(store, store.sections[-1])
    log = make_log(frames_from(TOLD, 30))
    told = f"{store.sections[-1].key}.*{TOPIC} has not the same messages.*or purge"
    with pytest.raises(DataLoss, match=told):
        store.agrees(log)
    with pytest.raises(DataLoss, match=told):
        store.agrees(make_log(frames_from(TOLD + 10, 29, 1)))
    log.first_offset = log.end_offset
    assert store.agrees(log)
    log.first_offset, log.synced_until = 0, TOLD
    assert not store.agrees(log)


def test_what_a_repair_has_told_as_lost_is_uploaded_again(make_log: Any) -> None:
    """As far as the log has it; the rest stays lost."""
    store = Store()
    gone = lost_section(PARTITION, TOLD - 50, UNTOLD, 17)
    first, last = store.sections
    store.commit(
        0, removed=[first.key, last.key], added=[replace(first, end_offset=TOLD - 50), gone]
    )
    assert store.agrees(make_log(frames_from(TOLD, 30), OLD[-2:]), TOLD - 50)
    found = store.load().manifest.sections
    assert found[1] == lost_section(PARTITION, TOLD - 50, TOLD - 20, 17)
    assert (found[2].base_offset, found[2].end_offset) == (TOLD - 20, UNTOLD)
    verify_object(store.store, found[2].key, IDENTITY)
