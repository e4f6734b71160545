"""SIGTERM ends a command that streams like Ctrl-C: in order, and it says how far it came."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["is_terminated", "terminable"]

_received: list[int] = []


def _raise(number: int, frame: object) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def is_terminated() -> bool:
    """Whether it was SIGTERM that interrupted."""
    return bool(_received)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise KeyboardInterrupt in here when SIGTERM comes."""
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
