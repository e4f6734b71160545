"""When a worker does what the clock asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.upkeep import PATIENCE_NS, TICK_NS, Upkeep


class Counted(Job):
    def __init__(self) -> None:
        self.ran_at_ns: list[int] = []

    def do_work(self, now_ns: int) -> None:
        self.ran_at_ns.append(now_ns)


class Turns:
    """Turns of a loop at times that a test names."""

    def __init__(self) -> None:
        self.job = Counted()
        self.state: Any = SimpleNamespace(now_ns=0, boot=SimpleNamespace(heartbeat=lambda: None))
        lookahead: Any = SimpleNamespace(do_work=lambda now_ns: None)
        self.upkeep = Upkeep(self.state, lookahead, lookahead, [self.job])

    def turn(self, now_ns: int, *, is_free: bool) -> bool:
        """Do one; whether the job ran."""
        count, self.state.now_ns = len(self.job.ran_at_ns), now_ns
        self.upkeep.do_work(now_ns, is_free=is_free)
        return len(self.job.ran_at_ns) > count


def test_a_tick_waits_for_a_turn_in_which_nothing_else_is_done_but_not_for_long() -> None:
    turns = Turns()
    start_ns = SECOND_NS
    while turns.turn(start_ns, is_free=True) or turns.upkeep.is_due:
        start_ns += MILLISECOND_NS
    due_ns = start_ns
    while not turns.turn(due_ns, is_free=False) and not turns.upkeep.is_due:
        due_ns += MILLISECOND_NS
    assert due_ns - start_ns <= TICK_NS
    assert turns.turn(due_ns, is_free=True), "the loop made a turn for it"
    busy_ns = due_ns
    while not turns.turn(busy_ns, is_free=False):
        busy_ns += MILLISECOND_NS
    assert (
        TICK_NS + PATIENCE_NS
        <= busy_ns - due_ns + MILLISECOND_NS
        <= TICK_NS + PATIENCE_NS + 2 * MILLISECOND_NS
    )


@pytest.mark.parametrize("is_free", [False, True])
def test_ticks_are_as_frequent_on_a_busy_worker(*, is_free: bool) -> None:
    turns = Turns()
    for now_ns in range(SECOND_NS, 2 * SECOND_NS, MILLISECOND_NS):
        turns.turn(now_ns, is_free=is_free)
    assert len(turns.job.ran_at_ns) == pytest.approx(SECOND_NS / TICK_NS, rel=0.12)
