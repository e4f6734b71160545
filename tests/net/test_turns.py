"""Long loops let other threads run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from danube_fast.net.turns import TURN, in_turns

TURNS = 2000


@pytest.fixture
def no_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


def test_another_thread_runs_within_a_loop(no_switches: None) -> None:
    """The interpreter itself would let it wait for a minute."""
    has_run = threading.Event()
    go = threading.Lock()
    go.acquire()

    def other() -> None:
        with go:
            has_run.set()

    thread = threading.Thread(target=other)
    thread.start()
    go.release()
    seen = any(has_run.is_set() for _ in in_turns(range(TURNS * TURN)))
    thread.join(60)
    assert seen


def test_all_items_are_there() -> None:
    assert list(in_turns(range(3 * TURN + 1))) == list(range(3 * TURN + 1))
