"""Long loops of a thread beside one that must not wait for it."""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["in_turns"]

TURN = 128
"""So many items keep the interpreter's lock for a fraction of a millisecond; the interpreter's own turn is 5 ms."""
PAUSE_SECONDS = 50e-6
"""A thread that waits for the lock must wake up meanwhile: it is not handed over."""
_Item = TypeVar("_Item")


def in_turns(items: Iterable[_Item]) -> Iterator[_Item]:
    """Go over items, and give the interpreter's lock up after every `TURN` of them."""
    for number, item in enumerate(items, 1):
        if number % TURN == 0:
            select.select((), (), (), PAUSE_SECONDS)
        yield item
