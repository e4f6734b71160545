"""Waiting for several things without a thread: one callback when all of them are done."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from danube_fast.errors import DanubeError

__all__ = ["Countdown", "Done"]

Done = Callable[[DanubeError | None], None]
"""Called when something is done, or with the error that prevented it."""


class Countdown:
    """Calls `done` once: when all that was added has ended, or with the first error.

    >>> with Countdown(print) as countdown:
    ...     first, second = countdown.add(), countdown.add()
    >>> first(None)
    >>> second(None)
    None
    """

    def __init__(self, done: Done) -> None:
        self._done: Done | None = done
        self._left = 1  # the block itself: what ends within it does not end all

    def add(self) -> Done:
        """One thing more to wait for: what to call when it has ended."""
        self._left += 1
        return self._end

    def _end(self, error: DanubeError | None) -> None:
        self._left -= 1
        if self._done is not None and (error is not None or self._left == 0):
            done, self._done = self._done, None
            done(error)

    def __enter__(self) -> Countdown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is not None:
            self._done = None  # the caller hears of it by the exception
        self._end(None)
