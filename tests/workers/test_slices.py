"""Long work of the coordinator goes in slices, in the order in which it came, and within a bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from danube_fast.errors import ResourceExhausted
from danube_fast.workers.coordinator.slices import (
    SLICE_NS,
    STEPS_BETWEEN_LOOKS,
    WAITING_MAX,
    WAITING_OF_ONE_MAX,
    Slices,
)


class Ticking:
    """A clock that goes on by a fifth of a slice with each look."""

    now = 0

    def monotonic_ns(self) -> int:
        self.now += SLICE_NS // 5
        return self.now

    def wall_ns(self) -> int:
        return self.now


def steps(count: int, name: str, done: list[str]) -> Iterator[None]:
    for _ in range(count):
        yield
    done.append(name)


def test_short_work_is_done_at_once_and_long_work_in_turns() -> None:
    slices, done = Slices(Ticking()), list[str]()
    slices.add("ann", steps(3, "short", done))
    assert done == ["short"] and slices.do_work() == 0
    long = 20 * STEPS_BETWEEN_LOOKS
    for name in ("one", "two"):
        slices.add("ann", steps(long, name, done))
    slices.add("ann", steps(3, "late", done))
    assert done == ["short", "late"], "what is short passes by"
    turns = 0
    while slices.do_work():
        turns += 1
        assert turns < 100, "a slice makes no progress"
    assert done == ["short", "late", "one", "two"] and turns > 4


def test_what_waits_is_bounded_of_all_and_of_one() -> None:
    slices, done = Slices(Ticking()), list[str]()
    users = WAITING_MAX // WAITING_OF_ONE_MAX
    for user in map(str, range(users)):
        for _ in range(WAITING_OF_ONE_MAX):
            slices.add(user, steps(20 * STEPS_BETWEEN_LOOKS, user, done))
        with pytest.raises(ResourceExhausted, match="try again"):
            slices.add(user, steps(1, "one more", done))
    with pytest.raises(ResourceExhausted, match="try again"):
        slices.add("late", steps(1, "late", done))
    assert not done
    while slices.do_work():
        pass
    assert len(done) == WAITING_MAX and not slices._of_one
    slices.add("0", steps(20 * STEPS_BETWEEN_LOOKS, "again", done))
