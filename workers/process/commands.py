"""Commands of clients: session, permission, handler, and one answer to any fault.

    HELLO    -> greeter -> WELCOME or ERROR
    a command -> session? -> permitted? -> its handler, which answers now or later
                   ^             '--not known yet: the command waits, others go on
                   '-----------------when it is known

Both kinds of processes that clients connect to use it; each part brings the handlers of its commands.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from danube_fast.errors import (
    DanubeError,
    Internal,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from danube_fast.net import protocol as p
from danube_fast.net.greeting import NO_SESSION_TEXT, Greeter
from danube_fast.net.session import Session, Sessions
from danube_fast.security.authorization import Authorizer
from danube_fast.types import Permission
from danube_fast.undecided import Undecided
from danube_fast.workers.process.denials import Denial, Denials

__all__ = ["OWN_SESSION", "Commands", "Handler"]

_log = logging.getLogger(__name__)

OWN_SESSION = "\0session"
"""Resource of commands that name only what the session opened before, which was authorized then."""

_ACTIONS: dict[type, str] = {
    p.OpenProducer: "open_producer",
    p.Subscribe: "subscribe",
    p.Lookup: "lookup",
    p.Watch: "watch",
}
"""Commands that are refused, as records of denials name them."""
PUT_OFF_MAX = 16_384
"""Commands that wait for answers about rights."""
PUT_OFF_RESERVED = 1024
"""Of these, room for administrators alone."""
PUT_OFF_OF_ONE_MAX = 4096
"""Of one principal; fewer if there is not so much room left for others."""
PUT_OFF_OF_SESSION_MAX = 2048
TRIES_MAX = 16
"""A command begins again with each right that it needs, and with those whose answers are too old by then."""
_ConsumerKey = tuple[int, int | None]
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
        self.more_needed: Callable[[Any], list[tuple[Permission, str]]] = lambda command: []
        """Rights that a command needs beside, as it names other topics."""
        self.refusal_of: Callable[[Session, Any, PermissionDenied], DanubeError] = (
            lambda session, command, error: error
        )
        """What a client is told that has no right."""
        self._put_off_by: Counter[int] = Counter()
        """Commands that wait for answers about rights, by the session's number."""
        self._put_off_of: Counter[str] = Counter()
        """The same by principal."""
        self._put_off_count = 0
        self.is_administrator: Callable[[str], bool] = lambda principal: False
        """Whether room is reserved for the commands of a principal."""
        self._opening: dict[_ConsumerKey, Undecided] = {}
        """What consumers wait for to be opened, by session and consumer."""
        self.denials: Denials | None = None
        """Told of each refusal; None: no one wants to know."""
        self.address_of: Callable[[bytes], str] = lambda identity: ""
        """Where the sender of the command at hand is; empty: that was told with an earlier one."""

    def handle(
        self, identity: bytes, command: p.ClientCommand, now_ns: int, proof: str = ""
    ) -> None:
        """Run one command of a connection, with what its transport proves if it has no session yet."""
        if isinstance(command, p.Hello):
            known = self._sessions.by_identity(identity)
            if known is not None and not proof:  # the transport tells it of strangers only
                proof = known.proof
            self._greet(identity, command, now_ns, proof)
            return
        request = getattr(command, "request", 0)
        session = self._sessions.by_identity(identity)
        if session is None:
            self._reply(identity, p.Error(request, p.Status.NO_SESSION, NO_SESSION_TEXT))
            return
        session.last_seen_ns = now_ns
        self._run_answered(session, command)

    def _run_answered(self, session: Session, command: Any, tries: int = 0) -> None:
        """Run a command that was put off so often, and answer what prevents it."""
        request, name = getattr(command, "request", 0), type(command).__name__
        try:
            if type(command) not in self.handlers:
                raise InvalidArgument(f"{name} is not served here: {self._unknown}")
            self.run(session, command, tries)
        except DanubeError as error:
            self._reply(session.identity, p.Error(request, error.code, str(error)))
        except Exception as error:  # one bad request must not end the others' sessions
            _log.exception("%s failed", name)
            text = f"{name} failed: {error!r}; see the broker's log"
            self._reply(session.identity, p.Error(request, Internal.code, text))

    def run(self, session: Session, command: Any, tries: int = 0) -> None:
        """Run a command that has a handler and was put off so often, if the session's principal may: now, or when that is
        known. Raises DanubeError."""
        if self._opening:  # CLOSE_CONSUMER does not overtake the SUBSCRIBE
            before = self._opening.get(_consumer_of(session, command))
            if before is not None:
                self._put_off(session, command, before, tries)
                return
        try:
            self._run(session, command)
        except Undecided as undecided:
            self._put_off(session, command, undecided, tries)
            if type(command) is p.Subscribe:
                self._opening[_consumer_of(session, command)] = undecided

    def _put_off(self, session: Session, command: Any, undecided: Undecided, tries: int) -> None:
        """Run a command again when a right is known that it needs. Raises Unavailable."""
        if tries >= TRIES_MAX:
            raise Unavailable("the authorizer takes too long for all that this needs; try again")
        number, principal = session.number, str(session.principal)
        consumer = _consumer_of(session, command)
        if not self._has_room(session):
            raise Unavailable(
                "too many commands wait for answers about rights just now; try again in a moment"
            )
        self._put_off_by[number] += 1
        self._put_off_of[principal] += 1
        self._put_off_count += 1

        def again() -> None:
            self._put_off_count -= 1
            _take_one(self._put_off_by, number)
            _take_one(self._put_off_of, principal)
            if self._opening.get(consumer) is undecided:
                del self._opening[consumer]
            if not session.closed:
                self._run_answered(session, command, tries + 1)

        undecided.then(again)

    def _has_room(self, session: Session) -> bool:
        """Whether one more command of a session may wait: no principal takes the room of all others."""
        if self._put_off_by[session.number] >= PUT_OFF_OF_SESSION_MAX:
            return False
        count, left = self._put_off_of[session.principal], PUT_OFF_MAX - self._put_off_count
        if count < min(left - PUT_OFF_RESERVED, PUT_OFF_OF_ONE_MAX):
            return True
        is_close = count < min(left, PUT_OFF_OF_ONE_MAX)
        return is_close and self.is_administrator(session.principal)

    def _run(self, session: Session, command: Any) -> None:
        permission = self.permissions.get(type(command))
        if permission is not None:
            self._authorize(session, permission, command)
        try:
            self.handlers[type(command)](session, command)
        except PermissionDenied:
            self._note(
                session,
                command,
                getattr(command, "topic", "") or self.resource_of(session, command),
            )
            raise

    def _greet(self, identity: bytes, command: p.Hello, now_ns: int, proof: str) -> None:
        known = self._sessions.by_identity(identity)
        address = self.address_of(identity) or (known.address if known is not None else "")
        try:
            answer: p.ServerCommand = self._greeter.greet(identity, command, now_ns, proof)
            session = self._sessions.by_identity(identity)
            if isinstance(answer, p.Welcome) and session is not None:
                session.address = address
            elif isinstance(answer, p.Error) and answer.code == PermissionDenied.code:
                self._note_hello(proof, address)
        except Exception as error:  # an Authenticator's, perhaps: the other sessions go on
            _log.exception("HELLO failed")
            text = f"HELLO failed: {error!r}; see the broker's log"
            answer = p.Error(command.request, Internal.code, text)
        self._reply(identity, answer)

    def _authorize(self, session: Session, permission: Permission, command: Any) -> None:
        resource = self.resource_of(session, command)
        try:
            self._authorizer.authorize(session.principal, permission, resource)
        except PermissionDenied as error:
            refusal = self.refusal_of(session, command, error)
            self._note(session, command, resource)
            raise refusal from None
        for also, other in self.more_needed(command):
            try:
                self._authorizer.authorize(session.principal, also, other)
            except PermissionDenied:
                self._note(session, command, other)
                raise

    def _note(self, session: Session, command: Any, resource: str) -> None:
        """Note that a command was refused."""
        if self.denials is None:
            return
        request = f"{session.number}.{getattr(command, 'request', 0)}"
        who = session.principal, session.proof, session.address
        action = _ACTIONS.get(type(command), type(command).__name__)
        self.denials.note(Denial(action, *who, resource.lstrip("\0"), request=request))

    def _note_hello(self, proof: str, address: str) -> None:
        """Note that no session was opened: what a connection proves names no one, or not any more."""
        if self.denials is not None:
            self.denials.note(Denial("hello", "", proof, address))


def _take_one(counts: Counter[Any], key: Any) -> None:
    """Count one less of a key, and forget it at 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _consumer_of(session: Session, command: Any) -> _ConsumerKey:
    """Name the consumer that a command is about."""
    return session.number, getattr(command, "consumer_id", None)
