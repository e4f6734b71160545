"""Rights that are being asked for: what needs one is put off, and begun again when there is an answer.

    step --> authorize --> Undecided --> the answer comes --> the same step, from its beginning

So a step asks for all its rights before it changes anything.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TypeVar

from danube_fast.errors import DanubeError, Unavailable

__all__ = ["Steps", "Undecided", "allowed", "sift", "unnamed", "when_decided"]

TOGETHER_MAX = 16
"""Rights that one list asks for at a time: as many as the threads of one principal serve in time."""
AHEAD_MAX = 256
"""Items of a list that are looked at ahead while one of them waits."""
T = TypeVar("T")


class Undecided(Unavailable):
    """A right that is not known yet. Code that does not wait for it refuses: the client may try again."""

    def __init__(self, text: str, then: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(text)
        self.then = then
        """Takes what the loop of the process calls when there is an answer."""


Steps = Iterator[Undecided | None]
"""Long work in steps; behind one that yields Undecided it goes on when there is an answer."""


@contextmanager
def unnamed(resource: str) -> Iterator[None]:
    """Take the name of a resource out of errors that do not decide about it: who asks for a list may not know of it."""
    try:
        yield
    except Undecided:
        raise
    except Unavailable as error:
        raise Unavailable(str(error).replace(resource, "what the list would name")) from None


def when_decided(step: Callable[[], None], fail: Callable[[DanubeError], object]) -> None:
    """Take a step, now or when the rights that it asks for are known; `fail` takes what else prevents it."""
    try:
        step()
    except Undecided as undecided:
        undecided.then(lambda: when_decided(step, fail))
    except DanubeError as error:
        fail(error)


def allowed(items: Iterable[T], may: Callable[[T], bool]) -> list[T]:
    """Return the items that `may` is true for. Raises Undecided once several of them are being asked about."""
    found: list[T] = []
    waits: list[Undecided] = []
    for item in items:
        try:
            if may(item):
                found.append(item)
        except Undecided as undecided:
            waits.append(undecided)
            if len(waits) >= TOGETHER_MAX:
                break
    if waits:
        raise waits[0]
    return found


def sift(
    items: Iterable[T], may: Callable[[T], bool], found: list[T], most: int = sys.maxsize
) -> Steps:
    """Add the items that `may` is true for to `found`, up to `most`, one in each step."""
    ahead: deque[T] = deque()
    rest = iter(items)
    while len(found) < most:
        ahead.extend(islice(rest, 0 if ahead else 1))
        if not ahead:
            return
        try:
            if may(ahead[0]):
                found.append(ahead[0])
            ahead.popleft()
            yield None
        except Undecided as undecided:
            ahead.extend(islice(rest, AHEAD_MAX - len(ahead)))
            with suppress(DanubeError):
                allowed(ahead, may)
            yield undecided
