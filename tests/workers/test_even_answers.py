"""Answers of lists go at whole quarters of a second behind their questions, where another package's authorizer is asked."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from danube_fast.broker.admin.registry import OPERATIONS
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import ResourceExhausted
from danube_fast.net import protocol
from danube_fast.workers.coordinator.administration import LISTS
from danube_fast.workers.coordinator.even_answers import HELD_OF_ONE_MAX, STEP_NS, EvenAnswers
from danube_fast.workers.process.mailbox import NEVER_NS


class Rig:
    def __init__(self, *, holds: bool = True) -> None:
        self.now_ns = 0
        self.sent: list[tuple[int, int, Any]] = []
        clock: Any = self
        self.answers = EvenAnswers(clock, self._reply, holds=holds)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def _reply(self, number: int, answer: Any) -> None:
        self.sent.append((self.now_ns, number, answer))

    def ends_at(self, now_ns: int, began_ns: int, number: int = 1, request: int = 1) -> None:
        self.now_ns = now_ns
        self.answers.reply(number, protocol.Result(request, "names"), began_ns)

    def run(self) -> list[int]:
        """Run until all is sent; when that was."""
        while (due := self.answers.next_deadline_ns()) != NEVER_NS:
            self.now_ns = due - 1
            assert not self.answers.do_work(self.now_ns)
            self.now_ns = due
            assert self.answers.do_work(due)
        return [when for when, _, _ in self.sent]


def test_work_of_any_length_within_a_step_is_answered_at_its_end() -> None:
    for lasted in (0, 1, 3 * MILLISECOND_NS, STEP_NS - 1):
        rig = Rig()
        rig.ends_at(77 + lasted, 77)
        assert not rig.sent
        assert rig.run() == [77 + STEP_NS]


def test_longer_work_is_answered_at_the_end_of_a_later_step() -> None:
    rig = Rig()
    rig.ends_at(5 * STEP_NS + 3, 2)
    assert rig.run() == [2 + 6 * STEP_NS]


def test_answers_go_in_the_order_of_their_times() -> None:
    rig = Rig()
    rig.ends_at(10, 10, number=1)
    rig.ends_at(10, 9, number=2)
    rig.ends_at(10, 10, number=3)
    rig.run()
    assert [number for _, number, _ in rig.sent] == [2, 1, 3]


def test_without_such_an_authorizer_nothing_waits() -> None:
    rig = Rig(holds=False)
    rig.ends_at(5, 5)
    assert [when for when, _, _ in rig.sent] == [5]
    assert rig.answers.next_deadline_ns() == NEVER_NS


def test_one_session_has_so_many_under_way() -> None:
    rig = Rig()
    for request in range(HELD_OF_ONE_MAX + 1):
        rig.ends_at(5, 5, request=request)
    rig.ends_at(5, 5, number=2)
    ((_, number, refusal),) = rig.sent
    assert (number, refusal.request, refusal.code) == (1, HELD_OF_ONE_MAX, ResourceExhausted.code)
    rig.run()
    assert len(rig.sent) == HELD_OF_ONE_MAX + 2
    rig.ends_at(rig.now_ns, rig.now_ns)
    assert len(rig.sent) == HELD_OF_ONE_MAX + 2, "there is room again"


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_leaves_out_names_is_a_list(name: str) -> None:
    """An operation that looks at each name for itself."""
    filters = "Visibility(" in inspect.getsource(OPERATIONS[name].function)
    assert filters == (name in LISTS)
