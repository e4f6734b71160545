"""The coordinator's side of client connections: sessions, replies, and those that wait for room in a queue.

HELLO, PING and BYE are answered here; the parts of the coordinator bring the handlers of the other commands. A
session here has nothing but requests that wait, so it lives as long as idle heartbeats come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from danube_fast.config import Settings
from danube_fast.errors import InvalidArgument
from danube_fast.net import protocol
from danube_fast.net.greeting import Greeter
from danube_fast.net.server import PeerGone, WouldBlock
from danube_fast.net.session import Session, Sessions
from danube_fast.security.records import BOOTSTRAP
from danube_fast.workers.process.commands import Commands
from danube_fast.workers.process.denials import Closings, is_audited
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.secure_transport import SecureTransport

__all__ = ["Connections"]

MESSAGES_PER_TURN_MAX = 256
OUTBOX_MESSAGES_MAX = 10_000
"""Replies that wait for one peer's full queue; a peer that takes none is dropped beyond."""
SWEEP_NS = 500_000_000


class Connections:
    """Serve clients on one ROUTER. Used by the coordinator's loop only."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], settings: Settings, host_id: str,
        environment: Environment, secured: SecureTransport | None = None,
    ) -> None:  # fmt: skip
        """`secured`: what proves who connects; None: no client is asked."""
        self._access = None if secured is None else secured.access
        self.server = environment.make_server(context, settings, secured)
        self.sessions = Sessions(settings, environment.new_token)
        self.server.introduces |= is_audited(settings)
        self.drained_ns = 0
        """All that had come by then was taken."""
        self.on_entry: Callable[[str, str], None] = lambda principal, proof: None
        """Told of each client that comes in: principal, proof."""
        authenticate = (self._access or environment.authenticator).authenticate
        self.commands = Commands(
            self.sessions,
            Greeter(self.sessions, settings, host_id, authenticate, self._close),
            self._access or environment.authorizer,
            self._answer,
            unknown="this is the bootstrap endpoint; look the topic up, and ask its worker",
        )
        self.commands.denials = None if secured is None else secured.denials
        if self._access is not None:
            self.commands.is_administrator = self._access.rules
        self._closings = None if secured is None else Closings(secured.denials)
        self.commands.address_of = lambda identity: self.server.address
        self.commands.handlers |= {protocol.Ping: self._ping, protocol.Bye: self._bye}
        self._waiting: dict[Session, None] = {}
        self._swept_ns = 0

    @property
    def is_waiting(self) -> bool:
        """Whether replies wait for room in some peer's queue."""
        return bool(self._waiting)

    def do_work(self, now_ns: int) -> int:
        """Take messages of clients, retry replies that wait, drop silent sessions; the number of messages taken."""
        taken = 0
        for identity, head, _ in self.server.receive(MESSAGES_PER_TURN_MAX):
            taken += 1
            self._receive(identity, head, now_ns)
        if self.server.drained:
            self.drained_ns = now_ns
        for session in list(self._waiting):
            self._flush(session)
        if now_ns - self._swept_ns > SWEEP_NS:
            self._swept_ns = now_ns
            for session in self.sessions.silent(now_ns):
                self._close(session)
            self._close_revoked()
            self.server.mind_descriptors()
        return taken

    def _close_revoked(self) -> None:
        """Close sessions whose principal is not any more what their proof names."""
        access, closings = self._access, self._closings
        if access is None or closings is None:
            return
        for session in self.sessions:
            # the key that a broker begins with has ended, its session lasts
            if (
                session.principal != BOOTSTRAP
                and access.principal_of(session.proof) != session.principal
            ):
                closings.note(session, "session")
                self._close(session)
        closings.tell()

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

    def _receive(self, identity: bytes, head: memoryview, now_ns: int) -> None:
        try:
            command = protocol.decode_client_command(head)
        except msgspec.MsgspecError as error:
            text = f"not a command: {error}; see docs/protocol.md"
            self._answer(identity, protocol.Error(0, InvalidArgument.code, text))
            return
        self.commands.handle(identity, command, now_ns, self.server.proof)
        if type(command) is protocol.Hello:
            session = self.sessions.by_identity(identity)
            if session is not None:
                self.on_entry(session.principal, session.proof)

    def _ping(self, session: Session, command: protocol.Ping) -> None:
        self.reply(session.number, protocol.Pong(command.request))

    def _bye(self, session: Session, command: protocol.Bye) -> None:
        self.reply(session.number, protocol.Result(command.request))
        self._close(session)

    def _answer(self, identity: bytes, command: Any) -> None:
        """Answer a connection; a client without a session asks again if the answer is lost."""
        session = self.sessions.by_identity(identity)
        if session is not None:
            self.reply(session.number, command)
            return
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
