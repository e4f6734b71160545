"""How often a local user may come in over ipc: as often as there may be sessions, twice, and then some times each second.

ZeroMQ takes a name that a peer over ipc sends late, also one of those that ROUTER gives by itself, and ends the process when
it comes to give that one. A registered user would find one out of 2^32 by coming in again and again.
"""

from __future__ import annotations

from danube_fast.clock import SECOND_NS

__all__ = ["PER_SECOND", "LocalPace"]

PER_SECOND = 50
_STEP_NS = SECOND_NS // PER_SECOND


class LocalPace:
    """Count who comes in, by proof. For one thread."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._free_ns: dict[str, int] = {}
        """When all that came in is forgotten, by proof."""

    def admits(self, proof: str, now_ns: int) -> bool:
        """Whether a user comes in now, which counts; False: it has to come again later."""
        free_ns = max(self._free_ns.get(proof, now_ns), now_ns)
        if free_ns - now_ns > (self._at_once - 1) * _STEP_NS:
            return False
        if (
            proof not in self._free_ns
        ):  # for a new user those are dropped who have not come for long
            self._free_ns = {who: ns for who, ns in self._free_ns.items() if ns > now_ns}
        self._free_ns[proof] = free_ns + _STEP_NS
        return True
