"""Bytes between offsets, as far as marks tell."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker import sizes
from danube_fast.broker.sizes import Sizes


def test_bytes_between_marks_are_spread_evenly() -> None:
    known = Sizes(10)
    known.note(20, 1000)
    known.note(30, 1100)
    assert known.between(10, 20) == 1000
    assert known.between(15, 25) == 550
    assert known.between(0, 100) == 1100
    assert known.start_of_last(50) == 25
    assert known.start_of_last(600) == 15
    assert known.start_of_last(5000) == 10


def test_what_is_forgotten_does_not_change_the_rest() -> None:
    known = Sizes(0)
    for offset in range(10, 1000, 10):
        known.note(offset, offset * 7)
    before = known.between(500, 900)
    known.forget_below(455)
    assert known.between(500, 900) == before
    assert known.start_of_last(10**9) == 450


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 1000)), min_size=1, max_size=60))
def test_start_and_size_agree(steps: list[tuple[int, int]]) -> None:
    known = Sizes(0)
    offset = total = 0
    for more, byte_count in steps:
        offset, total = offset + more, total + byte_count
        known.note(offset, total)
    for wanted in (0, 1, total // 3, total, total + 5):
        start = known.start_of_last(wanted)
        assert 0 <= start <= offset
        assert known.between(start, offset) >= min(wanted, total) - 1


def test_marks_are_bounded() -> None:
    known = Sizes(0)
    for offset in range(1, 3 * sizes.MARKS_MAX):
        known.note(offset, offset)
    assert len(known._offsets) <= sizes.MARKS_MAX + 1
    assert known.between(0, offset) == offset


def test_what_is_put_before_counts_and_goes_up_to_its_marks_only() -> None:
    """The marks of history are far from each other; where its bytes lie between two of them is not known."""
    known = Sizes(0)
    known.note(100, 0)
    known.note(110, 1000)
    before = Sizes(0)
    before.note(50, 3000)
    before.note(100, 5000)
    known.put_before(before, is_guess=False)
    known.note(120, 5000 + 1000 + 500)
    assert known.between(0, 120) == 6500
    assert known.between(75, 105) == 1500
    assert known.start_of_last(1000) == 105
    assert known.start_of_last(1500 + 2000) == 50
    assert known.start_of_last(1500 + 1999) == 50
    assert known.start_of_last(1500 + 2001) == 0
