"""Waits of clients: what they say, and that they end."""

from __future__ import annotations

import itertools
import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link.answers import Answers
from danube_fast.client.link.lookout import Lookout
from danube_fast.client.link.pump import Pump
from danube_fast.client.values.limits import SLICE_NS
from danube_fast.clock import MILLISECOND_NS, SystemClock
from danube_fast.net import protocol as p

TOPIC = "/default/t"
TEXT = "the authorizer gate could not decide; try again"
REFUSALS = 4
LONG_SECONDS = 20


@pytest.mark.parametrize("kind", ["lookup", "producer", "consumer"])
def test_an_open_that_is_refused_for_a_while_says_why(
    broker: Any,
    client: danube_fast.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    name = {"lookup": "_on_lookup", "producer": "_on_openproducer", "consumer": "_on_subscribe"}[
        kind
    ]
    serve, refused = getattr(broker, name), list[Any]()

    def refuse(session: Any, identity: bytes, command: Any) -> None:
        if len(refused) < REFUSALS:
            refused.append(command)
            broker.reply(identity, p.Error(command.request, danube_fast.Unavailable.code, TEXT))
        else:
            serve(session, identity, command)

    def open_one() -> None:
        if kind != "consumer":
            client.producer(TOPIC).close()
        else:
            client.consumer(TOPIC, subscription="s").close()

    client.producer(TOPIC).close()
    setattr(broker, name, refuse)
    open_one()
    assert not caplog.records, "a short wait is told"
    refused.clear()
    monkeypatch.setattr("danube_fast.client.link.calls.WAIT_TOLD_NS", 1)
    open_one()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{TOPIC} is asked for again and again: {TEXT}"
    assert len(refused) == REFUSALS


def test_a_wait_ends_in_time_while_another_thread_calls_back() -> None:
    """Callbacks that another thread is at are its own: they keep no wait."""
    pump, begun, may_end = Pump(SystemClock()), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        may_end.wait(LONG_SECONDS)

    def call_back() -> None:
        with pump.lock:
            pump.run_callbacks()

    outcomes = list[bool]()

    def wait() -> None:
        limit_ns = pump.clock.monotonic_ns() + 50 * MILLISECOND_NS
        outcomes.append(pump.wait(lambda: False, limit_ns))

    pump.callbacks += [(slow, ()), (begun.set, ())]
    caller, waiter = (threading.Thread(target=each, daemon=True) for each in (call_back, wait))
    caller.start()
    assert begun.wait(LONG_SECONDS), "no callback was called"
    waiter.start()
    waiter.join(LONG_SECONDS)
    may_end.set()
    assert outcomes == [False], f"a wait of 50 ms has not ended after {LONG_SECONDS} s"
    caller.join(LONG_SECONDS)
    with pump.lock:
        pump.close()


@pytest.mark.parametrize(
    ("took_ns", "limits"),
    [(SLICE_NS, [SLICE_NS, SLICE_NS, 5]), (3 * SLICE_NS, [SLICE_NS]), (0, [SLICE_NS] * 3)],
    ids=["on_time", "late", "clock_stands_still"],
)
def test_a_long_sleep_of_a_leader_is_made_of_short_ones(
    monkeypatch: pytest.MonkeyPatch, took_ns: int, limits: list[int]
) -> None:
    """So that Python hears of signals in between."""
    clock: Any = SimpleNamespace(monotonic_ns=itertools.count(0, took_ns).__next__)
    slept: list[int] = []
    with select.epoll() as epoll:
        lookout = Lookout(epoll.fileno(), Answers().address, 0, [])
        monkeypatch.setattr(lookout, "sleep", lambda row, limit_ns: slept.append(limit_ns) or 0)
        assert lookout.wait(2 * SLICE_NS + 5, clock) == 0
    assert slept == limits
