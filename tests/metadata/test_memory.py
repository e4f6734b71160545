"""The store in memory does what every store does."""

from __future__ import annotations

import pytest

from danube_fast.errors import ResourceExhausted
from danube_fast.metadata import local
from danube_fast.metadata.memory import MemoryStore
from tests.metadata.conformance import Conformance, ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock)


class TestMemoryStore(Conformance):
    pass


def test_a_watcher_that_never_takes_is_told_what_it_lost(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PENDING_EVENTS_MAX", 10)
    slow = store.watch("/a/")
    for number in range(11):
        store.put(f"/a/{number}", b"")
    with pytest.raises(ResourceExhausted, match="watch again"):
        slow.take()
    assert slow.take() == []
    fresh = store.watch("/a/")
    assert len(fresh.initial) == 11
    store.put("/a/x", b"")
    assert len(fresh.take()) == 1
