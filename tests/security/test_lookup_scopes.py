"""Which names lists show where an authorizer of another package gives the scopes, and how often it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import admin
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied, Unavailable
from danube_fast.security.authorizers import ANSWER_NS, AskedAuthorizer
from danube_fast.security.lookup_scopes import SCOPES_MAX, LookupScopes
from danube_fast.security.records import BOOTSTRAP, Binding, Principal
from danube_fast.types import Permission
from danube_fast.undecided import Undecided, when_decided
from tests.security.authorizer_rig import Gate, Loop, Moved, loop_with, opened_gate

P = Permission
TOPICS = ("/a/one", "/a/two", "/b/one", "/system/audit", "/system/reply-1")
SCOPES_QUESTION = ("pia", "lookup", "scopes")


@pytest.fixture
def gate() -> Iterator[Gate]:
    with opened_gate() as made:
        yield made


@pytest.mark.parametrize(
    ("scopes", "covered"),
    [
        ([], ()),
        (["cluster"], TOPICS),
        (["namespace:a"], ("/a/one", "/a/two")),
        (["namespace:*"], ("/a/one", "/a/two", "/b/one")),
        (["/a/t*", "/b/one"], ("/a/two", "/b/one")),
        (["/a/one#s"], ("/a/one",)),
        (["namespace:system"], ("/system/reply-1",)),
        (repeat("/a/one", SCOPES_MAX), ("/a/one",)),
    ],
)
def test_scopes_cover_what_those_of_bindings_cover(scopes: Any, covered: tuple[str, ...]) -> None:
    found = LookupScopes(scopes)
    assert tuple(each for each in TOPICS if found.cover(each)) == covered


def test_scopes_cover_subscriptions_and_namespaces() -> None:
    found = LookupScopes(["/a/one#s*", "namespace:b"])
    asked = "/a/one#s1", "/a/one#t", "/b/one#t", "namespace:a", "namespace:b"
    assert [found.cover(each) for each in asked] == [True, False, True, False, True]


@pytest.mark.parametrize(
    "scopes", ["cluster", b"cluster", None, 7, [7], ["/a"], [""], count(), ["/a/b"] * 2000]
)
def test_what_is_no_list_of_scopes(scopes: Any) -> None:
    with pytest.raises((TypeError, InvalidArgument)):
        LookupScopes(scopes)


def visible(loop: Loop, principal: str = "pia") -> list[str] | DanubeError:
    """The topics that lists show to a principal."""
    ends: list[Any] = []

    def step() -> None:
        shows = loop.access.visible_to(principal)
        ends.append([each for each in TOPICS if shows(each)])

    when_decided(step, ends.append)
    loop.until("the answer", lambda: ends)
    (end,) = ends
    assert isinstance(end, list | DanubeError)
    return end


def loop_of(gate: Gate, clock: SystemClock | None = None) -> Loop:
    return loop_with(AskedAuthorizer("gate", gate, clock or SystemClock()))


def test_roles_and_scopes_together_show_names_by_one_question(gate: Gate) -> None:
    clock = Moved()
    loop = loop_of(gate, clock)
    gate.shows = ["namespace:a"]
    policy = loop.access.policy
    policy.put(Principal("ned"))
    policy.put(Binding("ned", "user:ned", "viewer", "/*/one"))
    with pytest.raises(Undecided, match="being asked which names lists may show to pia"):
        loop.access.visible_to("pia")
    gate.open()
    assert visible(loop) == ["/a/one", "/a/two"]
    assert visible(loop) == ["/a/one", "/a/two"]
    assert gate.asked == [SCOPES_QUESTION], "once, and about no name"
    assert visible(loop, "ned") == ["/a/one"]
    assert visible(loop, "nick") == [], "scopes give nothing"
    assert visible(loop, BOOTSTRAP) == [*TOPICS], "all that its role shows"
    assert BOOTSTRAP not in {who for who, _, _ in gate.asked}
    gate.shows = ["/b/*"]
    clock.moved_ns += ANSWER_NS
    loop.access.confirm()
    assert visible(loop) == ["/b/one"]
    clock.moved_ns += ANSWER_NS
    loop.turn()
    asked: Any = loop.access._outer
    assert not asked._answers, "old answers take no memory"


def test_a_right_that_roles_take_away_counts_within_a_list(gate: Gate) -> None:
    loop = loop_of(gate)
    gate.open()
    visible(loop)
    shows = loop.access.visible_to("pia")
    assert shows("/a/one")
    loop.access.policy.remove("binding/pia")
    assert not shows("/a/one")


def test_reply_topics_are_shown_to_their_owner_whatever_the_scopes(gate: Gate) -> None:
    loop = loop_of(gate)
    gate.shows = []
    gate.open()
    loop.access.owner_of = lambda topic: "pia"
    assert visible(loop) == ["/system/reply-1"]


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (PermissionDenied("no lists for pia"), PermissionDenied, "no lists for pia"),
        (KeyError("x"), PermissionDenied, "could not decide which names lists may show to pia"),
        (
            ConnectionRefusedError(111, "no"),
            Unavailable,
            "could not decide which names lists may show to pia",
        ),
    ],
)
def test_a_fault_ends_a_list_whatever_there_is_to_show(
    gate: Gate, fault: Exception, kind: type[DanubeError], text: str
) -> None:
    loop = loop_of(gate)
    gate.raises = fault
    gate.open()
    found = visible(loop)
    assert type(found) is kind and text in str(found)


@pytest.mark.parametrize("shows", ["cluster", None, ["no scope"]])
def test_scopes_that_are_none_deny(gate: Gate, shows: Any) -> None:
    loop = loop_of(gate)
    gate.shows = shows
    gate.open()
    found = visible(loop)
    assert type(found) is PermissionDenied and "see the broker's log" in str(found)


def test_one_that_hangs_ends_lists_in_time(gate: Gate) -> None:
    clock = Moved()
    loop = loop_of(gate, clock)
    ends: list[Any] = []
    when_decided(lambda: ends.append(loop.access.visible_to("pia")), ends.append)
    loop.until("the question", lambda: gate.asked)
    clock.moved_ns += 6 * SECOND_NS
    loop.until("the end", lambda: ends)
    assert type(ends[0]) is Unavailable and "has not answered within 5 s" in str(ends[0])


class Listed:
    """What operations that list find: a few topics, some of them hidden."""

    def __init__(self, gate: Gate, *hidden: str) -> None:
        self.loop = loop_of(gate)
        names = sorted({"/a/one", *hidden})
        records = {name: SimpleNamespace(topic=name, owner="") for name in names}
        self.taken: list[str] = []
        by_name = SimpleNamespace(
            behind=lambda after, namespace="": iter(
                [each for name, each in records.items() if name > after]
            ),
            count=lambda name: 1,
        )
        namespaces = SimpleNamespace(names=lambda: sorted({name.split("/")[1] for name in names}))
        topics = SimpleNamespace(by_name=by_name, topic=records.get, namespaces=namespaces)
        self.context: Any = SimpleNamespace(
            topics=topics,
            security=SimpleNamespace(is_enforced=True),
            in_slices=lambda steps: [*steps],
        )

    def answer(self, operation: str, **arguments: Any) -> Any:
        ends: list[Any] = []
        answer = admin.Answer(lambda value, error: ends.append(error or value))
        access = self.loop.access
        when_decided(
            lambda: admin.run(self.context, access, "pia", operation, arguments, answer),
            ends.append,
        )
        self.loop.until("the answer", lambda: ends)
        return ends[0]


@pytest.mark.parametrize("hidden", [(), ("/secret/plans",), ("/secret/a", "/secret/b", "/a/zero")])
def test_lists_ask_about_their_asker_alone(gate: Gate, hidden: tuple[str, ...]) -> None:
    gate.shows = ["/a/one", "namespace:n"]
    gate.open()
    listed = Listed(gate, *hidden)
    assert listed.answer("list_namespaces") == []
    assert listed.answer("list_topics", pattern="/secret/*") == []
    assert gate.asked == [SCOPES_QUESTION]


def test_a_list_without_an_answer_tells_nothing(gate: Gate) -> None:
    gate.raises = OSError("the network is down")
    gate.open()
    for hidden in ((), ("/secret/plans",)):
        found = Listed(gate, *hidden).answer("list_topics")
        assert type(found) is Unavailable and "secret" not in str(found)
