"""Passes over what clients have open: every client is reached, however often rights change."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from danube_fast.broker.admission.layout import ProducerWord
from danube_fast.clock import MILLISECOND_NS, SECOND_NS, SystemClock
from danube_fast.errors import PermissionDenied
from danube_fast.security.authorizers import AskedAuthorizer
from danube_fast.security.records import Binding, Credential, Principal, Role
from danube_fast.types import Permission
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.denials import Denials
from danube_fast.workers.shard.access_checks import PASS_SLICES, AccessChecks
from tests.workers.broker import wait_until

SESSIONS = 1000
WAIT_SECONDS = 30
TICK_NS = 10 * MILLISECOND_NS


class Worker:
    """As much of a worker as the checks need: sessions of one principal, and who was sent away."""

    def __init__(self, rules: Any = None) -> None:
        """`rules`: an authorizer of another package."""
        clock = SystemClock()
        self.access = Access(clock, None if rules is None else AskedAuthorizer("r", rules, clock))
        self.handed: deque[Callable[[], None]] = deque()
        self.access.serve_from(self.handed.append)
        self.access.policy.put(Principal(name="pia"))
        self.access.policy.put(Credential(credential="uid:7", principal="pia"))
        self.ended: set[int] = set()
        self.topics: dict[int, str] = {}
        """By partition; all others are of /shop/orders."""
        self.sessions = [
            SimpleNamespace(
                number=n, closed=False, proof="uid:7", principal="pia", consumers={}, identity=b"", address="a",
            )
            for n in range(SESSIONS)
        ]  # fmt: skip
        state: Any = SimpleNamespace(
            sessions=self.sessions,
            tables=SimpleNamespace(producers=np.zeros((0, len(ProducerWord)), np.int64)),
            partition=lambda number: SimpleNamespace(
                topic=self.topics.get(number, "/shop/orders"), partition_id=number
            ),
            catalog=SimpleNamespace(owners={}),
        )
        ends: Any = SimpleNamespace(
            close_session=self._close,
            revoke=lambda identity: None,
            drop_queued=lambda identity: None,
            close=self._close_consumer,
        )
        copy: Any = SimpleNamespace(do_work=lambda now_ns: None)
        self.denials = Denials(SystemClock())
        self.checks = AccessChecks(state, self.access, copy, ends, ends, self.denials)
        self.checks._check_producers = lambda ended, concerned: iter(())  # type: ignore[method-assign]
        self.now_ns = 0

    def _close(self, session: Any, how: Any) -> None:
        self.ended.add(session.number)
        session.closed = True

    def _close_consumer(self, session: Any, consumer: Any, **why: Any) -> None:
        del session.consumers[consumer.consumer_id]

    def tick(self) -> None:
        self.now_ns += TICK_NS
        while self.handed:
            self.handed.popleft()()
        self.checks.do_work(self.now_ns)

    def subscribe(self, session: Any) -> None:
        sub = SimpleNamespace(partition_id=1, name="s")
        session.consumers[1] = SimpleNamespace(consumer_id=1, number=1, subscription=sub)


class Shifting(SystemClock):
    """The clock of this machine, with a wall time that a test sets."""

    def __init__(self, wall_ns: list[int]) -> None:
        self.wall_ns = lambda: wall_ns[0]  # type: ignore[method-assign]


class Hanging:
    """Rules that answer when they are let, and deny then."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.asked: set[str] = set()

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        self.asked.add(principal)
        self.let.wait(WAIT_SECONDS)
        raise PermissionDenied("no")


def test_what_waits_for_an_authorizer_holds_up_no_revocation() -> None:
    rules = Hanging()
    worker = Worker(rules)
    policy = worker.access.policy
    credentials = {"ann": "uid:8", "ben": "uid:9"}
    for name in credentials:
        policy.put(Principal(name=name))
        policy.put(Credential(credential=credentials[name], principal=name))
    for name in ("pia", "ann", "ben"):
        policy.put(Binding(name, f"user:{name}", "consumer", "/shop/*"))
    for number, session in enumerate(worker.sessions):
        if name := ("", "ann", "ben")[number % 3]:
            session.proof, session.principal = credentials[name], name
        worker.subscribe(session)
    thirds = [set(range(first, SESSIONS, 3)) for first in range(3)]

    def passes(count: int) -> None:
        for _ in range(count * (PASS_SLICES + 1)):
            worker.tick()

    passes(2)
    wait_until("questions about all", lambda: len(rules.asked) == 3, WAIT_SECONDS)
    assert all(session.consumers for session in worker.sessions)
    policy.remove("credential/uid:7")
    policy.remove("binding/ann")
    passes(2)
    assert worker.ended == thirds[0]
    gone = {session.number for session in worker.sessions if not session.consumers}
    assert gone == thirds[1], "closed sessions keep theirs here"
    policy.put(Binding("ann", "user:ann", "consumer", "/shop/*"))
    passes(1)
    rules.let.set()

    def is_decided() -> bool:
        worker.tick()
        return not worker.checks.is_busy

    wait_until("all answers", is_decided, WAIT_SECONDS)
    gone = {session.number for session in worker.sessions if not session.consumers}
    assert gone == thirds[1] | thirds[2], "a handle was lost"
    passes(2)  # what was closed is told with a pass
    told = Counter[str]()
    for line in worker.denials.take(sys.maxsize)[0]:
        told[line.action] += line.count
    assert told["consumer"] == SESSIONS and told["session"] == len(thirds[0])


