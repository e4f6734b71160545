"""Rate limit of new connections over ipc, for each local user: a burst, and then some a second.

ZeroMQ takes a name that a peer over ipc sends late, also one of those that ROUTER gives by itself, and ends the process when
it comes to give that one. A registered user would find one out of 2^32 by coming in again and again.
"""

from __future__ import annotations

from danube_fast.clock import SECOND_NS

__all__ = ["PER_SECOND", "LocalRateLimit"]

PER_SECOND = 50
"""Connections of one user behind its burst."""
_STEP_NS = SECOND_NS // PER_SECOND


class LocalRateLimit:
    """Count connections, by proof. For one thread."""

    def __init__(self, at_once: int) -> None:
        """`at_once`: connections of a user that need not wait for each other, the burst."""
        self._at_once = at_once
        self._free_ns: dict[str, int] = {}
        """When a user has its whole burst again, by proof."""

    def admits(self, proof: str, now_ns: int) -> bool:
        """Count one more connection of a user, if its rate allows one; whether it does."""
        free_ns = max(self._free_ns.get(proof, now_ns), now_ns)
        if free_ns - now_ns > (self._at_once - 1) * _STEP_NS:
            return False
        if (
            proof not in self._free_ns
        ):  # for a new user those are dropped who have not come for long
            self._free_ns = {who: ns for who, ns in self._free_ns.items() if ns > now_ns}
        self._free_ns[proof] = free_ns + _STEP_NS
        return True
