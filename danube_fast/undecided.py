"""Rights that are being asked for: what needs one is put off, and begun again when there is an answer.

    step --> authorize --> Undecided --> the answer comes --> the same step, from its beginning

So a step asks for all its rights before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.errors import DanubeError, Unavailable

__all__ = ["Undecided", "when_decided"]


class Undecided(Unavailable):
    """A right that is not known yet. Code that does not wait for it refuses: the client may try again."""

    def __init__(self, text: str, then: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(text)
        self.then = then
        """Takes what the loop of the process calls when there is an answer."""


def when_decided(step: Callable[[], None], fail: Callable[[DanubeError], object]) -> None:
    """Take a step, now or when the rights that it asks for are known; `fail` takes what else prevents it."""
    try:
        step()
    except Undecided as undecided:
        undecided.then(lambda: when_decided(step, fail))
    except DanubeError as error:
        fail(error)
