"""Another package's authorizer that answers about all names of a list at once: what it is asked, and what counts as an answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker.admin.registry import Asker
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied, Unavailable
from danube_fast.security import authorizers, entry_points
from danube_fast.security.authorizers import AskedAuthorizer, load_authorizer
from danube_fast.types import CLUSTER, Permission
from danube_fast.undecided import LEARNT_MAX, sift, when_decided
from tests.security.authorizer_rig import Loop, loop_with

P = Permission


class Rules:
    """Permits names that do not begin with an x; keeps the lists that it was asked about."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.version = 1
        self.answer: Callable[[tuple[str, ...]], Any] = lambda names: [
            each[0] != "x" for each in names
        ]

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        raise AssertionError("no name is asked about by itself")

    def authorize_all(
        self, principal: str, permission: Permission, resources: tuple[str, ...]
    ) -> Any:
        self.asked.append(resources)
        return self.answer(resources)


class House:
    def __init__(self) -> None:
        self.rules = Rules()
        self.loop: Loop = loop_with(AskedAuthorizer("house", self.rules, SystemClock()))
        # other rules than those of the beginning are asked once more
        self.loop.until("the version", lambda: self.loop.access.version[2] == 1)

    def listed(self, names: list[str], user: str = "pia", most: int = 1_000_000) -> Any:
        """Names that a list of these has, or its error."""
        access, found, ends = self.loop.access, list[str](), list[Any]()
        asker = Asker(user, access.authorize, lists=access.lists)
        steps = sift(names, asker.may_see, found, most, asker.learns(lambda names: names))

        def step() -> None:
            for each in steps:
                if each is not None:
                    each.then(lambda: when_decided(step, ends.append))
                    return
            ends.append(found)

        when_decided(step, ends.append)
        self.loop.until("the list", lambda: ends)
        return ends[0]


@pytest.fixture
def house() -> House:
    return House()


def test_one_question_is_about_all_names(house: House) -> None:
    assert house.listed(["a", "xb", "c"]) == ["a", "c"]
    assert house.rules.asked == [(CLUSTER, "a", "xb", "c")]


def test_nothing_to_list_is_a_question_too_and_each_list_is_one(house: House) -> None:
    assert house.listed([]) == house.listed([]) == house.listed(["x"]) == []
    assert house.rules.asked == [(CLUSTER,), (CLUSTER,), (CLUSTER, "x")]


def test_what_roles_hide_is_not_asked_about(house: House) -> None:
    assert house.listed(["a", "b"], user="nick") == []
    assert house.rules.asked == [(CLUSTER,)]


@pytest.mark.parametrize(
    ("names", "questions"), [(0, 1), (LEARNT_MAX - 1, 1), (LEARNT_MAX, 2), (LEARNT_MAX + 1, 2)]
)
def test_a_question_has_so_many_names(house: House, names: int, questions: int) -> None:
    expected = [f"n{number:05}" for number in range(names)]
    assert house.listed(expected) == expected
    assert len(house.rules.asked) == questions
    assert all(len(each) <= LEARNT_MAX + 1 for each in house.rules.asked)


def test_a_full_list_asks_no_more(house: House) -> None:
    names = [f"n{number:05}" for number in range(2 * LEARNT_MAX)]
    assert house.listed(names, most=3) == names[:3]
    assert len(house.rules.asked) == 1


@pytest.mark.parametrize("answer", [None, [True], [1, 1, 1], "abc", [True] * 4, {"a": True}, 7])
def test_what_is_no_answer_permits_nothing(house: House, answer: Any) -> None:
    house.rules.answer = lambda names: answer
    assert house.listed(["a", "b"]) == []


def test_a_generator_is_an_answer(house: House) -> None:
    house.rules.answer = lambda names: (True for _ in names)
    assert house.listed(["a", "xb"]) == ["a", "xb"]


def test_a_denial_is_one_of_all(house: House) -> None:
    house.rules.answer = lambda names: refuse(PermissionDenied("none of these"))
    assert house.listed(["a", "b"]) == []


def test_a_fault_tells_no_name(house: House) -> None:
    house.rules.answer = lambda names: refuse(OSError("the network is down"))
    error = house.listed(["/secret/plans"])
    assert isinstance(error, Unavailable) and "secret" not in str(error)
    assert "what a list would name" in str(error)


def test_a_fault_about_one_name_does_not_tell_it_either() -> None:
    rules: Any = SimpleNamespace(authorize=lambda *question: refuse(OSError("down")))
    loop = loop_with(AskedAuthorizer("house", rules, SystemClock()))
    asker, ends = Asker("pia", loop.access.authorize, lists=loop.access.lists), list[Any]()
    when_decided(lambda: ends.append(asker.may_see("/secret/plans")), ends.append)
    loop.until("the answer", lambda: ends)
    assert isinstance(ends[0], Unavailable) and "secret" not in str(ends[0])


def test_new_rules_are_asked_again(house: House) -> None:
    loop = house.loop
    assert house.listed(["a"]) == ["a"]
    house.rules.answer = lambda names: [False] * len(names)
    house.rules.version = 2
    loop.until("the version", lambda: loop.access.version[2] == 2)
    assert house.listed(["a"]) == []


def test_long_lists_of_one_user_are_bounded(monkeypatch: pytest.MonkeyPatch, house: House) -> None:
    monkeypatch.setattr(authorizers, "QUESTIONS_OF_ONE_MAX", 8)
    asked: Any = house.loop.access._outer
    names = tuple(f"n{number}" for number in range(3 * 1024))
    refused: list[DanubeError] = []
    for number in range(3):
        try:
            asked.authorize_all("pia", P.LOOKUP, names, number)
        except Unavailable as error:
            refused.append(error)
    assert [str(each).startswith("too many questions") for each in refused] == [False, False, True]
    house.loop.until("the end", lambda: not asked._questions)
    assert not asked._of_one


def test_no_thread_can_await_a_coroutine_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Rules):
        async def authorize_all(self, *question: Any) -> Any:
            return None

    monkeypatch.setattr(entry_points.EntryPointGroup, "load", lambda *of: Later())
    with pytest.raises(
        InvalidArgument, match="authorize_all of the authorizer later is a coroutine"
    ):
        load_authorizer("later", SystemClock(), 1000)


def refuse(error: Exception) -> Any:
    raise error
