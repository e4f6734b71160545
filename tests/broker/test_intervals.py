"""Interval sets and attempt counts against plain Python sets and dicts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.broker.attempts import Attempts
from danube_fast.broker.intervals import IntervalSet, sorted_set

ranges = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1]))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), ranges), max_size=40), ranges)
def test_a_set_of_intervals_is_a_set(changes, window):
    intervals, model = IntervalSet(), set()
    for what, (start, end) in changes:
        getattr(intervals, what)(start, end)
        model = model | set(range(start, end)) if what == "add" else model - set(range(start, end))
        assert {n for low, high in intervals for n in range(low, high)} == model
        assert intervals.count == len(model)
        assert bool(intervals) == bool(model)
    pairs = list(intervals)
    assert all(low < high for low, high in pairs)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(pairs)), "must be merged"
    inside = {n for low, high in intervals.overlap(*window) for n in range(low, high)}
    outside = {n for low, high in intervals.missing(*window) for n in range(low, high)}
    assert inside == model & set(range(*window))
    assert outside == set(range(*window)) - model
    assert IntervalSet(intervals.flat()).flat() == intervals.flat()
    assert all((n in intervals) == (n in model) for n in range(80))


def test_edges_of_an_interval_set():
    intervals = IntervalSet([5, 7, 9, 12])
    assert (intervals.first, intervals.first_end, intervals.last_end, len(intervals)) == (
        5,
        7,
        12,
        2,
    )
    assert intervals.pop_first() == (5, 7)
    assert intervals.overlap(11, 10) == intervals.missing(11, 10) == []
    intervals.clear()
    with pytest.raises(IndexError):
        _ = intervals.first


@given(st.lists(ranges, max_size=20), st.lists(ranges, max_size=20))
def test_sweeps_do_what_single_changes_do(some, others):
    flat = [edge for pair in others for edge in pair]
    left, right = IntervalSet([edge for pair in some for edge in pair]), sorted_set(flat)
    assert list(right) == list(IntervalSet(flat))
    model, wanted = (
        {n for low, high in intervals for n in range(low, high)} for intervals in (left, right)
    )
    removed = left.split_off(right)
    assert {n for low, high in left for n in range(low, high)} == model - wanted
    assert {n for low, high in removed for n in range(low, high)} == model & wanted
    left.add_all(right)
    assert {n for low, high in left for n in range(low, high)} == model | wanted
    assert list(left) == list(IntervalSet(left.flat()))


@given(st.lists(ranges, max_size=20), st.lists(ranges, max_size=20))
def test_attempts_in_one_sweep(bumped, discarded):
    slow, fast = Attempts(), Attempts()
    for pairs in (bumped, bumped[1:]):
        together = sorted_set([edge for pair in pairs for edge in pair])
        for start, end in together:
            slow.bump(start, end)
        fast.bump_all(together)
    gone = sorted_set([edge for pair in discarded for edge in pair])
    for start, end in gone:
        slow.discard(start, end)
    fast.discard_all(gone)
    for n in range(80):
        assert slow.segments(n, n + 1) == fast.segments(n, n + 1)
    assert bool(slow) == bool(fast)


@given(st.lists(st.tuples(st.sampled_from(["bump", "discard"]), ranges), max_size=40), ranges)
def test_attempts_count_like_a_counter(changes, window):
    attempts, model = Attempts(), Counter()
    for what, (start, end) in changes:
        getattr(attempts, what)(start, end)
        for n in range(start, end):
            model[n] = model[n] + 1 if what == "bump" else 0
    found = {n: count for low, high, count in attempts.segments(0, 100) for n in range(low, high)}
    assert found == {n: model[n] for n in range(100)}
    pieces = attempts.segments(*window)
    assert [n for low, high, _ in pieces for n in range(low, high)] == list(range(*window))
    assert bool(attempts) == any(model.values())
