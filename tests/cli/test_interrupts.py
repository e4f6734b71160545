"""Signals of a command that streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from danube_fast.cli import interrupts
from danube_fast.cli.interrupts import Interrupts, terminable


@pytest.fixture(autouse=True)
def _forget_signals():
    yield
    interrupts._received.clear()


def interrupted(work: Callable[[Interrupts, list[str]], None]) -> list[str]:
    """What `work` noted before it was interrupted."""
    done: list[str] = []

    def streams() -> None:
        with terminable() as signals:
            work(signals, done)

    with pytest.raises(KeyboardInterrupt):
        streams()
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_end_of_what_is_held(number):
    def work(signals: Interrupts, done: list[str]) -> None:
        with signals.held():
            os.kill(os.getpid(), number)
            done.append("all of it")
        done.append("what comes next")

    assert interrupted(work) == ["all of it"]
    assert interrupts.is_terminated() == (number == signal.SIGTERM)


def test_a_second_signal_does_not_wait():
    def work(signals: Interrupts, done: list[str]) -> None:
        with signals.held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("first")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("second")

    assert interrupted(work) == ["first"]


def test_a_signal_interrupts_what_is_not_held_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def work(signals: Interrupts, done: list[str]) -> None:
        with signals.held():
            done.append("held")
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("went on")

    assert interrupted(work) == ["held"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
