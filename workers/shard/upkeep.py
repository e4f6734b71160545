"""Upkeep of a worker by the clock: the jobs of its parts, a slice of each in a tick.

Each job has its own interval; one comparison a turn when nothing is due.
"""

from __future__ import annotations

from collections.abc import Sequence

from danube_fast.clock import MILLISECOND_NS
from danube_fast.workers.shard.deliver.lookahead import Lookahead
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.session_checks import SessionChecks
from danube_fast.workers.shard.state import ShardState

__all__ = ["Upkeep"]

IDLE_POLL_MS = 250
"""Near the end of a silent session, or while a partition is missing."""
REST_POLL_MS = 1000
"""Otherwise: the process must show life."""
TIMER_POLL_MS = 10
TICK_NS = 10 * MILLISECOND_NS
PATIENCE_NS = 10 * MILLISECOND_NS
"""So long a tick that is due waits for a turn in which nothing else is done."""


class Upkeep:
    """Run the jobs of one worker."""

    def __init__(
        self, state: ShardState, lookahead: Lookahead, sessions: SessionChecks, jobs: Sequence[Job]
    ) -> None:
        """`jobs` run in their order."""
        self._state, self._lookahead = state, lookahead
        self._sessions, self._jobs = sessions, jobs
        self._may_be_busy = [job for job in jobs if type(job).is_busy is not Job.is_busy]
        """Asked before each sleep."""
        self._next_tick_ns = 0

    @property
    def idle_poll_ms(self) -> int:
        """How long the worker may sleep when no client or process asks for anything."""
        state = self._state
        if state.moved_cursors:
            return TIMER_POLL_MS
        for journal in state.journals.values():
            if not journal.marked or journal.snapshot:
                return TIMER_POLL_MS
        if any(job.is_busy for job in self._may_be_busy):
            return TIMER_POLL_MS
        rest_ms = max(IDLE_POLL_MS, (self._sessions.rest_ns - state.now_ns) // MILLISECOND_NS + 1)
        due_ms = (state.catalog.timers.next_ns - state.now_ns) // MILLISECOND_NS + 1
        wake_ms = min(rest_ms, REST_POLL_MS, self._lookahead.wake_ms(due_ms))
        return max(TIMER_POLL_MS, wake_ms)

    @property
    def is_due(self) -> bool:
        """Whether a tick waits for a turn in which nothing else is done."""
        return self._state.now_ns >= self._next_tick_ns

    def do_work(self, now_ns: int, *, is_free: bool) -> None:
        """Run what is due, if the turn `is_free`, or there was no such one for long: a tick and the messages of clients, in
        one turn, would make the longest ones longer."""
        self._lookahead.do_work(now_ns)
        if now_ns < self._next_tick_ns + (0 if is_free else PATIENCE_NS):
            return
        self._next_tick_ns = max(self._next_tick_ns + TICK_NS, now_ns + 1)
        self._state.boot.heartbeat()
        for job in self._jobs:
            job.do_work(now_ns)
