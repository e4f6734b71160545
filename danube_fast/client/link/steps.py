"""Operations that may wait, written once: `Pump.run` drives them in the calling thread, `loop.py` in an event loop.

def open_steps(self, deadline_ns: int) -> Steps[None]:
if not (yield Wait(self.is_open, deadline_ns)):
raise DeadlineExceeded(...)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, NamedTuple, TypeVar

from danube_fast.checks import check_seconds
from danube_fast.client.link.answers import Ticket
from danube_fast.client.values.limits import FOREVER_NS, SLICE_NS
from danube_fast.clock import Clock

__all__ = ["Finished", "Steps", "Wait", "deadline_after", "seconds_until"]

T = TypeVar("T")


class Wait(NamedTuple):
    """Suspend until `ready()` is true (asked under the lock) or the deadline is over."""

    ready: Callable[[], bool]
    deadline_ns: int = FOREVER_NS
    ticket: Ticket | None = None
    """That whose outcome is all that `ready` asks for."""
    look_ns: int = SLICE_NS
    """How often to ask without being woken; longer if whatever changes the answer wakes those who wait."""


Steps = Generator[Wait, bool, T]
"""An operation that may wait: yields `Wait`, is sent whether it became ready, returns its result."""


class Finished(Generic[T]):
    """The outcome of an operation that has ended; awaiting it takes no time."""

    def __init__(self, outcome: T) -> None:
        self._outcome = outcome

    def __await__(self) -> Generator[None, None, T]:
        return self._outcome
        yield


def deadline_after(clock: Clock, seconds: float | None) -> int:
    """Monotonic deadline that many seconds from now; None means never. Raises InvalidArgument."""
    if seconds is None:
        return FOREVER_NS
    return clock.monotonic_ns() + int(check_seconds(seconds, "timeout") * 1e9)


def seconds_until(clock: Clock, deadline_ns: int) -> float:
    """Seconds until a monotonic deadline; 0 when it is over."""
    return max(0.0, (deadline_ns - clock.monotonic_ns()) / 1e9)
