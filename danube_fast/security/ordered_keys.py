"""Keys in their order, in blocks: one that comes or goes moves few others, however many there are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

__all__ = ["OrderedKeys"]

BLOCK_KEYS_MAX = 512


class OrderedKeys:
    """A set of texts that are not empty."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """`keys` are in order."""
        self._blocks = [
            list(keys[start : start + BLOCK_KEYS_MAX])
            for start in range(0, len(keys), BLOCK_KEYS_MAX)
        ] or [[]]
        self._firsts = ["", *[block[0] for block in self._blocks[1:]]]
        """No key of a block lies before its text here, and none of those before it behind."""

    def add(self, key: str) -> None:
        """Add a key that is not there."""
        place = bisect_right(self._firsts, key) - 1
        block = self._blocks[place]
        insort(block, key)
        if len(block) > BLOCK_KEYS_MAX:
            half = len(block) // 2
            self._blocks.insert(place + 1, block[half:])
            self._firsts.insert(place + 1, block[half])
            del block[half:]

    def remove(self, key: str) -> None:
        """Remove a key that is there."""
        place = bisect_right(self._firsts, key) - 1
        block = self._blocks[place]
        del block[bisect_left(block, key)]
        if not block and place:
            del self._blocks[place], self._firsts[place]

    def behind(self, after: str, limit: int) -> list[str]:
        """Return at most `limit` keys behind a text, in order."""
        place = bisect_right(self._firsts, after) - 1
        found = self._blocks[place][bisect_right(self._blocks[place], after) :]
        while len(found) < limit and (place := place + 1) < len(self._blocks):
            found += self._blocks[place]
        return found[:limit]
