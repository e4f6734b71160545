"""Fetches of history: shared by readers, ahead of those that read in order, bounded."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SystemClock
from danube_fast.config import MIB
from danube_fast.errors import DataLoss, Unavailable
from danube_fast.history.manifest import Manifest
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.workers.process.tasks import Tasks
from danube_fast.workers.uploader import fetches
from danube_fast.workers.uploader.counted_store import CountedStore
from danube_fast.workers.uploader.fetches import AHEAD_MAX, FETCHES_MAX, Fetches
from tests.history.rig import change_object, make_frames, put_object

PARTITION = 5
FRAMES = 40
"""Of each object."""


class Store(MemoryStore):
    """Counts reads of frames, and refuses them when told."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.reads: list[tuple[str, int]] = []
        self.is_away = False

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        if self.is_away:
            raise Unavailable("the store is away")
        self.reads.append((key, start))
        return super().read(key, start, count)


class Request:
    """A worker's request, and what came back."""

    def __init__(self, message: Any) -> None:
        self.message = message
        self.value: Any = None
        self.error: Exception | None = None

    def reply(self, value: Any) -> None:
        self.value = value

    def fail(self, error: Exception) -> None:
        self.error = error


class Rig:
    """Fetches of one partition, with threads that run when the test says so."""

    def __init__(self, directory: Path, cache_bytes: int, objects: int) -> None:
        self.store = Store()
        self.work: list[Callable[[], None]] = []
        self.counted: collections.Counter[str] = collections.Counter()
        self.handlers: dict[Any, Any] = {}
        manifest, offset = Manifest(), 0
        manifest.topic = "/default/t"
        for number in range(objects):
            frames = make_frames(PARTITION, offset, FRAMES, random.Random(number))
            (section,) = put_object(self.store, {PARTITION: frames}, number=number)
            manifest.sections.append(section)
            offset = section.end_offset
        manifest.end_offset = self.end = offset
        self.tasks = Tasks(None, self.start_work, SystemClock())  # type: ignore[arg-type]
        history = SimpleNamespace(
            manifest=manifest, reader=HistoryReader(self.store, PARTITION, manifest)
        )

        def find(partition_id: int, number: int) -> Any:
            return history
            yield

        counters: Any = SimpleNamespace(add=lambda counter: self.counted.update([counter.name]))
        state: Any = SimpleNamespace(
            data_dir=directory,
            settings=SimpleNamespace(history_cache_bytes=cache_bytes),
            boot=SimpleNamespace(
                mailbox=SimpleNamespace(serve=self.handlers.__setitem__), counters=counters
            ),
            tasks=self.tasks,
            store=CountedStore(self.store, counters),
            history=find,
            known=lambda partition_id: history,
        )
        self.fetches = Fetches(state)
        self.manifest = manifest

    def start_work(self, work: Callable[[], None], *, is_gentle: bool = False) -> None:
        self.work.append(work)

    def ask(self, offset: int) -> Request:
        """Ask for a piece, and let the loop turn."""
        request = Request(m.FetchHistory(PARTITION, offset, 0))
        self.handlers[m.FetchHistory](request)
        self.tasks.do_work(0)
        return request

    def run_all(self) -> None:
        """Run threads until there are none."""
        while self.work:
            self.work.pop(0)()
            self.tasks.do_work(0)

    def get(self, offset: int) -> Any:
        """What comes for an offset. Raises what it fails with."""
        request = self.ask(offset)
        self.run_all()
        if request.error is not None:
            raise request.error
        return request.value


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is a block or two."""
    monkeypatch.setattr(fetches, "FETCH_BYTES", 1)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, 64 * MIB, 8)


def test_readers_of_one_place_share_a_fetch(rig: Rig) -> None:
    first, second = rig.ask(0), rig.ask(0)
    rig.run_all()
    assert first.value.path == second.value.path
    assert len(rig.store.reads) == 2, "a table of blocks, and frames"


def test_pieces_are_fetched_ahead_of_a_reader_in_order(rig: Rig) -> None:
    found = rig.get(0)
    reads = len(rig.store.reads)
    assert reads == 2, "one piece says nothing of the next"
    found = rig.get(found.blocks[-1].end_offset)
    at = found.blocks[-1].end_offset
    for _ in range(AHEAD_MAX):
        request = rig.ask(at)
        assert request.value is not None, "it is here already"
        rig.run_all()
        at = request.value.blocks[-1].end_offset


def test_all_pieces_come_once_and_in_order(rig: Rig) -> None:
    at, pieces = 0, 0
    while at < rig.end:
        found = rig.get(at)
        assert found.blocks[0].base_offset <= at
        at, pieces = found.blocks[-1].end_offset, pieces + 1
    frames = len(rig.store.reads) - len(rig.manifest.sections)
    assert frames == pieces, "nothing is read twice"
    assert rig.counted == {"HISTORY_CACHE_MISSES": 2, "HISTORY_CACHE_HITS": pieces - 2}
    assert rig.get(rig.end).blocks == []


def test_two_readers_in_step_read_nothing_twice(rig: Rig) -> None:
    at, pieces = 0, 0
    while at < rig.end:
        both = rig.ask(at), rig.ask(at)
        rig.run_all()
        assert both[0].value == both[1].value
        at, pieces = both[0].value.blocks[-1].end_offset, pieces + 1
    assert len(rig.store.reads) - len(rig.manifest.sections) == pieces


def test_a_small_cache_is_not_filled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "FETCH_BYTES", 1 * MIB)
    rig = Rig(tmp_path, 1 * MIB, 4)
    at = 0
    for section in rig.manifest.sections:
        at = rig.get(at).blocks[-1].end_offset
        assert at == section.end_offset
        assert rig.store.reads[-1] == (section.key, section.position), "nothing behind it"


def test_a_store_that_is_away_delays_and_loses_nothing(rig: Rig) -> None:
    at = rig.get(0).blocks[-1].end_offset
    rig.store.is_away = True
    with pytest.raises(Unavailable):
        rig.get(at)
    rig.store.is_away = False
    while at < rig.end:
        at = rig.get(at).blocks[-1].end_offset


def test_damage_ahead_is_told_where_it_is(rig: Rig) -> None:
    section = rig.manifest.sections[4]

    def flip(data: bytearray) -> None:
        data[section.position + 200] ^= 1

    change_object(rig.store, section.key, flip)
    rig.store.reads.clear()
    at = 0
    while at < section.base_offset:
        at = rig.get(at).blocks[-1].end_offset
    assert at == section.base_offset
    with pytest.raises(DataLoss, match=section.key):
        rig.get(at)


def test_reads_at_the_same_time_are_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 64 * MIB, 3 * FETCHES_MAX)
    requests = [rig.ask(section.base_offset) for section in rig.manifest.sections]
    tables = list(rig.work)
    rig.work.clear()
    for each in tables:
        each()
    for _ in range(5):
        rig.tasks.do_work(0)
    assert len(rig.work) == FETCHES_MAX
    most = 0
    while rig.work:
        most = max(most, len(rig.work))
        rig.work.pop(0)()
        for _ in range(3):
            rig.tasks.do_work(0)
    assert most == FETCHES_MAX
    assert all(request.value is not None for request in requests)


def give_up(rig: Rig, count: int) -> int:
    """Take the first sections out of the manifest; where it begins then."""
    sections = rig.manifest.sections
    rig.manifest.first_offset = sections[count - 1].end_offset
    rig.manifest.sections = sections[count:]
    return rig.manifest.first_offset


@pytest.mark.parametrize("count", [3, 8])
def test_what_was_given_up_is_told(rig: Rig, count: int) -> None:
    """Some objects are left, or none."""
    first = give_up(rig, count)
    for offset in (0, first - 1):
        found = rig.get(offset)
        assert (found.blocks, found.gone_until) == ([], first)
    assert bool(rig.get(first).blocks) == (first < rig.end)
    assert not rig.store.reads or rig.store.reads[0][0] == rig.manifest.sections[0].key


def test_what_is_given_up_while_it_is_looked_for_is_told(rig: Rig) -> None:
    request = rig.ask(0)
    first = give_up(rig, 3)
    rig.run_all()
    assert request.value == m.FetchedHistory("", [], first, rig.end)


def test_what_is_given_up_before_it_is_fetched_ahead_is_told(rig: Rig) -> None:
    """Else the piece ahead would say that there were no messages before it."""
    here = rig.manifest.sections[: AHEAD_MAX + 2]
    rig.get(0)
    rig.get(here[1].base_offset)
    first = give_up(rig, len(here) + 2)
    assert rig.get(here[2].base_offset).blocks, "it was fetched ahead"
    assert rig.get(here[-1].end_offset) == m.FetchedHistory("", [], first, rig.end)


def test_extents_of_many_sections_are_told_together(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extents() -> Any:
        request = Request(m.ListExtents(PARTITION, 0))
        rig.handlers[m.ListExtents](request)
        rig.tasks.do_work(0)
        return request.value

    sections = rig.manifest.sections
    single = [m.Extent(each.base_offset, each.end_offset, each.byte_count) for each in sections]
    assert extents() == single
    monkeypatch.setattr(fetches, "EXTENTS_MAX", 2)
    told = extents()
    assert len(told) <= 2
    assert (told[0].base_offset, told[-1].end_offset) == (0, rig.end)
    assert sum(each.byte_count for each in told) == rig.manifest.byte_count


def test_a_history_that_ends_behind_its_last_section_tells_so(rig: Rig) -> None:
    """Offsets at its end were never used, or skipped."""
    rig.manifest.end_offset = rig.end + 10
    assert rig.get(rig.end) == m.FetchedHistory("", [], 0, rig.end + 10)
    assert rig.get(rig.end - 1).blocks


def test_what_was_purged_in_the_midst_of_an_object_needs_no_object(rig: Rig) -> None:
    """It is given up, and not lost."""
    rig.manifest.first_offset = first = rig.manifest.sections[0].end_offset - 1
    rig.store.delete([rig.manifest.sections[0].key])
    assert rig.get(0) == m.FetchedHistory("", [], first, rig.end)
    with pytest.raises(DataLoss):
        rig.get(first)


def test_a_purge_beyond_the_end_says_nothing_of_what_comes_there(rig: Rig) -> None:
    """Behind the end another life of the log may go on, whose owner knows of no purge."""
    rig.manifest.first_offset = rig.end + 100
    assert rig.get(rig.end - 1).gone_until == rig.end
    assert rig.get(rig.end).gone_until == rig.end
