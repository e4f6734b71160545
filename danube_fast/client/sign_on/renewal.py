r"""The sign-on of one client: a thread that signs its key on, and renews that before it ends.

    start --> sign on --> granted --2/3 of its time--> sign on again, the same key: sessions go on
                 ^            \--refused by the broker, which has forgotten it--> sign on anew
                 \--network, overload: backoff

Connections ask here whether they may connect, and tell when they are refused. The key pair lives as long as the client
does, in its memory alone. The thread sleeps on a condition, waits for no lock of the client while it signs on, and ends
with `stop`; at a fork it stays behind, as the client itself does.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection

from danube_fast.client.sign_on.bearer import Bearer
from danube_fast.client.sign_on.exchange import (
    Address,
    Exchange,
    Outlook,
    SignOnError,
)
from danube_fast.client.values.limits import (
    FOREVER_NS,
    KEY_SETTLE_NS,
    SIGN_ON_ANEW_MAX,
    SIGN_ON_ANEW_NS,
    SIGN_ON_BACKOFF_NEEDED_NS_MAX,
    SIGN_ON_BACKOFF_NS,
    SIGN_ON_BACKOFF_NS_MAX,
    SIGN_ON_JITTER,
    SIGN_ON_PAUSE_NS,
    SIGN_ON_RETRY_AFTER_NS_MAX,
)
from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from danube_fast.net.sign_on import Grant
from danube_fast.security.curve import KeyPair, new_key_pair

__all__ = ["SignOn"]

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 1.0
_RENEWED_AT = 2 / 3


def _nothing() -> None:
    """Do nothing, before `start` says what."""


class SignOn:
    """Keeps a client signed on. Any thread may call it."""

    def __init__(
        self, address: Address, bearer: Bearer, tls: str, clock: Clock, pinned: Collection[str] = ()
    ) -> None:
        """`pinned`: one of these must be among the broker's keys; none: what the first sign-on brings is pinned."""
        self.pair: KeyPair = new_key_pair()
        """This client's, drawn for it."""
        self.address = address
        self.failure: DanubeError | None = None
        """Why it has ended for good."""
        self.server_keys: tuple[str, ...] = ()
        """The broker's, as of the last sign-on."""
        self.generation = 0
        """How often it was signed on anew; 0: never yet."""
        self._bearer, self._pinned, self._clock = bearer, frozenset(pinned), clock
        self._exchange = Exchange(address, tls, clock)
        self._condition = threading.Condition()
        self._stopping = False
        self._is_wanted = True
        """Whether connections wait for a new one."""
        self._is_drawing = False
        """Whether the application is asked for its token."""
        self._due_ns = 0
        self._begun_ns = -SIGN_ON_PAUSE_NS
        """When the last attempt began."""
        self._granted_ns = 0
        """When the last answer came."""
        self._expires_ns = 0
        self._anew_ns: list[int] = []
        """When it was wanted anew lately."""
        self._principal = ""
        self._backoff_ns = SIGN_ON_BACKOFF_NS
        self._refusals = 0
        """One behind the other."""
        self._trouble: DanubeError | None = None
        self._on_change: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._run, name="danube-sign-on", daemon=True)

    # ------------------------------------------------------------ for the client

    def start(self, on_change: Callable[[], None]) -> None:
        """Sign on, and go on doing so; `on_change` is called in the thread when something came of it."""
        self._on_change = on_change
        self._thread.start()

    def stop(self) -> None:
        """End, and end what is under way. Without the client's lock."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._exchange.abort()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)  # the application's function may block for longer

    @property
    def is_ready(self) -> bool:
        """Whether connections may be made now."""
        return self.generation > 0 and not self._is_wanted

    @property
    def trouble(self) -> DanubeError | None:
        """Why the last attempt came to nothing; None if it did not."""
        return self.failure or self._trouble

    def late(self, seconds: float) -> DanubeError | None:
        """Return why there is no sign-on after so long; None if there is one."""
        if self.trouble is not None or self.is_ready:
            return self.trouble
        if self._is_drawing:
            return Unavailable(
                f"the function token= has returned nothing within {seconds:g} s; see what it waits for"
            )
        return Unavailable(
            f"{self.address} has not answered the sign-on within {seconds:g} s, and the broker is asked only then; check "
            "that it is the broker's sign-on port, and in the broker's log whether its authenticator answers"
        )

    def refused(
        self, generation: int, refusal: DanubeError, *, settles: bool
    ) -> DanubeError | None:
        """Note that the broker refuses the key that was signed on as that generation, with these words. `settles`: it may
        not have heard of that yet.

        None: ask again when `is_ready`. Otherwise why there is no hope.
        """
        now_ns = self._clock.monotonic_ns()
        with self._condition:
            if self.failure is not None:
                return self.failure
            is_settling = settles and now_ns - self._granted_ns < KEY_SETTLE_NS
            if self._is_wanted or generation != self.generation or is_settling:
                return None
            self._anew_ns = [each for each in self._anew_ns if now_ns - each < SIGN_ON_ANEW_NS]
            if len(self._anew_ns) >= SIGN_ON_ANEW_MAX:
                return type(refusal)(
                    f"{self.address} signs this client on, and yet: {refusal}; check that sign_on= belongs to this broker"
                )
            self._anew_ns.append(now_ns)
            self._is_wanted = True
            self._backoff_ns = SIGN_ON_BACKOFF_NS
            self._due_ns = self._begun_ns + SIGN_ON_PAUSE_NS
            self._condition.notify_all()
        return None

    def __repr__(self) -> str:
        return f"<SignOn at {self.address}>"

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while self._sleep():
            self._sign_on()
            if self._stopping:
                return
            self._on_change()
            if self.failure is not None:
                return

    def _sleep(self) -> bool:
        """Sleep until a sign-on is due; False: no more."""
        with self._condition:
            while not self._stopping:
                left_ns = self._due_ns - self._clock.monotonic_ns()
                if left_ns <= 0:
                    return True
                self._condition.wait(left_ns / 1e9)
        return False

    def _sign_on(self) -> None:
        """Do it once, and note what came of it and when the next one is due."""
        self._begun_ns = self._clock.monotonic_ns()
        try:
            self._is_drawing = True
            try:
                token = self._bearer.draw()
            except DanubeError as error:
                raise SignOnError(error, Outlook.LASTS) from None
            finally:
                self._is_drawing = False
            grant = self._exchange.perform(token, self.pair.public)
            self._check(grant)
        except SignOnError as failure:
            self._fail(failure)
        else:
            self._take(grant)

    def _check(self, grant: Grant) -> None:
        """Raise SignOnError for an answer that does not fit what is known."""
        if not self.generation and self._pinned and not self._pinned & set(grant.server_keys):
            error = PermissionDenied(
                f"{self.address} names other keys of the broker than server_key=, so one of them is not the broker's; "
                "compare them with the key that the broker shows"
            )
            raise SignOnError(error, Outlook.FINAL)
        if self._principal and grant.principal != self._principal:
            error = PermissionDenied(
                f"token= now stands for {grant.principal!a:.200}, and this client signed on as "
                f"{self._principal!a:.200}; connect another client with it"
            )
            raise SignOnError(error, Outlook.FINAL)

    def _take(self, grant: Grant) -> None:
        now_ns = self._clock.monotonic_ns()
        expires_ns = grant.expires_seconds * SECOND_NS
        with self._condition:
            self.server_keys = tuple(dict.fromkeys(grant.server_keys))
            self._principal = grant.principal
            self._expires_ns = self._begun_ns + expires_ns
            part = _RENEWED_AT * (1 - SIGN_ON_JITTER * random.random())
            self._due_ns = self._begun_ns + max(SIGN_ON_PAUSE_NS, int(part * expires_ns))
            self._granted_ns = now_ns
            self._backoff_ns = SIGN_ON_BACKOFF_NS
            self._trouble, self._refusals = None, 0
            if self._is_wanted:
                self._is_wanted = False
                self.generation += 1

    def _fail(self, failure: SignOnError) -> None:
        now_ns = self._clock.monotonic_ns()
        with self._condition:
            is_new = str(self._trouble) != str(failure.error)
            self._trouble = failure.error
            if not self._has_hope(failure.outlook, now_ns):
                self.failure = failure.error
                self._due_ns = FOREVER_NS
                return
            asked_ns = min(int(failure.retry_seconds * SECOND_NS), SIGN_ON_RETRY_AFTER_NS_MAX)
            wait_ns = max(asked_ns, int(self._backoff_ns * random.uniform(0.5, 1.0)))
            limit_ns = SIGN_ON_BACKOFF_NEEDED_NS_MAX if self._is_wanted else SIGN_ON_BACKOFF_NS_MAX
            self._backoff_ns = min(2 * self._backoff_ns, limit_ns)
            self._due_ns = now_ns + wait_ns
        if is_new and not self._stopping and self.generation:
            _log.warning("the sign-on is not renewed yet: %s", failure.error)

    def _has_hope(self, outlook: Outlook, now_ns: int) -> bool:
        """Whether to try again. A token that a function returned may have ended on its way, so that is drawn once more."""
        if outlook is Outlook.PASSES:
            return True
        if outlook is Outlook.LASTS:
            return now_ns < self._expires_ns
        self._refusals += 1
        return self._refusals == 1 and (outlook is Outlook.DISPUTED or self._bearer.is_function)
