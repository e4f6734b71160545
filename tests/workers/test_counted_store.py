"""What the uploader counts: requests that write, parts, pieces that were fetched already, each once and from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker.messages import FetchHistory
from danube_fast.clock import SystemClock
from danube_fast.errors import AlreadyExists, DanubeError
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.staged import StagedParts
from danube_fast.history.stores.store import ObjectStore, Upload
from danube_fast.ring.counters import Counter, CounterBlock
from danube_fast.workers.process.tasks import Do, Task
from danube_fast.workers.uploader import fetches
from danube_fast.workers.uploader.counted_store import CountedStore
from danube_fast.workers.uploader.fetches import Fetches
from tests.history.conformance import Conformance, parts_of
from tests.history.rig import put_history

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

    url = "staged://"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SystemClock())
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


# ---------------------------------------------------------------- fetches


def run(task: Task) -> Any:
    """Run a task that needs threads only."""
    value = None
    while True:
        try:
            step = task.send(value)
        except StopIteration as end:
            return end.value
        assert isinstance(step, Do)
        value = step.work()


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_pieces_are_fetched_once(
    tmp_path: Path, counters: CounterBlock, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(fetches, "FETCH_BYTES", 1)
    clock = SystemClock()
    store = CountedStore(
        MemoryStore(clock) if kind == "memory" else LocalStore(tmp_path / "store", clock), counters
    )
    (log,) = put_history(store, 3, {5: "/default/a"}).values()
    history = SimpleNamespace(reader=HistoryReader(store, 5, log.manifest))

    def found(partition_id: int, manifest: int) -> Task:
        return history
        yield

    state: Any = SimpleNamespace(
        data_dir=tmp_path, settings=SimpleNamespace(history_cache_bytes=1 << 20), store=store,
        boot=SimpleNamespace(
            counters=counters, mailbox=SimpleNamespace(serve=lambda message, handler: None)
        ),
        history=found,
    )  # fmt: skip
    some = Fetches(state)
    written = counters.get(1, Counter.HISTORY_PUTS)
    end = log.manifest.end_offset
    pieces = []
    at = 0
    while at < end:
        pieces.append(run(some._fetched(FetchHistory(5, at, -1))))
        at = pieces[-1].blocks[-1].end_offset
    assert len(pieces) == 3
    assert not run(some._fetched(FetchHistory(5, end, -1))).blocks  # there is nothing to fetch
    assert counters.get(1, Counter.HISTORY_CACHE_MISSES) == 3
    assert counters.get(1, Counter.HISTORY_CACHE_HITS) == 0
    for offset in (0, 1, end - 1, end - 1):
        assert run(some._fetched(FetchHistory(5, offset, -1))) in pieces
    assert counters.get(1, Counter.HISTORY_CACHE_MISSES) == 3
    assert counters.get(1, Counter.HISTORY_CACHE_HITS) == 4
    assert counters.get(1, Counter.HISTORY_PUTS) == written
    (cache,) = [tmp_path / "history-cache"]
    assert cache.exists() == (kind == "memory")
