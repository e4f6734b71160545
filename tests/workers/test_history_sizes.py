"""How many bytes lie before a log, in history: as the uploader tells it, or spread evenly while it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.sizes import Sizes
from danube_fast.workers.shard.history.sizes import size_before

EXTENTS = [m.Extent(0, 10, 100), m.Extent(10, 50, 4000), m.Extent(1_000_000, 1_000_010, 1000)]
UNTIL = 1_000_010
LOG_START = 1_000_005


def partition(first: int) -> Any:
    """A partition that is in history, whose log begins within the last extent."""
    return SimpleNamespace(
        first_offset=first, uploaded=SimpleNamespace(until=UNTIL, byte_count=5100)
    )


@pytest.fixture
def in_log() -> Sizes:
    known = Sizes(0)
    known.note(LOG_START, 0)
    known.note(UNTIL, 500)
    known.note(UNTIL + 10, 2500)
    return known


def test_extents_tell_where_the_bytes_lie(in_log: Sizes) -> None:
    """What the log has, too, counts once; offsets that have no message take nothing."""
    before, is_guess = size_before(partition(0), LOG_START, in_log, EXTENTS, UNTIL)
    assert not is_guess
    in_log.put_before(before, is_guess=is_guess)
    assert in_log.between(0, UNTIL + 10) == 100 + 4000 + 1000 + 2000
    assert in_log.between(10, 50) == 4000
    assert in_log.between(50, 1_000_000) == 0
    assert in_log.between(30, UNTIL) == 2000 + 1000
    assert in_log.start_of_last(3000) == 50
    assert in_log.start_of_last(3001) == 10


def test_what_was_given_up_of_an_extent_does_not_count(in_log: Sizes) -> None:
    before, _ = size_before(partition(30), LOG_START, in_log, EXTENTS, UNTIL)
    in_log.put_before(before, is_guess=False)
    assert in_log.between(0, UNTIL) == 2000 + 1000


@pytest.mark.parametrize("known_until", [0, LOG_START - 1])
def test_without_them_the_sum_is_right(in_log: Sizes, known_until: int) -> None:
    """And nothing of history is given up for its size."""
    before, is_guess = size_before(partition(0), LOG_START, in_log, EXTENTS[:2], known_until)
    assert is_guess
    in_log.put_before(before, is_guess=is_guess)
    assert in_log.between(0, UNTIL + 10) == 5100 + 2000
    assert in_log.start_of_last(5000) == 0
    assert in_log.start_of_last(2000) == UNTIL
