"""Charges for administrative changes: so many a second of a user, long ones count more, administrators are exempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS
from danube_fast.errors import PermissionDenied, ResourceExhausted, Unavailable
from danube_fast.net.session import Session
from danube_fast.security.audit import AuditRecord
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.types import CLUSTER, Permission, parse_topic
from danube_fast.workers.coordinator.change_rates import BURST_SECONDS, KEPT_MAX, ChangeRates
from danube_fast.workers.coordinator.lookups import Lookups
from danube_fast.workers.process.denials import Denials
from tests.workers.shard_rig import FakeMailbox

RATE = 20
BURST = RATE * BURST_SECONDS


class Rig:
    """Users, of whom `ann` is an administrator."""

    def __init__(self, per_second: int = RATE) -> None:
        self.clock = VirtualClock()
        self.denials = Denials(self.clock)
        self.rates = ChangeRates(per_second, self.clock, self, self.denials)

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        assert (permission, resource) == (Permission.MANAGE_CLUSTER, CLUSTER)
        if principal != "ann":
            raise PermissionDenied("no")

    def change(self, user: str, **arguments: Any) -> None:
        session = Session(3, b"token", b"\0one", "raw", user)
        record = AuditRecord(event="", action="create_topic", resource="/a/t", arguments=arguments)
        self.rates.charge(session.principal, record, proof=session.proof, address=session.address)

    def made(self, user: str, **arguments: Any) -> int:
        """Changes until one is refused."""
        for count in range(10 * BURST):
            try:
                self.change(user, **arguments)
            except ResourceExhausted:
                return count
        return 10 * BURST


def test_a_user_has_a_burst_and_then_its_rate() -> None:
    rig = Rig()
    assert rig.made("pia") == BURST
    assert rig.made("pia") == 0 and rig.made("max") == BURST, "each has its own"
    rig.clock.now_ns += SECOND_NS
    assert rig.made("pia") == RATE
    rig.clock.now_ns += 100 * BURST_SECONDS * SECOND_NS
    assert rig.made("pia") == BURST, "no more than the burst behind a long quiet"


def test_a_change_with_a_long_line_counts_as_several() -> None:
    assert Rig().made("pia", values="x" * 4096) == BURST // 5


def test_an_administrator_is_exempt_and_zero_is_no_bound() -> None:
    assert Rig().made("ann") == 10 * BURST
    assert Rig(0).made("pia") == 10 * BURST


def test_a_refusal_says_what_to_do_and_is_counted() -> None:
    rig = Rig()
    rig.made("pia")
    with pytest.raises(ResourceExhausted, match=r"try again in 1 s.*admin_changes_per_second_max"):
        rig.change("pia")
    (record,), _ = rig.denials.take(0)
    assert (record.event, record.outcome) == ("denied", "ResourceExhausted")
    assert (record.principal, record.action, record.resource) == ("pia", "create_topic", "/a/t")


class Topics:
    """The topics of a coordinator: those that were made, and one partition, of `/a/hidden`."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def topic(self, name: str) -> str | None:
        return name if name in (*self.made, "/a/hidden") else None

    def partition_of(self, name: str) -> Any:
        part: Any = SimpleNamespace(topic="/a/hidden")
        return (part, 0) if name == "/a/hidden-part-0" else None

    def partitions(self, record: Any) -> list[Any]:
        return []

    def check_takes_dead_letters(self, name: str) -> None:
        pass

    def check_new(self, name: str, options: Any) -> None:
        if name == "/a/full":
            raise ResourceExhausted("the namespace is full")

    def create(self, name: str, options: Any, now_ns: int) -> Any:
        self.made.append(name)
        return name


def lookups_of(rig: Any, authorizer: Any, topics: Topics) -> tuple[Lookups, FakeMailbox]:
    mailbox = FakeMailbox()
    boot: Any = SimpleNamespace(mailbox=mailbox, clock=rig.clock)
    audit: Any = SimpleNamespace(record=lambda *_, **__: None)
    connections: Any = SimpleNamespace(commands=SimpleNamespace(handlers={}))
    placement: Any = SimpleNamespace(
        when_placed=lambda parts, deadline_ns, placed: placed(Unavailable(""))
    )
    made: Any = topics
    return Lookups(boot, connections, made, placement, authorizer, audit, rig.rates), mailbox


def test_topics_for_dead_letters_are_changes_of_the_setter() -> None:
    rig, topics = Rig(), Topics()
    _, mailbox = lookups_of(rig, rig, topics)

    def refuse(error: Exception) -> None:
        if str(error):  # its topic is made, and not placed
            raise error

    def ask(topic: str, setter: str) -> None:
        question = m.FindDeadLetterTopic(topic, setter=setter)
        request: Any = SimpleNamespace(message=question, fail=refuse)
        mailbox.handlers[m.FindDeadLetterTopic](request)

    for _ in range(2 * BURST):
        with pytest.raises(ResourceExhausted):
            ask("/a/full", "pia")  # what cannot be made is no change
    for number in range(BURST):
        ask(f"/a/t{number}", "pia")
    with pytest.raises(Unavailable, match=r"pia has made more .*admin_changes_per_second_max"):
        ask("/a/late", "pia")
    ask("/a/t0", "pia")
    ask("/a/max", "max")
    for number in range(2 * BURST):
        ask(f"/a/ann{number}", "ann")
    assert "/a/late" not in topics.made
    (record,), _ = rig.denials.take(0)
    assert (record.principal, record.action, record.resource) == ("pia", "create_topic", "/a/late")
    rig.clock.now_ns += SECOND_NS
    ask("/a/late", "pia")
    assert topics.made[-1] == "/a/late", "asked again in a while"
    mailbox.close()


def test_names_that_are_refused_cost_the_same_questions_whether_they_are_there() -> None:
    asked: list[str] = []

    class Refuses:
        def authorize(self, principal: str, permission: Permission, resource: str) -> None:
            asked.append(resource)
            raise PermissionDenied(f"may not look up {resource}")

    lookups, mailbox = lookups_of(Rig(), Refuses(), Topics())
    counts, texts = [], set()
    for name in ("/a/hidden", "/a/missing", "/a/hidden-part-0", "/a/missing-part-0"):
        asked.clear()
        with pytest.raises(PermissionDenied) as caught:
            lookups._find("pia", parse_topic(name))
        counts.append(len(asked))
        texts.add(str(caught.value).replace(name, "NAME"))
    assert counts == [1, 1, 2, 2] and texts == {"may not look up NAME"}
    mailbox.close()


def test_users_that_are_quiet_are_forgotten() -> None:
    rig = Rig()
    rig.made("pia")
    for number in range(3 * KEPT_MAX):
        rig.change(f"user-{number}")
        rig.clock.now_ns += SECOND_NS // RATE
    assert len(rig.rates._paid_until_ns) <= KEPT_MAX + 1
    assert rig.made("pia") == BURST
