"""Claims on parts of a log: nothing at or behind the lowest of their positions is given back."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Claim", "Pins"]

Claim = Callable[[int], int | None]
"""Slot of a log -> the lowest position that is needed there, None if nothing is."""


class Pins:
    """Ask the claims on the logs of one worker, by name."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def add(self, who: str, claim: Claim) -> None:
        """Ask `claim` before anything is given back."""
        self._claims[who] = claim

    def lowest(self, slot: int, *, but: str = "") -> int | None:
        """Find the lowest position of a log that any claim needs, `but` that one; None without any."""
        needed = [claim(slot) for who, claim in self._claims.items() if who != but]
        return min((position for position in needed if position is not None), default=None)
