"""Which names lists show where an authorizer of another package gives the scopes, and how often it is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import admin
from danube_fast.broker.topics.records import TopicRecord
from danube_fast.broker.topics.table import TopicTable
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied, Unavailable
from danube_fast.security import authorizers
from danube_fast.security.authorizers import LOST_OF_ONE_MAX, SCOPES_NS, AskedAuthorizer
from danube_fast.security.lookup_scopes import PATTERNS_MAX, SCOPES_MAX, LookupScopes
from danube_fast.security.records import BOOTSTRAP, Binding, Principal
from danube_fast.types import REPLY_TOPICS, Permission
from danube_fast.undecided import Undecided, when_decided
from danube_fast.visible import Visible
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
    "scopes",
    [
        "cluster",
        b"cluster",
        None,
        7,
        [7],
        ["/a"],
        [""],
        map("/a/{}".format, count()),
        ["/a/b"] * (SCOPES_MAX + 1),
        ["/a/b*"] * (PATTERNS_MAX + 1),
    ],
)
def test_what_is_no_list_of_scopes(scopes: Any) -> None:
    with pytest.raises((TypeError, InvalidArgument)):
        LookupScopes(scopes)


def visible(loop: Loop, principal: str = "pia") -> list[str] | DanubeError:
    """The topics that lists show to a principal."""
    ends: list[Any] = []

    def step() -> None:
        shown = loop.access.visible_to(principal)
        found = [each for each in TOPICS if shown.shows(each)]
        for topic in found:  # of reply topics lists show their own without these
            assert topic.startswith((*shown.fronts, REPLY_TOPICS)), shown.fronts
        ends.append(found)

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
    clock.moved_ns += SCOPES_NS
    loop.access.confirm()
    assert visible(loop) == ["/b/one"]
    clock.moved_ns += SCOPES_NS
    loop.turn()
    asked: Any = loop.access._outer
    assert not asked._scopes and not asked._scopes_kept, "old answers take no memory"


def test_a_right_that_roles_take_away_counts_within_a_list(gate: Gate) -> None:
    loop = loop_of(gate)
    gate.open()
    visible(loop)
    shown = loop.access.visible_to("pia")
    assert shown.shows("/a/one")
    loop.access.policy.remove("binding/pia")
    assert not shown.shows("/a/one")


def test_the_key_is_another_one_exactly_where_something_else_is_shown(gate: Gate) -> None:
    """With another key a client that watches begins anew, with all its topics."""
    clock = Moved()
    loop = loop_of(gate, clock)
    gate.open()

    def key() -> int:
        clock.moved_ns += SCOPES_NS
        loop.access.confirm()
        visible(loop)
        return loop.access.visible_to("pia").key

    policy, first = loop.access.policy, key()
    policy.put(Binding("other", "user:ann", "viewer", "/a/one"))
    policy.put(Binding("same", "user:pia", "no-role", "/a/one"))
    assert key() == first
    policy.put(Binding("more", "user:pia", "viewer", "/a/one"))
    more = key()
    policy.remove("binding/more")
    assert key() == first != more
    gate.shows = ["namespace:a"]
    narrower = key()
    gate.shows = ["namespace:a", "namespace:b"]
    assert len({first, narrower, key()}) == 3
    gate.shows = ["namespace:a"]
    assert key() == narrower


def test_reply_topics_are_shown_to_their_owner_whatever_the_scopes(gate: Gate) -> None:
    loop = loop_of(gate)
    gate.shows = []
    gate.open()
    loop.access.owner_of = lambda topic: "pia"
    assert visible(loop) == ["/system/reply-1"]


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (KeyError("x"), Unavailable, "could not decide which names lists may show to pia"),
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
def test_what_are_no_scopes_shows_nothing(gate: Gate, shows: Any) -> None:
    loop = loop_of(gate)
    gate.shows = shows
    gate.open()
    found = visible(loop)
    assert type(found) is Unavailable and "see the broker's log" in str(found)


def test_one_that_denies_shows_nothing(gate: Gate) -> None:
    gate.raises = PermissionDenied("no lists for pia")
    gate.open()
    assert visible(loop_of(gate)) == []


def test_lists_that_hang_hold_up_nothing_else_of_their_user() -> None:
    class Slow(Gate):
        def authorize(self, principal: str, permission: Permission, resource: str) -> None:
            """Permit all."""

    with opened_gate(Slow()) as gate:
        clock = Moved()
        loop = loop_of(gate, clock)
        for _ in range(LOST_OF_ONE_MAX):
            ends: list[Any] = []
            when_decided(lambda: loop.access.visible_to("pia"), ends.append)
            before = len(gate.asked)
            loop.until("the question", lambda: len(gate.asked) >= before)  # noqa: B023
            clock.moved_ns += 6 * SECOND_NS
            loop.until("the end", lambda: ends)  # noqa: B023
            clock.moved_ns += SECOND_NS
            loop.access.confirm()
        assert loop.outcome("pia", P.PRODUCE, "/a/one") is None


def test_scopes_that_are_kept_are_bounded(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizers, "SCOPES_KEPT_MAX", 100)
    gate.shows = [f"/a/t{number}" for number in range(40)]
    gate.open()
    loop = loop_of(gate)
    for user in ("pia", "ann", "nick", "pia"):
        visible(loop, user)
    asked: Any = loop.access._outer
    assert [key.principal for key in asked._scopes] == ["nick", "pia"]
    assert asked._scopes_kept == 2 * 41
    assert [who for who, _, _ in gate.asked] == ["pia", "ann", "nick", "pia"]


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
        records = {name: TopicRecord(name, 1, "reliable", "fsync", False, [1], 0) for name in names}
        by_name = TopicTable()
        for name in names:
            by_name[name] = records[name]
        namespaces = SimpleNamespace(names=lambda: sorted({name.split("/")[1] for name in names}))
        topics = SimpleNamespace(by_name=by_name, topic=records.get, namespaces=namespaces)
        self.context: Any = SimpleNamespace(
            topics=topics,
            security=SimpleNamespace(is_enforced=True),
            in_slices=lambda principal, steps: [*steps],
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


def test_a_list_looks_at_what_its_asker_may_see_alone(gate: Gate) -> None:
    gate.shows = ["/a/o*", "namespace:b"]
    gate.open()
    listed = Listed(gate, *[f"/secret/t{number}" for number in range(1000)])
    access, looks = listed.loop.access, list[str]()
    visible_to = access.visible_to

    def counting(principal: str) -> Visible:
        visible = visible_to(principal)
        return Visible(lambda name: bool(looks.append(name)) or visible.shows(name), visible.fronts)

    access.visible_to = counting  # type: ignore[method-assign]
    assert [each.topic for each in listed.answer("list_topics")] == ["/a/one"]
    for also in ({"namespace": "secret"}, {"pattern": "/secret/t*"}, {"after": "/secret/t5"}):
        assert listed.answer("list_topics", **also) == []
    assert looks == ["/a/one"]


@pytest.mark.parametrize("seed", range(200))
def test_fronts_cover_all_that_is_shown(seed: int) -> None:
    """`DANUBE_SEED` is the number in the name of the test."""
    draw = random.Random(seed)

    def some(kinds: str) -> str:
        return "".join(draw.choice(kinds) for _ in range(draw.randrange(1, 4)))

    def scope() -> str:
        kinds = draw.choice(("ab", "ab*", "ab?"))
        forms = (
            "cluster",
            f"namespace:{some(kinds)}",
            f"/{some(kinds)}/{some(kinds)}",
            f"/{some(kinds)}/{some(kinds)}#{some(kinds)}",
        )
        return draw.choice(forms)

    loop = loop_with(None)
    policy = loop.access.policy
    policy.put(Principal("ned"))
    for number in range(draw.randrange(4)):
        policy.put(Binding(f"b{number}", "user:ned", draw.choice(("viewer", "no-role")), scope()))
    scopes = LookupScopes([scope() for _ in range(draw.randrange(4))])
    asked: Any = SimpleNamespace(lookup_scopes=lambda principal: scopes)
    loop.access._outer = asked
    shown = loop.access.visible_to("ned")
    for _ in range(300):
        name = f"/{some('ab')}/{some('ab')}"
        by_both = policy.permits("ned", P.LOOKUP, name) and scopes.cover(name)
        assert shown.shows(name) == by_both
        assert not by_both or name.startswith(shown.fronts), (name, shown.fronts)
