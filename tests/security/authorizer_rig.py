"""An authorizer that answers when it is let, the loop that waits for it, and a clock that is put forward."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    PermissionDenied,
)
from danube_fast.security.authorizers import (
    AskedAuthorizer,
)
from danube_fast.security.records import BOOTSTRAP, Binding, Principal
from danube_fast.types import Permission
from danube_fast.undecided import when_decided
from danube_fast.workers.process.access import Access
from tests.workers.broker import wait_until

P = Permission
WAIT_SECONDS = 30


class Loop:
    """A loop that answers wake; `turn` does what it was handed, in one thread."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.handed: deque[Callable[[], None]] = deque()
        access.serve_from(self.handed.append)

    def turn(self) -> None:
        for _ in range(len(self.handed)):
            self.handed.popleft()()
        self.access.do_work(self.access.clock.monotonic_ns())

    def until(self, what: str, condition: Callable[[], Any]) -> None:
        def met() -> Any:
            self.turn()
            return condition()

        wait_until(what, met, WAIT_SECONDS)

    def outcome(self, principal: str, permission: Permission, resource: str) -> DanubeError | None:
        """What the principal is told at last; None: it may."""
        ends: list[DanubeError | None] = []

        def step() -> None:
            self.access.authorize(principal, permission, resource)
            ends.append(None)

        when_decided(step, ends.append)
        self.until("the answer", lambda: ends)
        return ends[0]

    def permits(self, principal: str, permission: Permission, resource: str) -> bool:
        self.outcome(principal, permission, resource)
        return self.access.permits(principal, permission, resource)


class Gate:
    """Answers when it is let, by resource; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.let: Counter[str] = Counter()
        self.denies: set[str] = set()
        self.shows: Any = ["cluster"]
        self.closed = False
        self.raises: Exception | None = None
        self.changed = threading.Condition()

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        with self.changed:
            self.asked.append((principal, permission, resource))
            self.changed.wait_for(lambda: self.closed or self.let[resource] or self.let["*"])
            self.let[resource] -= self.let[resource] > 0
        if self.raises is not None:
            raise self.raises
        if resource in self.denies:
            raise PermissionDenied(f"{resource} is denied")

    def lookup_scopes(self, principal: str) -> Any:
        """Those of `shows`, when they are let by the name of the principal."""
        with self.changed:
            self.asked.append((principal, "lookup", "scopes"))
            self.changed.wait_for(lambda: self.closed or self.let[principal] or self.let["*"])
            self.let[principal] -= self.let[principal] > 0
        if self.raises is not None:
            raise self.raises
        return self.shows

    def open(self, resource: str = "*", count: int = 1) -> None:
        with self.changed:
            self.let[resource] += count
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


@contextmanager
def opened_gate(gate: Gate | None = None) -> Iterator[Gate]:
    """A gate, and the end of the threads that stand before it."""
    made, before = gate or Gate(), set(threading.enumerate())
    try:
        yield made
    finally:
        made.close()

    def are_gone() -> bool:
        own = set(threading.enumerate()) - before
        return all(thread.name != "authorizer" for thread in own)

    wait_until("the end of the threads", are_gone, WAIT_SECONDS)


class Moved(SystemClock):
    """A clock that is put forward."""

    moved_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.moved_ns


class Stopped(Moved):
    """A clock that is put forward, and else stands still."""

    def monotonic_ns(self) -> int:
        return self.moved_ns


def loop_with(outer: AskedAuthorizer | None) -> Loop:
    """What a process knows where pia and ann may do everything by their roles."""
    access = Access(SystemClock() if outer is None else outer._clock, outer)
    access.is_loaded = True
    access.confirm()
    for user in ("pia", "ann", BOOTSTRAP):
        access.policy.put(Principal(user))
        access.policy.put(Binding(user, f"user:{user}", "admin", "cluster"))
    access.policy.put(Principal("nick"))
    return Loop(access)


class Versions(Gate):
    """Rules with a number: the first let all, the others none. Each answers when its number is let."""

    version = 1

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        version = self.version
        super().authorize(principal, permission, str(version))
        if version > 1:
            raise PermissionDenied("the new rules let none")
