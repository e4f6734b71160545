"""The authenticator of another package, asked in threads, each question within a time.

    secret --loop--> a free thread --authenticate()--> answer --loop--> Verified
                       '--no answer in time: the client is told to try again, and the thread is not free until it ends

Threads cannot be ended, so those that hang stay, up to a number; API keys and tokens need none of them. Only its refusal says
that a secret is wrong: a fault lets no client in either, and tells it to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import traceback
from typing import NamedTuple

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.errors import Internal, PermissionDenied, Unavailable
from danube_fast.security.authenticators import (
    AUTHENTICATORS,
    AuthenticatorRules,
    SecretAuthenticator,
)
from danube_fast.security.entry_points import FaultLog
from danube_fast.security.tokens import Verified

__all__ = ["AskedAuthenticator", "load_authenticator"]

_log = logging.getLogger(__name__)

THREADS_MAX = 32
"""Questions at one time; more of them wait."""
ANSWER_SECONDS = 5.0
"""For a thread to be free, and for the answer. A client has given up soon after."""


class _Outcome(NamedTuple):
    found: object
    error: BaseException | None


class AskedAuthenticator:
    """Ask the authenticator of another package. Used by the event loop."""

    def __init__(self, rules: AuthenticatorRules, inner: SecretAuthenticator, clock: Clock) -> None:
        self._rules, self._inner, self._clock = rules, inner, clock
        self._free = asyncio.Semaphore(THREADS_MAX)
        self._faults = FaultLog(_log, clock)
        self._running = 0

    async def verify(self, secret: str, address: str) -> Verified:
        """Return what it vouches for. Raises PermissionDenied with the reason, Unavailable if it does not decide."""
        if not secret or not secret.isascii() or not secret.isprintable():
            # an empty password is taken by some directories for no password at all
            raise PermissionDenied("malformed: it is no printable text")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found, error = await self._ask(secret, address)
        except TimeoutError:
            raise self._undecided(
                f"has not answered within {ANSWER_SECONDS:g} s; {self._running} of {THREADS_MAX} threads are at it"
            ) from None
        except RuntimeError as fault:  # no thread can be made
            raise self._undecided(f"cannot be asked: {fault}") from None
        if isinstance(error, PermissionDenied):
            raise self._rules.wrong(str(error).replace(secret, "...")) from None
        if error is not None:
            # without the error's text, which may have the secret in it
            raise self._undecided(f"failed: {type(error).__name__} {_place(error)}") from None
        try:
            return self._rules.verified(found, self._clock.wall_ns())
        except Internal as fault:
            raise self._undecided(f"failed: {fault}") from None

    def _undecided(self, what: str) -> Unavailable:
        self._faults.warn("the authenticator %s %s", self._rules.name, what)
        return Unavailable("it cannot be decided just now who you are; try again")

    async def _ask(self, secret: str, address: str) -> _Outcome:
        """Raises RuntimeError if there is no thread."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Outcome] = loop.create_future()

        def end(outcome: _Outcome) -> None:
            self._running -= 1
            self._free.release()
            if not answer.done():  # it came in time
                answer.set_result(outcome)

        def run() -> None:
            try:
                outcome = _Outcome(self._inner.authenticate(secret, address), None)
            except BaseException as error:  # a foreign package may raise SystemExit
                outcome = _Outcome(None, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the process does
                loop.call_soon_threadsafe(end, outcome)

        thread = threading.Thread(target=run, name="authenticator", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._free.release()
            raise
        self._running += 1
        return await answer


def load_authenticator(settings: Settings, clock: Clock) -> AskedAuthenticator | None:
    """Load the authenticator that the settings name; None if they name none. Raises InvalidArgument if it cannot be
    loaded."""
    if not settings.authenticator:
        return None
    name = settings.authenticator.partition(":")[0]
    rules = AuthenticatorRules(
        name, settings.authenticator_prefix, settings.authenticator_unregistered
    )
    return AskedAuthenticator(rules, AUTHENTICATORS.load(settings.authenticator), clock)


def _place(error: BaseException) -> str:
    """Where in the code an error was raised."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    file, line = places[-1]
    return f"at {os.path.basename(file)}:{line}"
