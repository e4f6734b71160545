"""What the uploader counts: requests that write, parts, pieces that were fetched already, each once and from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import AlreadyExists, DanubeError
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.staged import StagedParts
from danube_fast.history.stores.store import ObjectStore, Upload
from danube_fast.history.stores.url import parse_store_url
from danube_fast.ring.counters import Counter, CounterBlock
from danube_fast.workers.uploader.counted_store import CountedStore
from tests.history.conformance import Conformance, parts_of

OVERLAP_SECONDS = 0.2
"""How long an addition waits for another one."""


@pytest.fixture
def counters() -> Iterator[CounterBlock]:
    block = CounterBlock.create(2, 1)
    yield block
    block.close()


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(SystemClock())


def counted(counters: CounterBlock) -> dict[str, int]:
    """All counters that are not 0."""
    return {each.name: value for each, value in counters.snapshot(1).items() if value}


class TestCounted(Conformance):
    """All of it is passed on."""

    @pytest.fixture
    def store(self, memory: MemoryStore, counters: CounterBlock) -> ObjectStore:
        return CountedStore(memory, counters)


def use(store: CountedStore) -> None:
    """Use a store in every way: seven requests that write, of which two fail, and three parts."""
    store.create("a/1", b"x")
    with pytest.raises(AlreadyExists):
        store.create("a/1", b"x")
    upload = store.begin("a/2")
    store.complete(upload, parts_of(store, upload, b"one", b"two", b"three"))
    store.head("a/1")
    store.read("a/2")
    store.abort(store.begin("a/3"))
    with pytest.raises(DanubeError):
        store.put_part(Upload("a/3", "none"), 1, 0, b"x")
    assert [info.key for info in store.list()] == ["a/1", "a/2"]
    assert not [*store.uploads()]
    store.delete(["a/1", "a/2"])
    store.close()


def test_requests_that_write_are_counted(memory: MemoryStore, counters: CounterBlock) -> None:
    use(CountedStore(memory, counters))
    assert counted(counters) == {"HISTORY_PUTS": 9, "HISTORY_PARTS": 3}


class Staged(StagedParts):
    """A store whose parts wait on this host."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SystemClock(), parse_store_url("gs://staged/prefix"))
        self.sent: list[str] = []

    def _send(self, key: str, path: Path) -> None:
        self.sent.append(key)


def test_parts_that_wait_on_this_host_are_no_requests(
    tmp_path: Path, counters: CounterBlock
) -> None:
    staged: Any = Staged(tmp_path / "parts")
    store = CountedStore(staged, counters)
    upload = store.begin("a/1")
    store.complete(upload, parts_of(store, upload, b"one", b"two"))
    assert staged.sent == ["a/1"]
    assert counted(counters) == {"HISTORY_PUTS": 1}


def test_a_store_tells_what_it_sends_again(memory: MemoryStore, counters: CounterBlock) -> None:
    retrying: Any = memory
    retrying.on_retry = lambda: None
    CountedStore(retrying, counters)
    for _ in range(3):
        retrying.on_retry()
    assert counted(counters) == {"HISTORY_REQUEST_RETRIES": 3}


class Slow:
    """Counters whose additions take a while, and which notice two at a time."""

    def __init__(self) -> None:
        self.total = self.inside = 0
        self.overlap = threading.Event()

    def add(self, counter: Counter) -> None:
        """Wait for another addition to begin, but not for long."""
        self.inside += 1
        if self.inside > 1:
            self.overlap.set()
        self.overlap.wait(OVERLAP_SECONDS)
        self.inside -= 1
        self.total += 1


def test_one_thread_adds_at_a_time(memory: MemoryStore) -> None:
    counters: Any = Slow()
    store = CountedStore(memory, counters)
    threads = [threading.Thread(target=store.create, args=(f"a/{n}", b"")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.total == 4
    assert not counters.overlap.is_set()
