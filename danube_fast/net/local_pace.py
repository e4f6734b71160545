"""How often a local user may come in over ipc: many times at once, and then some each second.

ZeroMQ takes a name that a peer over ipc sends late, also one of those that ROUTER gives by itself, and ends the process when
it comes to give that one. A registered user would find one out of 2^32 by coming in again and again.
"""

from __future__ import annotations

from danube_fast.clock import SECOND_NS

__all__ = ["PER_SECOND", "LocalPace"]

AT_ONCE = 10_000
PER_SECOND = 50
_STEP_NS = SECOND_NS // PER_SECOND


class LocalPace:
    """Count who comes in, by proof. For one thread."""

    def __init__(self) -> None:
        self._free_ns: dict[str, int] = {}
        """When all that came in is forgotten, by proof."""

    def admits(self, proof: str, now_ns: int) -> bool:
        """Whether a user comes in now, which counts; False: it has to come again later."""
        free_ns = max(self._free_ns.get(proof, now_ns), now_ns)
        if free_ns - now_ns > (AT_ONCE - 1) * _STEP_NS:
            return False
        if (
            proof not in self._free_ns
        ):  # for a new user those are dropped who have not come for long
            self._free_ns = {who: ns for who, ns in self._free_ns.items() if ns > now_ns}
        self._free_ns[proof] = free_ns + _STEP_NS
        return True
