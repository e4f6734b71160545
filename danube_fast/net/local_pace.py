"""How often a local user may come in over ipc: many at once, and then some each second.

ZeroMQ takes a name that a peer over ipc sends late, also one of those that ROUTER gives by itself, and ends the process when
it comes to give that one. A registered user would find one out of 2^32 by coming in again and again.
"""

from __future__ import annotations

__all__ = ["PER_SECOND", "LocalPace"]

AT_ONCE = 10_000
PER_SECOND = 50


class LocalPace:
    """Count who comes in, by proof. For one thread."""

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}
        """When all that came in is forgotten, by proof, in seconds of the clock."""

    def admits(self, proof: str, now: float) -> bool:
        """Whether a user comes in now, which counts; False: it has to come again later."""
        free_at = max(self._free_at.get(proof, now), now)
        if free_at - now > (AT_ONCE - 1) / PER_SECOND:
            return False
        if (
            proof not in self._free_at
        ):  # a new user: so the table never holds more than come in within its time
            self._free_at = {who: at for who, at in self._free_at.items() if at > now}
        self._free_at[proof] = free_at + 1 / PER_SECOND
        return True
