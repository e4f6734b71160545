"""Authorizers that are slow: order, time and number of the questions to them, and what counts as an answer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import (
    PermissionDenied,
    Unavailable,
)
from danube_fast.security import authorizers
from danube_fast.security.authorizers import (
    LOST_OF_ONE_MAX,
    QUESTION_NS,
    VERSION_NS,
    VERSIONS_LATE_MAX,
    AskedAuthorizer,
)
from danube_fast.security.question_threads import ANSWER_SECONDS
from danube_fast.types import Permission
from danube_fast.undecided import Undecided, when_decided
from tests.security.authorizer_rig import (
    Gate,
    Moved,
    Stopped,
    Versions,
    loop_with,
    opened_gate,
)

P = Permission
TOPIC = "/shop/orders"


@pytest.fixture
def gate() -> Iterator[Gate]:
    with opened_gate() as made:
        yield made


def test_no_question_of_what_is_open_is_overtaken_by_a_newer_one(gate: Gate) -> None:
    loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))

    def ask(topic: str, **how: bool) -> None:
        with pytest.raises(Undecided):
            loop.access.check("pia", P.PRODUCE, topic, **how)

    for number in range(LOST_OF_ONE_MAX):
        ask(f"/shop/t{number}")
    loop.until("the threads", lambda: len(gate.asked) == LOST_OF_ONE_MAX)
    ordinary = [f"/shop/o{number}" for number in range(3)]
    of_pass = [f"/shop/p{number}" for number in range(3)]
    for topic in ordinary:
        ask(topic)
    for topic in (of_pass[0], of_pass[1], ordinary[2], of_pass[2]):
        ask(topic, is_open=True)
    expected = [of_pass[0], of_pass[1], ordinary[2], of_pass[2], ordinary[0], ordinary[1]]
    for number in range(len(expected)):
        gate.open(gate.asked[number][2])
        # one more thread for each answer
        count = min(LOST_OF_ONE_MAX + 2 * (number + 1), LOST_OF_ONE_MAX + len(expected))
        loop.until("the next questions", lambda count=count: len(gate.asked) == count)
    found = [resource for _, _, resource in gate.asked[LOST_OF_ONE_MAX:]]
    pairs = zip(found[::2], found[1::2], expected[::2], expected[1::2], strict=True)
    for one, other, *both in pairs:  # two threads begin at one time
        assert {one, other} == set(both)


def test_what_waits_for_one_answer_is_bounded(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizers, "WAITING_MAX", 3)
    loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))
    ends: list[Any] = []

    def step() -> None:
        ends.append(loop.access.authorize("pia", P.PRODUCE, TOPIC))

    for _ in range(4):
        when_decided(step, ends.append)
    (refusal,) = ends
    assert type(refusal) is Unavailable and "too many questions" in str(refusal)
    gate.open()
    loop.until("the answers", lambda: ends[1:] == [None] * 3)


class HangingVersions(Gate):
    """Rules whose number is told when it is let; each read has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    @property
    def version(self) -> int:
        with self.changed:
            self.reads += 1
            number = self.reads
            self.changed.wait_for(lambda: self.closed or self.let[f"v{number}"])
        return number


def test_a_version_that_hangs_is_read_again_and_the_newest_counts() -> None:
    clock, rules = Stopped(), HangingVersions()
    asked = AskedAuthorizer("gate", rules, clock)
    loop = loop_with(asked)
    clock.moved_ns = VERSION_NS
    try:
        for number in range(1, VERSIONS_LATE_MAX + 2):
            loop.until("a read", lambda number=number: rules.reads == number)
            clock.moved_ns += int(ANSWER_SECONDS * SECOND_NS)
        for _ in range(10):
            loop.turn()
            clock.moved_ns += int(ANSWER_SECONDS * SECOND_NS)
        assert rules.reads == asked._version_threads.running == VERSIONS_LATE_MAX + 1
        rules.open("v1")
        loop.until("the old read", lambda: asked._versions_late < VERSIONS_LATE_MAX)
        clock.moved_ns += VERSION_NS
        loop.until("another read", lambda: rules.reads == VERSIONS_LATE_MAX + 2)
        assert asked.version == 0, "an old one counts"
        rules.open(f"v{rules.reads}")
        loop.until("the newest", lambda: asked.version == VERSIONS_LATE_MAX + 2)
    finally:
        rules.close()


@pytest.mark.parametrize("found", [False, True, 0])
def test_what_it_returns_permits_nothing(found: Any) -> None:
    rules: Any = SimpleNamespace(authorize=lambda *question: found)
    refusal = loop_with(AskedAuthorizer("odd", rules, SystemClock())).outcome(
        "pia", P.PRODUCE, TOPIC
    )
    assert type(refusal) is PermissionDenied and "could not decide" in str(refusal)


def test_new_rules_have_the_time_of_a_new_question_up_to_an_end(gate: Gate) -> None:
    clock, rules = Moved(), Versions()
    loop = loop_with(AskedAuthorizer("gate", rules, clock))
    loop.until("the version", lambda: loop.access.version[2] == 1)
    ends: list[Any] = []
    when_decided(lambda: loop.access.check("pia", P.PRODUCE, TOPIC), ends.append)
    almost_ns = int(ANSWER_SECONDS * SECOND_NS) - SECOND_NS
    try:
        for version in range(2, 2 + QUESTION_NS // almost_ns):
            assert not ends, f"no time for version {version}"
            rules.version = version
            clock.moved_ns += almost_ns
            loop.until("the version", lambda version=version: loop.access.version[2] == version)
        clock.moved_ns += almost_ns
        loop.until("the end", lambda: ends)
    finally:
        rules.close()
    assert type(ends[0]) is Unavailable and "has not answered" in str(ends[0])
