"""Authorizers that hang: what they hold up, and for whom; and what the errors of a component may say."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from danube_fast.net import protocol as p
from danube_fast.security.authorizers import (
    ANSWER_NS,
    FAULT_NS,
    LOST_OF_ONE_MAX,
    RESERVED,
    AskedAuthorizer,
)
from danube_fast.security.entry_points import SAID_CHARACTERS_MAX, said
from danube_fast.security.question_threads import (
    AGAIN_NS,
    ANSWER_SECONDS,
    REPLACED_MAX,
    THREADS_MAX,
    THREADS_OF_ONE_MAX,
    QuestionThreads,
    Spare,
)
from danube_fast.security.records import Binding, Principal
from danube_fast.types import CLUSTER, Permission
from danube_fast.undecided import when_decided
from tests.security.authorizer_rig import Gate, Loop, Moved, loop_with, opened_gate

P = Permission
USERS = 10
QUESTIONS = 400
OTHERS = (
    ("ann", P.MANAGE_CLUSTER, CLUSTER),  # lists users, and disables one
    ("ann", P.LOOKUP, "/shop/orders"),
    ("pia", P.PRODUCE, "/shop/orders"),
)
LATE_NS = int(ANSWER_SECONDS * SECOND_NS)


class HangsForMost(Gate):
    """Answers at once about some users, and about the others when it is let."""

    well = "pia", "ann"

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        if principal not in self.well:
            super().authorize(principal, permission, resource)


class Flooded:
    """A process that many users ask much; `hung` are their ends so far."""

    def __init__(self, gate: Gate, clock: Moved) -> None:
        self.clock, self.asked = clock, AskedAuthorizer("gate", gate, clock)
        self.loop: Loop = loop_with(self.asked)
        self.hung: list[DanubeError] = []

    def flood(self, user: str, count: int = QUESTIONS) -> None:
        policy, access = self.loop.access.policy, self.loop.access
        policy.put(Principal(user))
        policy.put(Binding(f"{user}-shop", f"user:{user}", "admin", "namespace:shop"))
        for number in range(count):
            topic = f"/shop/{user}{number}"
            when_decided(
                lambda topic=topic: access.authorize(user, P.PRODUCE, topic), self.hung.append
            )

    def later(self, ns: int = LATE_NS) -> None:
        """Put the clock forward, and let the process see it."""
        self.clock.moved_ns += ns
        self.loop.access.confirm()
        self.loop.turn()

    def check_others(self, what: str) -> None:
        """Ask as an administrator and as a user, when answers of before count no more."""
        self.later(ANSWER_NS + SECOND_NS)
        for user, permission, resource in OTHERS:
            found = self.loop.outcome(user, permission, resource)
            assert found is None, f"{what}: {user} is told {found}"


def test_ten_users_whose_questions_hang_hold_up_no_other() -> None:
    with opened_gate(HangsForMost()) as gate:
        flooded = Flooded(gate, Moved())
        for number in range(USERS):
            flooded.flood(f"u{number}")
        taken = USERS * LOST_OF_ONE_MAX
        flooded.loop.until("questions that hang", lambda: len(gate.asked) == taken)
        access = flooded.loop.access
        for user, permission, resource in OTHERS:
            assert flooded.loop.outcome(user, permission, resource) is None, "before they are late"
        assert not [each for each in flooded.hung if "has not answered" in str(each)]
        flooded.check_others("when they are late")
        for number in range(USERS):
            flooded.flood(f"u{number}")
        assert len(gate.asked) == taken, "more is asked about users whose questions hang"
        assert "is asked no other" in str(flooded.hung[-1])
        for turn in range(3):
            for number in range(USERS):
                flooded.flood(f"other{turn}-{number}")
            flooded.check_others(f"turn {turn}")
        assert access.threads_lost == 4 * taken
        assert not access.permits("u0", P.PRODUCE, "/shop/u0-0")
        gate.close()
        flooded.loop.until("their end", lambda: not flooded.asked._threads.running)
        assert not flooded.asked._threads.lost and not flooded.asked._threads._askers
        flooded.later()
        assert flooded.loop.outcome("u0", P.PRODUCE, "/shop/u0-0") is None


def test_threads_have_an_end_and_administrators_go_on_then() -> None:
    with opened_gate(HangsForMost()) as gate:
        flooded = Flooded(gate, Moved())
        most = THREADS_MAX + REPLACED_MAX - RESERVED
        for number in range(most // LOST_OF_ONE_MAX):
            flooded.flood(f"u{number}", LOST_OF_ONE_MAX)
            count = LOST_OF_ONE_MAX * (number + 1)
            flooded.loop.until("questions", lambda count=count: len(gate.asked) == count)
            if number % USERS == 0:
                flooded.later()
        flooded.later()
        flooded.loop.until("the threads", lambda: flooded.asked._threads.lost == most)
        flooded.flood("last", 1)
        assert flooded.asked._threads.running == most
        found: Any = flooded.loop.outcome("ann", P.MANAGE_CLUSTER, CLUSTER)
        assert found is None


def test_one_whose_questions_are_answered_has_more_threads_and_loses_no_more() -> None:
    with opened_gate() as gate:
        flooded = Flooded(gate, Moved())
        flooded.flood("u")
        for number in range(THREADS_OF_ONE_MAX):
            gate.open(f"/shop/u{number}")
        most = 2 * THREADS_OF_ONE_MAX  # those that are answered, and those that hang
        flooded.loop.until("all its threads", lambda: len(gate.asked) == most)
        flooded.later()
        assert flooded.asked._threads.lost == THREADS_OF_ONE_MAX
        assert flooded.loop.outcome("u", P.PRODUCE, "/shop/more") is not None
        assert flooded.asked._threads.running == THREADS_OF_ONE_MAX


def test_an_administrator_whose_list_hangs_may_disable_a_user_all_the_same() -> None:
    class Half(Gate):
        def authorize(self, principal: str, permission: Permission, resource: str) -> None:
            if resource != CLUSTER:
                super().authorize(principal, permission, resource)

    with opened_gate(Half()) as gate:
        flooded = Flooded(gate, Moved())
        flooded.flood("ann")
        flooded.loop.until("questions", lambda: len(gate.asked) == LOST_OF_ONE_MAX)
        flooded.later()
        assert type(flooded.loop.outcome("ann", P.LOOKUP, "/shop/x")) is Unavailable
        assert flooded.loop.outcome("ann", P.MANAGE_CLUSTER, CLUSTER) is None
        assert flooded.loop.outcome("ann", P.MANAGE_BROKER, CLUSTER) is None, "no status"


class MendedOnce(Gate):
    """Hangs until it is well; what it was asked before hangs on."""

    is_well = False

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        if not self.is_well:
            super().authorize(principal, permission, resource)


def test_an_administrator_whose_questions_hang_is_asked_about_again_after_a_while() -> None:
    question = "ann", P.MANAGE_BROKER, CLUSTER
    with opened_gate(MendedOnce()) as gate:
        flooded = Flooded(gate, Moved())
        loop = flooded.loop

        def is_asked() -> bool:
            """Ask, let that hang, and be refused."""
            before, ends = len(gate.asked), list[DanubeError]()
            when_decided(lambda: loop.access.authorize(*question), ends.append)
            if ends:
                assert "is asked no other" in str(ends[0])
                return False
            loop.until("the question", lambda: len(gate.asked) == before + 1)
            flooded.later()
            loop.until("its end", lambda: ends)
            flooded.later(FAULT_NS)
            return True

        asked = [is_asked() for _ in range(LOST_OF_ONE_MAX + 1)]
        assert asked == [True] * LOST_OF_ONE_MAX + [False]
        flooded.later(AGAIN_NS)
        assert is_asked(), "about an administrator it is asked again"
        flooded.later(AGAIN_NS)
        assert not is_asked(), "the pause is as long as it has hung"
        flooded.later(3 * AGAIN_NS)
        gate.is_well = True
        for _ in range(3):
            assert loop.outcome(*question) is None
            flooded.later(ANSWER_NS + 1)
        assert flooded.asked.threads_lost == len(gate.asked) == LOST_OF_ONE_MAX + 1


def test_an_urgent_asker_loses_no_more_threads_than_are_replaced() -> None:
    clock, ended, began = Moved(), threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        began.release()
        ended.wait(60)

    threads = QuestionThreads("test", 8, 0, Spare(clock, 0, replaced_max=2, lost_of_one_max=1))
    answers = []
    try:
        for lost in range(2):
            assert not threads.is_held_up("ann")
            answers.append(threads.ask(hang, "ann", is_urgent=True))
            assert began.acquire(timeout=60), "it is asked"
            clock.moved_ns += LATE_NS
            threads.replace_lost()
            assert threads.lost == lost + 1
            clock.moved_ns += 1000 ** (lost + 1) * AGAIN_NS
        assert threads.is_held_up("ann")
    finally:
        ended.set()
        for answer in answers:
            answer.result(60)


@pytest.mark.parametrize("kind", [PermissionDenied, OSError, ValueError])
def test_what_it_says_can_be_sent_and_shown(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with opened_gate() as gate, caplog.at_level(logging.WARNING):
        loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))
        gate.raises = kind("\ud800 bad\r\n\x1b[2J\0\u202e" + "x" * 5_000_000)
        gate.open()
        refusal = loop.outcome("pia", P.PRODUCE, "/shop/orders")
    for text in (str(refusal), *(record.getMessage() for record in caplog.records)):
        assert text.isprintable() and len(text) < SAID_CHARACTERS_MAX + 300, repr(text[:200])
        assert p.encode(p.Error(1, PermissionDenied.code, text))
    if kind is PermissionDenied:
        assert str(refusal).startswith("? bad  ?[2J??xxx")


def test_what_cannot_be_said_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert said(Mute()) == "Mute"
    assert said(ValueError("line\nother")) == "line other"
