"""SIGTERM ends a command that streams like Ctrl-C: in order, and it says how far it came."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["Interrupts", "is_terminated", "terminable"]

_received: list[int] = []


def is_terminated() -> bool:
    """Whether it was SIGTERM that interrupted."""
    return bool(_received)


class Interrupts:
    """Raises KeyboardInterrupt for a signal; what must not be cut in two is done under `held`."""

    def __init__(self) -> None:
        self._is_held = self._is_waiting = False

    def on_signal(self, number: int, frame: object) -> None:
        """Raise for a signal, or keep it back under `held`."""
        if number == signal.SIGTERM:
            _received.append(number)
        if self._is_held and not self._is_waiting:
            self._is_waiting = True
            return
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal back until the end of this; a second one raises at once."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_waiting:
            raise KeyboardInterrupt


@contextlib.contextmanager
def terminable() -> Iterator[Interrupts]:
    """Raise KeyboardInterrupt in here when SIGTERM or SIGINT comes, unless it is ignored."""
    interrupts = Interrupts()
    before = {
        number: signal.signal(number, interrupts.on_signal)
        for number in (signal.SIGTERM, signal.SIGINT)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
