"""The authenticator of another package, asked in threads, each question within a time.

    secret --loop--> a free thread --authenticate()--> answer --loop--> Verified
                       '--no answer in time: the client is told to try again, and the thread is not free until it ends

Threads cannot be ended, so those that hang stay, and others take their place, up to a number; API keys and tokens need none of
them. Only its refusal says that a secret is wrong: a fault lets no client in either, and tells it to try again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.errors import Internal, PermissionDenied, Unavailable
from danube_fast.security.authenticators import (
    AUTHENTICATORS,
    AuthenticatorRules,
    SecretAuthenticator,
)
from danube_fast.security.entry_points import FaultLog, said
from danube_fast.security.question_threads import (
    ANSWER_SECONDS,
    REPLACED_MAX,
    THREADS_MAX,
    THREADS_OF_ONE_MAX,
    QuestionThreads,
    Spare,
)
from danube_fast.security.tokens import Verified

__all__ = ["AskedAuthenticator", "load_authenticator"]

_log = logging.getLogger(__name__)


class AskedAuthenticator:
    """Ask the authenticator of another package. Used by the event loop."""

    def __init__(self, rules: AuthenticatorRules, inner: SecretAuthenticator, clock: Clock) -> None:
        self._rules, self._inner, self._clock = rules, inner, clock
        # an address may have many users, so it begins with all threads that one may have
        spare = Spare(clock, 0, REPLACED_MAX, THREADS_OF_ONE_MAX)
        self._threads = QuestionThreads("authenticator", THREADS_MAX, THREADS_OF_ONE_MAX, spare)
        self._faults = FaultLog(_log, clock)

    @property
    def threads_lost(self) -> int:
        """Threads whose secret has no answer in time."""
        return self._threads.lost

    def do_work(self) -> None:
        """Replace threads that are lost; to be called again and again."""
        self._threads.replace_lost()

    async def verify(self, secret: str, address: str) -> Verified:
        """Return what it vouches for. Raises PermissionDenied with the reason, Unavailable if it does not decide."""
        if not secret or not secret.isascii() or not secret.isprintable():
            # an empty password is taken by some directories for no password at all
            raise PermissionDenied("malformed: it is no printable text")
        if self._threads.is_held_up(address):
            raise self._undecided(
                f"does not answer {THREADS_OF_ONE_MAX} secrets of {address}, and is asked no other: {self._threads.at_it}"
            )
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                asked = self._threads.ask(
                    lambda: self._inner.authenticate(secret, address), address
                )
                answer = await asyncio.wrap_future(asked)
        except TimeoutError:
            self._threads.replace_lost()
            what = f"has not answered within {ANSWER_SECONDS:g} s: {self._threads.at_it}"
            raise self._undecided(what) from None
        except RuntimeError as fault:  # no thread can be made
            raise self._undecided(f"cannot be asked: {fault}") from None
        error = answer.error
        if isinstance(error, PermissionDenied):
            reason = said(error, lambda error: str(error).replace(secret, "..."))
            raise self._rules.wrong(reason) from None
        if error is not None:
            # without the error's text, which may have the secret in it
            raise self._undecided(f"failed: {type(error).__name__} {_place(error)}") from None
        try:
            return self._rules.verified(answer.found, self._clock.wall_ns())
        except Internal as fault:
            raise self._undecided(f"failed: {fault}") from None

    def _undecided(self, what: str) -> Unavailable:
        self._faults.warn("the authenticator %s %s", self._rules.name, what)
        return Unavailable(
            "the authenticator of this broker does not decide just now who you are; try again, or see the broker's log"
        )


def load_authenticator(settings: Settings, clock: Clock) -> AskedAuthenticator | None:
    """Load the authenticator that the settings name; None if they name none. Raises InvalidArgument if it cannot be
    loaded, Unavailable if that takes too long."""
    if not settings.authenticator:
        return None
    name = settings.authenticator.partition(":")[0]
    rules = AuthenticatorRules(
        name, settings.authenticator_prefix, settings.authenticator_unregistered
    )
    made = AUTHENTICATORS.load(settings.authenticator, settings.worker_start_timeout_ms)
    return AskedAuthenticator(rules, made, clock)


def _place(error: BaseException) -> str:
    """Where in the code an error was raised."""
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    file, line = places[-1]
    return f"at {os.path.basename(file)}:{line}"
