"""Sessions whose clients are gone without a BYE, and connections that never opened one."""

from __future__ import annotations

from danube_fast.broker.subscription.consumer import Parting
from danube_fast.clock import MILLISECOND_NS
from danube_fast.workers.shard.assignments import Assignments
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.transports import Transports

__all__ = ["SessionChecks"]

BACKLOG_NS_MAX = 5000 * MILLISECOND_NS
"""How long a worker that cannot keep up takes silent sessions for living ones."""


class SessionChecks(PeriodicJob):
    """Close sessions of one worker that are silent for too long."""

    interval_ns = 250 * MILLISECOND_NS

    def __init__(
        self, state: ShardState, consumers: Consumers, transports: Transports,
        assignments: Assignments,
    ) -> None:  # fmt: skip
        self._state, self._consumers = state, consumers
        self._transports, self._assignments = transports, assignments
        self.rest_ns = 0
        """Until when the worker may sleep, for all that it knows of its sessions."""
        self._next_silent_ns = 0

    def run(self, now_ns: int) -> None:
        """Close sessions that were silent for too long."""
        state = self._state
        # after a standstill of the worker, messages that came meanwhile are read before silence counts
        heard_until_ns = max(state.drained_ns, now_ns - BACKLOG_NS_MAX)
        for session in state.sessions.silent(heard_until_ns):
            self._consumers.close_session(session, Parting.DIED)
        silent = now_ns >= self._next_silent_ns
        if silent:
            self._next_silent_ns = now_ns + state.settings.handshake_timeout_ms * MILLISECOND_NS
        self._transports.look_after(silent=silent)
        self.rest_ns = 0 if self._assignments.is_missing else state.sessions.next_silent_ns()
