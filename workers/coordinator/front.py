"""The coordinator's side of client connections: sessions, replies, what a full queue holds back.

HELLO, PING and BYE are answered here; LOOKUP and ADMIN go to the coordinator. A session here holds
nothing but requests that wait, so it lives as long as idle heartbeats come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from danube_fast.config import Settings
from danube_fast.errors import (
    DanubeError,
    Internal,
    InvalidArgument,
)
from danube_fast.net import protocol
from danube_fast.net.greeting import NO_SESSION_TEXT, Greeter
from danube_fast.net.server import PeerGone, WouldBlock
from danube_fast.net.session import Session, Sessions
from danube_fast.workers.process.outside import Outside

__all__ = ["Front"]

_log = logging.getLogger(__name__)

MESSAGES_PER_TURN_MAX = 256
OUTBOX_MESSAGES_MAX = 10_000
"""Replies that wait for one peer's full queue; a peer that takes none is dropped beyond."""
SWEEP_NS = 500_000_000

Handler = Callable[[Session, Any], None]


class Front:
    """One ROUTER and its sessions. Used by the coordinator's loop only."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Settings,
        host_id: str,
        handlers: dict[type, Handler],
        outside: Outside | None = None,
    ) -> None:
        outside = outside or Outside()
        self._handlers = handlers
        self.server = outside.make_server(context, settings)
        self.sessions = Sessions(
            sessions_max=settings.sessions_max,
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_idle_ms=settings.heartbeat_idle_ms,
            new_token=outside.new_token,
        )
        self._greeter = Greeter(self.sessions, settings, host_id, self._close)
        self._waiting: dict[Session, None] = {}
        self._now_ns = 0
        self._swept_ns = 0

    @property
    def is_waiting(self) -> bool:
        """Whether replies wait for room in some peer's queue."""
        return bool(self._waiting)

    def do_work(self, now_ns: int) -> int:
        """Take what clients sent, retry what waits, drop the silent; the number of messages taken."""
        self._now_ns = now_ns
        taken = 0
        for identity, head, _ in self.server.receive(MESSAGES_PER_TURN_MAX):
            taken += 1
            self._receive(identity, head)
        for session in list(self._waiting):
            self._flush(session)
        if now_ns - self._swept_ns > SWEEP_NS:
            self._swept_ns = now_ns
            for session in self.sessions.silent(now_ns):
                self._close(session)
            self.server.mind_descriptors()
        return taken

    def reply(self, number: int, command: protocol.ServerCommand) -> None:
        """Send to a session, by number; nothing happens if it is gone."""
        session = self.sessions.by_number(number)
        if session is None:
            return
        if len(session.outbox) >= OUTBOX_MESSAGES_MAX:
            self._close(session)
            return
        session.outbox.append([protocol.encode(command)])
        self._flush(session)

    def close(self) -> None:
        """Close the socket."""
        self.server.close()

    # ---------------------------------------------------------------- inside

    def _receive(self, identity: bytes, head: memoryview) -> None:
        try:
            command = protocol.decode_client_command(head)
        except msgspec.MsgspecError as error:
            text = f"not a command: {error}; see docs/protocol.md"
            self._send_raw(identity, protocol.Error(0, InvalidArgument.code, text))
            return
        if isinstance(command, protocol.Hello):
            self._hello(identity, command)
            return
        request = getattr(command, "request", 0)
        session = self.sessions.by_identity(identity)
        if session is None:
            code = protocol.Status.NO_SESSION
            self._send_raw(identity, protocol.Error(request, code, NO_SESSION_TEXT))
            return
        session.last_seen_ns = self._now_ns
        try:
            self._handle(session, command)
        except DanubeError as error:
            self.reply(session.number, protocol.Error(request, error.code, str(error)))
        except Exception as error:  # one bad request must not end the others' sessions
            _log.exception("%s failed", type(command).__name__)
            text = f"{type(command).__name__} failed: {error!r}; see the coordinator's log"
            self.reply(session.number, protocol.Error(request, Internal.code, text))

    def _handle(self, session: Session, command: protocol.ClientCommand) -> None:
        if isinstance(command, protocol.Ping):
            self.reply(session.number, protocol.Pong(command.request))
        elif isinstance(command, protocol.Bye):
            self.reply(session.number, protocol.Result(command.request))
            self._close(session)
        else:
            handler = self._handlers.get(type(command))
            if handler is None:
                raise InvalidArgument(
                    f"{type(command).__name__} is for a worker, this is the bootstrap endpoint; "
                    "look the topic up first"
                )
            handler(session, command)

    def _hello(self, identity: bytes, command: protocol.Hello) -> None:
        answer = self._greeter.greet(identity, command, self._now_ns)
        if isinstance(answer, protocol.Welcome):
            self.reply(answer.session, answer)
        else:
            self._send_raw(identity, answer)

    def _send_raw(self, identity: bytes, command: protocol.ServerCommand) -> None:
        """To a connection without a session; it asks again if the answer is lost."""
        try:
            self.server.send(identity, [protocol.encode(command)])
        except (PeerGone, WouldBlock):
            return

    def _flush(self, session: Session) -> None:
        try:
            while session.outbox:
                self.server.send(session.identity, session.outbox[0])
                session.outbox.pop(0)
        except WouldBlock:
            self._waiting[session] = None
            return
        except PeerGone:
            self._close(session)
        self._waiting.pop(session, None)

    def _close(self, session: Session) -> None:
        session.outbox.clear()
        self._waiting.pop(session, None)
        self.sessions.close(session)