@pytest.mark.parametrize("changes_on", [False, True])
def test_a_revoked_key_ends_all_its_sessions_however_often_rights_change(changes_on: bool) -> None:
    worker = Worker()
    for _ in range(2 * PASS_SLICES + 4):
        worker.tick()
    while worker.checks.is_busy:  # one pass for all, so that they are one line
        worker.tick()
    assert not worker.ended
    worker.access.policy.remove("credential/uid:7")
    for _ in range(2 * PASS_SLICES + 8):  # two passes
        worker.tick()
        if changes_on:
            worker.access.policy.changes.all()
    assert len(worker.ended) == SESSIONS
    (line,), lost = worker.denials.take(0)
    assert (line.event, line.action, line.count, lost) == ("closed", "session", SESSIONS, 0)


def test_many_handles_of_one_session_are_looked_at_within_two_passes() -> None:
    """Also those that were opened since the last change."""
    worker = Worker()
    while worker.checks.is_busy:
        worker.tick()
    (session, *_) = worker.sessions
    for number in range(20 * SESSIONS):
        sub = SimpleNamespace(partition_id=1, name="s")
        session.consumers[number] = SimpleNamespace(
            consumer_id=number, number=number, subscription=sub
        )
    worker.access.policy.changes.all()  # no one has a right
    for _ in range(2 * PASS_SLICES):
        worker.tick()
    assert not session.consumers, f"{len(session.consumers)} go on"


def test_a_change_is_looked_at_where_it_may_count_alone() -> None:
    """Sessions of others are looked at, and nothing that they have open."""
    worker = Worker()
    policy = worker.access.policy
    policy.put(Principal(name="ben", groups=["ops"]))
    policy.put(Credential(credential="uid:8", principal="ben"))
    for session in worker.sessions[::2]:
        session.proof, session.principal = "uid:8", "ben"
    for session in worker.sessions:
        sub = SimpleNamespace(partition_id=1, name="s")
        session.consumers[1] = SimpleNamespace(consumer_id=1, number=1, subscription=sub)
    bindings = [Binding(name, f"user:{name}", "consumer", "/shop/*") for name in ("pia", "ben")]
    for binding in bindings:
        policy.put(binding)
    while worker.checks.is_busy:
        worker.tick()
    asked: list[str] = []
    check = worker.access.check

    def note(principal: str, *what: Any, **how: Any) -> None:
        asked.append(principal)
        check(principal, *what, **how)

    worker.access.check = note  # type: ignore[method-assign]

    def turns() -> set[str]:
        asked.clear()
        while worker.checks.is_busy:
            worker.tick()
        return set(asked)

    policy.put(Binding("kim", "user:kim", "consumer", "cluster"))
    assert not turns()
    policy.put(Binding("ops", "group:ops", "producer", "cluster"))
    assert turns() == {"ben"}
    policy.put(Role("other", [Permission.LOOKUP]))
    assert turns() == {"pia", "ben"}
    worker.access.loads += 1
    assert turns() == {"pia", "ben"}
    assert all(session.consumers for session in worker.sessions) and not worker.ended
    policy.remove("binding/pia")
    policy.remove("credential/uid:8")
    assert turns() == {"pia"}
    assert {session.number for session in worker.sessions if not session.consumers} == set(
        range(1, SESSIONS, 2)
    )
    assert worker.ended == set(range(0, SESSIONS, 2))


def test_a_change_is_looked_at_inside_its_scope_alone() -> None:
    worker = Worker()
    policy, (session, *_) = worker.access.policy, worker.sessions
    worker.topics = {1: "/shop/orders", 2: "/shop/returns", 3: "/office/orders"}
    for number in worker.topics:
        sub = SimpleNamespace(partition_id=number, name="s")
        consumer = SimpleNamespace(consumer_id=number, subscription=sub)
        session.consumers[number] = consumer
    policy.put(Binding("all", "user:pia", "consumer", "/*/*"))
    asked: list[str] = []
    check = worker.access.check

    def note(principal: str, permission: Permission, resource: str, **how: Any) -> None:
        asked.append(resource)
        check(principal, permission, resource, **how)

    worker.access.check = note  # type: ignore[method-assign]

    def looked_at() -> list[str]:
        asked.clear()
        while worker.checks.is_busy:
            worker.tick()
        return sorted(asked)

    every = ["/office/orders#s", "/shop/orders#s", "/shop/returns#s"]
    assert looked_at() == every
    places = {
        "/shop/orders": every[1:2], "/shop/orders#s*": every[1:2], "/shop/*": every[1:],
        "namespace:office": every[:1], "namespace:*": every, "cluster": every, "subject:shop*": [],
    }  # fmt: skip
    for scope, expected in places.items():
        policy.put(Binding("some", "user:pia", "consumer", scope))
        assert looked_at() == expected, scope
        policy.remove("binding/some")
        assert looked_at() == expected, f"{scope}, removed"
    assert len(session.consumers) == len(every)
    policy.put(Binding("some", "user:pia", "consumer", "/shop/*"))
    policy.put(Binding("all", "user:pia", "consumer", "/shop/*"))
    assert looked_at() == every, "the scope before counts, too"
    assert sorted(session.consumers) == [1, 2]


def test_credentials_that_end_are_seen_while_rights_of_others_change() -> None:
    worker = Worker()
    policy, now = worker.access.policy, [0]
    worker.access.clock = Shifting(now)
    policy.put(Credential(credential="uid:7", principal="pia", expires_ns=5))
    while worker.checks.is_busy:
        worker.tick()
    assert not worker.ended
    now[0] = 5
    for tick in range(2 * SECOND_NS // TICK_NS):
        policy.put(Binding("b", "user:kim", ("consumer", "producer")[tick % 2], "cluster"))
        worker.tick()
    assert len(worker.ended) == SESSIONS, "they go on for 2 s"
