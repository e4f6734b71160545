"""One callback for several things: once, with the first error, and never within the block that adds them."""

from __future__ import annotations

import pytest

from danube_fast.countdown import Countdown
from danube_fast.errors import DanubeError, InvalidArgument, Unavailable


def test_it_ends_when_all_have_ended_and_nothing_more_is_added() -> None:
    ends: list[DanubeError | None] = []
    with Countdown(ends.append) as countdown:
        countdown.add()(None)
        second = countdown.add()
        assert ends == []
    assert ends == []
    second(None)
    assert ends == [None]


def test_nothing_to_wait_for_ends_it_at_once() -> None:
    ends: list[DanubeError | None] = []
    with Countdown(ends.append):
        pass
    assert ends == [None]


def test_the_first_error_ends_it_and_nothing_else_does() -> None:
    ends: list[DanubeError | None] = []
    with Countdown(ends.append) as countdown:
        each = [countdown.add() for _ in range(3)]
    first = Unavailable("the disk")
    for done, error in zip(each, (first, InvalidArgument("too late"), None), strict=True):
        done(error)
    assert ends == [first]


def test_an_exception_in_the_block_goes_to_its_caller_alone() -> None:
    ends: list[DanubeError | None] = []
    countdown = Countdown(ends.append)

    def add_and_fail() -> None:
        with countdown:
            countdown.add()
            raise InvalidArgument("no such topic")

    with pytest.raises(InvalidArgument):
        add_and_fail()
    countdown.add()(None)
    assert ends == []
