"""Sessions whose clients are gone without a word, and connections that never became one."""

from __future__ import annotations

from danube_fast.broker.subscription.consumer import Parting
from danube_fast.clock import MILLISECOND_NS
from danube_fast.workers.shard.assignments import Assignments
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.transports import Transports

__all__ = ["SessionChecks"]

INTERVAL_NS = 250 * MILLISECOND_NS
BACKLOG_NS_MAX = 5000 * MILLISECOND_NS
"""For so long a worker that cannot keep up takes silent sessions for living ones."""


class SessionChecks(Job):
    """Checks of one worker's sessions."""

    def __init__(
        self,
        state: ShardState,
        consumers: Consumers,
        transports: Transports,
        assignments: Assignments,
    ) -> None:
        self._state, self._consumers = state, consumers
        self._transports, self._assignments = transports, assignments
        self.rest = False
        """Whether no session holds anything that must be given back soon if its client dies."""
        self._next_ns = self._next_silent_ns = 0

    def do_work(self, now_ns: int) -> None:
        """Close sessions that were silent for too long, if it is time."""
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + INTERVAL_NS
        state = self._state
        # after a standstill of our own, what clients sent meanwhile is read before they are judged
        heard_until_ns = max(state.drained_ns, now_ns - BACKLOG_NS_MAX)
        for session in state.sessions.silent(heard_until_ns):
            self._consumers.close_session(session, Parting.DIED)
        silent = now_ns >= self._next_silent_ns
        if silent:
            self._next_silent_ns = now_ns + state.settings.handshake_timeout_ms * MILLISECOND_NS
        self._transports.look_after(silent=silent)
        self.rest = not self._assignments.is_missing and not any(
            session.consumers for session in state.sessions
        )
