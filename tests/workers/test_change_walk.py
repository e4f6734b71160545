"""One change of a binding on its way through a worker: the numbers of calls may only fall.

What is not in the caches costs most of its turn, so each function on the way counts. A turn without a change makes some of
the calls, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube_fast.broker import messages as m
from danube_fast.security.records import Binding
from danube_fast.workers.process.security_copy import SecurityCopy
from tests.workers.test_access_checks import TICK_NS, Worker
from tests.workers.test_mailbox import Pair
from tests.workers.walk import Tracer

MESSAGE_CALLS = 20
"""Of one change, with those of a turn that finds nothing."""
PASS_CALLS = 20
"""Of the look at what four clients have open, none of whose rights have changed, with those of a tick without."""
HANDLE_CALLS = 5
"""Of the look at one handle of a client whose rights have changed elsewhere, with its part of the ticks."""
SUBJECT = "user:kim"


def calls_of(work: Callable[[], Any]) -> tuple[int, list[str]]:
    """Count the calls of functions of the product; which ones there were."""
    tracer = Tracer()
    sys.setprofile(tracer)
    try:
        work()
    finally:
        sys.setprofile(None)
    found = tracer.end()
    return found["calls"], found["functions"]


class Copy:
    """A worker whose coordinator tells of changes, with four sessions."""

    def __init__(self) -> None:
        pair = self.pair = Pair()
        pair.ring_01.record_bytes_max = 1000
        self.worker = Worker()
        del self.worker.sessions[4:]
        access = self.access = self.worker.access
        boot: Any = SimpleNamespace(mailbox=pair.one, clock=pair)
        SecurityCopy(boot, access)
        access.is_loaded = True
        while self.worker.checks.is_busy:
            self.worker.tick()

    def change(self, *made: Binding, removed: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        """Count the calls of the turn that takes a change."""
        values, version = [msgspec.json.encode(each) for each in made], self.access.policy.version
        message = m.SecurityChanged(version + 1, version, values, list(removed))
        self.pair.zero.notify(1, message)
        now_ns = self.pair.now_ns  # no time has passed: nothing else is due
        counted = calls_of(lambda: self.pair.one.do_work(now_ns))
        assert self.access.policy.version == version + 1, "the change did not come"
        return counted

    def tick(self) -> tuple[int, list[str]]:
        """Count the calls of a tick."""
        self.worker.now_ns += TICK_NS
        return calls_of(lambda: self.worker.checks.do_work(self.worker.now_ns))


@pytest.mark.parametrize("scope", ["/shop/orders", "/shop/orders#s", "namespace:shop"])
def test_a_change_makes_few_calls(scope: str) -> None:
    copy = Copy()
    binding = Binding("b", SUBJECT, "producer", scope)
    for _ in range(2):
        for made, removed in (((binding,), ()), ((), ("binding/b",))):
            calls, functions = copy.change(*made, removed=removed)
            assert calls <= MESSAGE_CALLS, functions
            calls, functions = copy.tick()
            assert calls <= PASS_CALLS, functions
    assert not copy.worker.checks.is_busy


def test_handles_where_nothing_has_changed_cost_few_calls() -> None:
    copy = Copy()
    (session, *_) = copy.worker.sessions
    calls: list[int] = []
    for count in (100, 200):
        for number in range(count):
            sub = SimpleNamespace(partition_id=number, name="s")
            session.consumers[number] = SimpleNamespace(consumer_id=number, subscription=sub)
        copy.change(Binding("b", "user:pia", "consumer", "/office/*"), removed=("binding/b",))
        calls.append(0)
        while copy.worker.checks.is_busy:
            calls[-1] += copy.tick()[0]
        assert len(session.consumers) == count
    assert calls[1] - calls[0] <= 100 * HANDLE_CALLS, calls
