"""Requests that await their reply, and what becomes of them when the session is lost."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Any

from danube_fast.client.values.limits import REPAIR_NS, TAKEOVER_NS, WAIT_TOLD_NS
from danube_fast.errors import DanubeError, Internal, ResourceExhausted, Unavailable

__all__ = [
    "RETRYABLE",
    "Call",
    "OnLoss",
    "Report",
    "Reporter",
    "ask_all",
    "asks_again",
    "tell_wait",
    "unknown_outcome",
]

_log = logging.getLogger(__name__)

RETRYABLE = (Unavailable, Internal, ResourceExhausted)
"""Errors that may pass: asked again, with backoff."""
Report = tuple[int, int, int]
"""Consumer, frames and offset, as PING has them."""
Reporter = Callable[[Any], Report | None]
"""Says how far the application is on one attachment; None if there is nothing to say."""


def ask_all(reporters: dict[Any, Reporter]) -> list[Report]:
    """Ask how far the application is on each attachment, and forget the reporters."""
    items = tuple(reporters.items())
    reporters.clear()
    asked = [reporter(attachment) for attachment, reporter in items]
    return [report for report in asked if report is not None]


def asks_again(error: DanubeError, refused_ns: int, *, was_open: bool) -> bool:
    """Decide whether to repeat an OPEN_PRODUCER, SUBSCRIBE or HELLO that was refused for `refused_ns`
    so far. A limit answers a first open at once; one that reconnects may be counted twice for a while.
    So does a disk that fails, once the broker has had time to go on behind a single failed sync; an
    attachment that was open waits until the disk is mended."""
    if isinstance(error, Internal):
        return was_open or refused_ns < REPAIR_NS
    if isinstance(error, ResourceExhausted):
        return was_open and refused_ns < TAKEOVER_NS
    return isinstance(error, RETRYABLE)


def tell_wait(what: str, error: DanubeError, waited_ns: int, *, is_told: bool) -> bool:
    """Log why something is asked for again and again, once and not at once; whether that is told. A caller would else
    hear of it at the end of its time alone."""
    if is_told or waited_ns < WAIT_TOLD_NS:
        return is_told
    _log.warning("%s is asked for again and again: %s", what, error)
    return True


class OnLoss(enum.Enum):
    """The end of a request whose session was lost before the answer came."""

    REPEAT = 1
    """Asked again: asking twice does no harm."""
    FAIL = 2
    """Fails with Unavailable: it may have been carried out."""
    FORGET = 3
    """Ends without a word: the caller starts over with the new session, or wanted an end."""


class Call:
    """A request that awaits its one reply."""

    __slots__ = ("command", "done", "error", "on_done", "on_loss", "request", "value")

    def __init__(
        self,
        command: Any,
        on_loss: OnLoss = OnLoss.FAIL,
        on_done: Callable[[Call], None] | None = None,
    ) -> None:
        self.command = command
        self.request: int = command.request
        self.on_loss = on_loss
        self.on_done = on_done
        self.done = False
        self.value: Any = None
        self.error: DanubeError | None = None

    def finish(self, value: Any, error: DanubeError | None) -> None:
        """Note the outcome, once, and tell the caller."""
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        if self.on_done is not None:
            self.on_done(self)

    def result(self) -> Any:
        """Return the reply's value, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.value


def unknown_outcome(endpoint: str) -> Unavailable:
    """Return the error of a call whose answer was lost with its session."""
    return Unavailable(
        f"the connection to {endpoint} was lost before the answer came; look whether the operation "
        "took place before you repeat it"
    )
