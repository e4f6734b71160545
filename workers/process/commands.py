"""Commands of clients: session, permission, handler, and one answer to any fault.

    HELLO    -> greeter -> WELCOME or ERROR
    a command -> session? -> permitted? -> its handler, which answers now or later

Both kinds of processes that clients connect to use it; each part brings the handlers of its commands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from danube_fast.errors import DanubeError, Internal, InvalidArgument
from danube_fast.net import protocol as p
from danube_fast.net.greeting import NO_SESSION_TEXT, Greeter
from danube_fast.net.session import Session, Sessions
from danube_fast.security.authorization import Authorizer
from danube_fast.types import Permission

__all__ = ["OWN_SESSION", "Commands", "Handler"]

_log = logging.getLogger(__name__)

OWN_SESSION = "session"
"""Resource of commands that name only what the session opened before, which was authorized then."""

Handler = Callable[[Session, Any], None]


class Commands:
    """Run the commands of one process, by type."""

    def __init__(
        self, sessions: Sessions, greeter: Greeter, authorizer: Authorizer,
        reply: Callable[[bytes, p.ServerCommand], None], *, unknown: str,
    ) -> None:  # fmt: skip
        """`reply` answers a connection; `unknown` says where to send a command that has no handler."""
        self._sessions, self._greeter, self._authorizer = sessions, greeter, authorizer
        self._reply, self._unknown = reply, unknown
        self.handlers: dict[type, Handler] = {}
        self.permissions: dict[type, Permission] = {}
        """Permission that each command needs; handlers of the others authorize themselves."""
        self.resource_of: Callable[[Session, Any], str] = lambda session, command: OWN_SESSION

    def handle(self, identity: bytes, command: p.ClientCommand, now_ns: int) -> None:
        """Run one command of a connection."""
        if isinstance(command, p.Hello):
            self._reply(identity, self._greeter.greet(identity, command, now_ns))
            return
        request = getattr(command, "request", 0)
        session = self._sessions.by_identity(identity)
        if session is None:
            self._reply(identity, p.Error(request, p.Status.NO_SESSION, NO_SESSION_TEXT))
            return
        session.last_seen_ns = now_ns
        handler = self.handlers.get(type(command))
        try:
            if handler is None:
                name = type(command).__name__
                raise InvalidArgument(f"{name} is not served here: {self._unknown}")
            permission = self.permissions.get(type(command))
            if permission is not None:
                resource = self.resource_of(session, command)
                self._authorizer.authorize(session.principal, permission, resource)
            handler(session, command)
        except DanubeError as error:
            self._reply(identity, p.Error(request, error.code, str(error)))
        except Exception as error:  # one bad request must not end the others' sessions
            _log.exception("%s failed", type(command).__name__)
            text = f"{type(command).__name__} failed: {error!r}; see the broker's log"
            self._reply(identity, p.Error(request, Internal.code, text))
