"""Sessions: who is connected, under which identity, and when they were last heard. IO-free.

A session is opened by HELLO and lives until BYE or silence. A client that shows its token on another
connection replaces it: the old session is closed at once, so that what it held is free.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable
from typing import Any

from danube_fast.clock import MILLISECOND_NS, NEVER_NS
from danube_fast.config import Settings
from danube_fast.errors import ResourceExhausted

__all__ = ["ROUTED", "Session", "Sessions"]

IDLE_BEATS_MISSED_MAX = 3
"""A session without consumers is dropped after this many idle heartbeats of silence."""
TOKEN_BYTES = 16
ROUTED = b"\0"
"""First byte of the identities that ROUTER makes; those of rings begin otherwise."""


class Session:
    """One client connection as the broker sees it."""

    __slots__ = (
        "address", "client_name", "closed", "consumers", "flows", "identity", "last_seen_ns", "number",
        "outbox", "principal", "proof", "token",
    )  # fmt: skip

    def __init__(
        self, number: int, token: bytes, identity: bytes, client_name: str, principal: str
    ):
        self.number = number
        self.token = token
        self.identity = identity
        self.client_name = client_name
        self.principal = principal
        self.proof = ""
        """By which it was authenticated; see `Authenticator`."""
        self.address = ""
        """Where its client is, as the transport tells; empty: that is not known."""
        self.last_seen_ns = 0
        self.consumers: dict[int, Any] = {}
        self.flows: dict[int, Any] = {}
        self.outbox: list[list[Any]] = []
        """Messages that found the peer's queue full, oldest first."""
        self.closed = False


class Sessions:
    """All sessions of one endpoint."""

    def __init__(self, settings: Settings, new_token: Callable[[], bytes]) -> None:
        self._by_identity: dict[bytes, Session] = {}
        self.by_identity: Callable[[bytes], Session | None] = self._by_identity.get
        """Find the session of a connection."""
        self._by_number: dict[int, Session] = {}
        self.by_number: Callable[[int], Session | None] = self._by_number.get
        """Find the session with a number."""
        self._count_by_principal: Counter[str] = Counter()
        self._next_number = 1
        self._new_token = new_token
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over the number of sessions and their timeouts."""
        self._sessions_max = settings.sessions_max
        self._per_principal_max = settings.sessions_per_principal_max
        self._timeout_ns = settings.session_timeout_ms * MILLISECOND_NS
        idle_ns = settings.heartbeat_idle_ms * MILLISECOND_NS
        self._idle_timeout_ns = idle_ns * IDLE_BEATS_MISSED_MAX

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Any:
        return iter(list(self._by_number.values()))

    def knows(self, identity: bytes) -> bool:
        """Whether a connection has a session."""
        return identity in self._by_identity

    def heard_ns(self, identity: bytes) -> int | None:
        """When the session of a connection was last heard; None if it has none. Any thread may ask."""
        session = self._by_identity.get(identity)
        return None if session is None else session.last_seen_ns

    def resume(self, identity: bytes, number: int, token: bytes) -> tuple[Session | None, bool]:
        """The session that `number` and `token` name, and whether it goes on as it is.

        (session, True): same connection, nothing was lost. (session, False): it was on another
        connection; the caller closes it and opens a new one. (None, False): unknown.
        """
        session = self._by_number.get(number)
        if session is None or not hmac.compare_digest(session.token, token):
            return None, False
        return session, session.identity == identity

    def open(self, identity: bytes, client_name: str, principal: str, now_ns: int) -> Session:
        """A new session. Raises ResourceExhausted at `sessions_max`, and at `sessions_per_principal_max`."""
        if len(self._by_number) >= self._sessions_max:
            raise ResourceExhausted(
                f"{self._sessions_max} sessions are open; close some, or raise sessions_max"
            )
        most = self._per_principal_max
        if most and self._count_by_principal[principal] >= most:
            raise ResourceExhausted(
                f"{principal} has {most} sessions open with this process; close some, or ask an administrator to raise "
                "sessions_per_principal_max"
            )
        session = Session(self._next_number, self._new_token(), identity, client_name, principal)
        self._next_number += 1
        session.last_seen_ns = now_ns
        self._by_identity[identity] = session
        self._by_number[session.number] = session
        self._count_by_principal[principal] += 1
        return session

    def close(self, session: Session) -> None:
        """Forget a session."""
        session.closed = True
        if self._by_number.pop(session.number, None) is not None:
            self._count_by_principal[session.principal] -= 1
            if not self._count_by_principal[session.principal]:
                del self._count_by_principal[session.principal]
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]

    def next_silent_ns(self) -> int:
        """When the first of the sessions with consumers will have been silent for too long, if nothing more comes."""
        seen_ns = [each.last_seen_ns for each in self._by_number.values() if each.consumers]
        return min(seen_ns) + self._timeout_ns if seen_ns else NEVER_NS

    def silent(self, now_ns: int) -> list[Session]:
        """Sessions that were not heard for too long; the caller closes them."""
        dead = []
        for session in self._by_number.values():
            limit = self._timeout_ns if session.consumers else self._idle_timeout_ns
            if now_ns - session.last_seen_ns > limit:
                dead.append(session)
        return dead
