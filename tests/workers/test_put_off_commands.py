"""Commands that wait for an answer about a right: in their order where it matters, within bounds, for sessions that live."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.net import protocol as p
from danube_fast.types import Permission
from danube_fast.undecided import Undecided
from danube_fast.workers.process import commands
from danube_fast.workers.process.commands import (
    PUT_OFF_MAX,
    PUT_OFF_OF_ONE_MAX,
    PUT_OFF_OF_SESSION_MAX,
    PUT_OFF_RESERVED,
    Commands,
)

KINDS = p.OpenProducer, p.Subscribe


class Rig:
    """Commands of sessions 1, 2, ... of these principals, with an authorizer that answers when it is let."""

    def __init__(self, *principals: str) -> None:
        self.sessions = {
            number: SimpleNamespace(
                number=number, identity=b"%d" % number, principal=principal, closed=False, last_seen_ns=0,
                proof="", address="",
            )
            for number, principal in enumerate(principals or ("pia", "pia"), 1)
        }  # fmt: skip
        by_identity: Any = SimpleNamespace(
            by_identity=lambda identity: self.sessions.get(int(identity))
        )
        self.waiting: list[Callable[[], None]] = []
        self.answer: Exception | None = Undecided("being asked", self.waiting.append)
        self.done: list[Any] = []
        self.errors: list[Any] = []
        authorizer: Any = SimpleNamespace(authorize=self._authorize)
        greeter: Any = None
        made = self.commands = Commands(
            by_identity, greeter, authorizer, lambda _, error: self.errors.append(error), unknown=""
        )
        made.permissions = dict.fromkeys(KINDS, Permission.PRODUCE)
        kinds = (*KINDS, p.CloseConsumer, p.Ping)
        made.handlers |= dict.fromkeys(kinds, lambda session, command: self.done.append(command))

    def _authorize(self, principal: str, permission: Permission, resource: str) -> None:
        if isinstance(self.answer, Undecided):
            raise Undecided("being asked", self.waiting.append)
        if self.answer is not None:
            raise self.answer

    def send(self, command: Any, session: int = 1) -> None:
        self.commands.handle(b"%d" % session, command, 0)

    def answered(self, answer: Exception | None = None) -> None:
        """Let what waits begin again."""
        self.answer = answer
        waiting, self.waiting[:] = list(self.waiting), []
        for step in waiting:
            step()

    def flood(self, session: int, count: int = PUT_OFF_OF_SESSION_MAX + 1) -> int:
        """Send so many commands that have to wait; how many of them were refused."""
        before = len(self.errors)
        for number in range(count):
            self.send(p.OpenProducer(number, 7, "p"), session)
        assert {error.code for error in self.errors} <= {Unavailable.code}
        return len(self.errors) - before


def subscribe(request: int, consumer: int) -> p.Subscribe:
    return p.Subscribe(request, consumer, 1, 7, "s", "shared")


def test_others_overtake_a_command_that_waits_and_none_of_its_consumer_does() -> None:
    rig = Rig()
    first, close = subscribe(1, 5), p.CloseConsumer(2, 5)
    other, ping = p.CloseConsumer(3, 6), p.Ping(4)
    for command in (first, close, other, ping):
        rig.send(command)
    elsewhere = p.CloseConsumer(5, 5)
    rig.send(elsewhere, session=2)
    assert rig.done == [other, ping, elsewhere] and not rig.errors
    rig.answered(rig.answer)  # one more right is not known
    assert rig.done == [other, ping, elsewhere] and len(rig.waiting) == 2
    rig.answered()
    assert rig.done[3:] == [first, close]
    again = p.CloseConsumer(6, 5)
    rig.send(again)
    assert rig.done[-1] is again, "nothing of the consumer waits any more"


def test_a_refusal_answers_the_command_that_has_waited() -> None:
    rig = Rig()
    rig.send(p.OpenProducer(9, 7, "p"))
    rig.answered(PermissionDenied("no"))
    (error,) = rig.errors
    assert (error.request, error.code, rig.done) == (9, PermissionDenied.code, [])


def test_a_command_that_needs_ever_more_rights_ends() -> None:
    """Answers count for a while: of several that come slowly the first is too old when the last is there."""
    rig = Rig()
    rig.send(p.OpenProducer(9, 7, "p"))
    for _ in range(commands.TRIES_MAX):
        assert len(rig.waiting) == 1 and not rig.errors
        rig.answered(rig.answer)
    (error,) = rig.errors
    assert error.code == Unavailable.code and "takes too long" in error.text and not rig.waiting


def test_the_end_of_a_session_ends_what_waits() -> None:
    rig = Rig()
    rig.send(p.OpenProducer(1, 7, "p"))
    rig.sessions[1].closed = True
    rig.answered()
    assert not rig.done and not rig.errors


def test_what_waits_is_bounded_for_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PUT_OFF_OF_SESSION_MAX", 3)
    monkeypatch.setattr(commands, "PUT_OFF_OF_ONE_MAX", 5)
    rig = Rig()
    assert (rig.flood(1, 4), rig.flood(2, 4)) == (1, 2)
    assert [error.request for error in rig.errors] == [3, 2, 3]
    rig.answered()
    assert len(rig.done) == 5
    rig.answer = Undecided("being asked", rig.waiting.append)
    rig.send(p.OpenProducer(8, 7, "p"))
    assert len(rig.errors) == 3 and len(rig.waiting) == 1, "those that were answered count no more"


def test_eight_sessions_of_one_principal_leave_room_for_others() -> None:
    rig = Rig(*["eve"] * 8, "pia")
    for session in range(1, 9):
        rig.flood(session)
    assert len(rig.waiting) == PUT_OFF_OF_ONE_MAX
    assert rig.flood(9, PUT_OFF_OF_SESSION_MAX) == 0
    rig.answered()
    assert not rig.commands._put_off_of and not rig.commands._put_off_by
    assert len(rig.done) == PUT_OFF_OF_ONE_MAX + PUT_OFF_OF_SESSION_MAX


def test_whatever_many_principals_send_administrators_keep_a_share() -> None:
    names = [f"eve{number}" for number in range(30) for _ in range(2)]
    rig = Rig(*names, "ann", "uma", "pia")
    rig.commands.is_administrator = lambda principal: principal in ("ann", "uma")
    for session in range(1, len(names) + 1):
        rig.flood(session)
    assert len(rig.waiting) == PUT_OFF_MAX - PUT_OFF_RESERVED
    ann, uma, pia = range(len(names) + 1, len(names) + 4)
    assert rig.flood(pia, 1) == 1, "there is no room left but that of administrators"
    rig.flood(ann)
    assert rig.flood(uma, PUT_OFF_RESERVED // 4) == 0, "nor does one of them take all of it"
