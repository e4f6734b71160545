"""The heartbeat of a connection: for how long the broker is silent, be its answer read by a kernel or by Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from danube_fast.client.link.answers import Answers, answer
from danube_fast.client.link.heartbeat import Heartbeat
from danube_fast.client.link.pump import Pump
from danube_fast.clock import SystemClock

LINK = 3


@pytest.fixture
def pump() -> Iterator[Pump]:
    made = Pump(SystemClock())
    yield made
    made.close()


def rows_of(answers: Answers) -> int:
    """How many rows were ever used."""
    return int(answers._words[0])


def test_silence_counts_from_the_first_heartbeat_that_went_unanswered(pump: Pump) -> None:
    heartbeat = Heartbeat(pump, LINK)
    assert heartbeat.silent_ns(1000, 0) == 0, "none was sent"
    heartbeat.beat(1000, 1)
    assert heartbeat.silent_ns(1500, 400) == 500
    heartbeat.beat(1500, 2)
    assert heartbeat.silent_ns(2000, 400) == 1000


def test_whatever_is_heard_ends_the_silence(pump: Pump) -> None:
    heartbeat = Heartbeat(pump, LINK)
    heartbeat.beat(1000, 1)
    assert heartbeat.silent_ns(1500, 1000) == 0
    heartbeat.beat(1500, 2)
    assert heartbeat.silent_ns(2500, 1000) == 1000


def test_an_answer_that_a_kernel_has_read_ends_it_too(pump: Pump) -> None:
    heartbeat = Heartbeat(pump, LINK)
    heartbeat.beat(1000, 7)
    answer(heartbeat._answer.row, 0, 0)
    assert heartbeat.silent_ns(1500, 0) == 0
    heartbeat.beat(1500, 8)
    assert heartbeat.silent_ns(2000, 0) == 500, "the answer to an older one counts once"
    assert rows_of(pump.answers) == 1


def test_a_row_is_given_back(pump: Pump) -> None:
    for number in range(5):
        heartbeat = Heartbeat(pump, LINK + number)
        heartbeat.beat(1000, 1)
        heartbeat.forget()
        assert heartbeat.silent_ns(9000, 0) == 0
    assert rows_of(pump.answers) == 1


def test_without_a_row_that_is_free_others_read_the_answer(pump: Pump) -> None:
    beats = [Heartbeat(pump, LINK) for _ in range(300)]
    for number, heartbeat in enumerate(beats):
        heartbeat.beat(1000, 1 + number)
    assert [each.silent_ns(1500, 1200) for each in beats] == [0] * 300
    assert {each.silent_ns(1500, 0) for each in beats} == {0}


def test_answers_that_python_reads_use_no_rows_up(pump: Pump) -> None:
    """As in an event loop, where no leader sleeps in a kernel."""
    heartbeat = Heartbeat(pump, LINK)
    for number in range(300):
        heartbeat.beat(1000 * number + 1, number + 1)
        assert heartbeat.silent_ns(1000 * number + 500, 1000 * number + 400) == 0
    assert rows_of(pump.answers) == 1


def test_a_row_that_a_leader_may_answer_yet_is_not_used_again(pump: Pump) -> None:
    heartbeat = Heartbeat(pump, LINK)
    heartbeat.beat(1000, 1)
    pump._asleep = True
    assert heartbeat.silent_ns(1500, 0) == 500
    heartbeat.beat(1500, 2)
    pump._asleep = False
    assert rows_of(pump.answers) == 2
