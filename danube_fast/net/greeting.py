"""HELLO on either endpoint: version check, resuming or opening a session, the limits in WELCOME."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from danube_fast.config import Settings
from danube_fast.errors import DanubeError, FailedPrecondition
from danube_fast.frame.bundle import bundle_bytes
from danube_fast.frame.layout import FRAME_BYTES_CAP, message_frame_bytes_max
from danube_fast.net import protocol
from danube_fast.net.session import Session, Sessions
from danube_fast.version import VERSION

__all__ = ["NO_SESSION_TEXT", "Greeter", "bundle_bytes_max", "message_bytes_max"]

NAME_CHARACTERS_MAX = 256
NO_SESSION_TEXT = "this connection has no session here (any more); send HELLO"


def message_bytes_max(settings: Settings) -> int:
    """Largest message that is taken: its frame has to fit a log segment with room to spare."""
    return min(settings.message_bytes_max, settings.segment_bytes // 2)


def bundle_bytes_max(settings: Settings) -> int:
    """Largest PUBLISH that is taken: the largest message in its frame, alone."""
    return bundle_bytes([message_frame_bytes_max(message_bytes_max(settings))])


class Greeter:
    """Answers HELLO for one endpoint."""

    def __init__(
        self,
        sessions: Sessions,
        settings: Settings,
        host_id: str,
        authenticate: Callable[[Mapping[str, Any], str], str],
        replace_session: Callable[[Session], None],
    ) -> None:
        """`authenticate` makes a principal of the claims in HELLO and of what the transport proves, or raises
        PermissionDenied;
        `replace_session` ends a session whose client goes on with another."""
        self._sessions = sessions
        self._host_id = host_id
        self._authenticate = authenticate
        self._replace_session = replace_session
        size = message_bytes_max(settings)
        self.limits: dict[str, int] = {
            "heartbeat_ms": settings.heartbeat_ms,
            "heartbeat_idle_ms": settings.heartbeat_idle_ms,
            "session_timeout_ms": settings.session_timeout_ms,
            "frame_bytes_max": min(FRAME_BYTES_CAP, size),
            "message_bytes_max": size,
            "bundle_bytes_max": bundle_bytes_max(settings),
        }
        """What WELCOME tells."""

    def greet(
        self, identity: bytes, command: protocol.Hello, now_ns: int, proof: str = ""
    ) -> protocol.Welcome | protocol.Error:
        """Open or resume the session of a connection; returns the answer. A session is resumed by its own principal
        only."""
        if command.protocol_version != protocol.PROTOCOL_VERSION:
            text = (
                f"this broker speaks protocol version {protocol.PROTOCOL_VERSION}, the client "
                f"{command.protocol_version}; use a client of the broker's version"
            )
            return protocol.Error(command.request, FailedPrecondition.code, text)
        try:
            principal = self._authenticate(command.auth, proof)
            session, goes_on = self._sessions.resume(identity, command.session, command.token)
            if session is not None and session.principal != principal:
                session, goes_on = None, False
            # rights of groups come with the proof
            goes_on = goes_on and session is not None and session.proof == proof
            if session is None or not goes_on:
                for old in (session, self._sessions.by_identity(identity)):
                    if old is not None:
                        self._replace_session(old)
                name = command.client_name[:NAME_CHARACTERS_MAX]
                session = self._sessions.open(identity, name, principal, now_ns)
        except DanubeError as error:
            return protocol.Error(command.request, error.code, str(error))
        session.last_seen_ns, session.proof = now_ns, proof
        return protocol.Welcome(
            request=command.request,
            session=session.number,
            token=session.token,
            protocol_version=protocol.PROTOCOL_VERSION,
            server_version=VERSION,
            host_id=self._host_id,
            resumed=goes_on,
            limits=self.limits,
        )
