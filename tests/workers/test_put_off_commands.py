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
from danube_fast.workers.process.commands import Commands

KINDS = p.OpenProducer, p.Subscribe


class Rig:
    """Commands of sessions 1 and 2, with an authorizer that answers when it is let."""

    def __init__(self) -> None:
        self.sessions = {
            number: SimpleNamespace(
                number=number, identity=b"%d" % number, principal="pia", closed=False, last_seen_ns=0,
                proof="", address="",
            )
            for number in (1, 2)
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


def test_the_end_of_a_session_ends_what_waits() -> None:
    rig = Rig()
    rig.send(p.OpenProducer(1, 7, "p"))
    rig.sessions[1].closed = True
    rig.answered()
    assert not rig.done and not rig.errors


def test_what_waits_is_bounded_for_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PUT_OFF_OF_ONE_MAX", 3)
    monkeypatch.setattr(commands, "PUT_OFF_MAX", 5)
    rig = Rig()
    for session in (1, 2):
        for number in range(4):
            rig.send(p.OpenProducer(number, 7, "p"), session)
    assert [error.request for error in rig.errors] == [3, 2, 3]
    assert {error.code for error in rig.errors} == {Unavailable.code}
    rig.answered()
    assert len(rig.done) == 5
    rig.answer = Undecided("being asked", rig.waiting.append)
    rig.send(p.OpenProducer(8, 7, "p"))
    assert len(rig.errors) == 3 and len(rig.waiting) == 1, "those that were answered count no more"
