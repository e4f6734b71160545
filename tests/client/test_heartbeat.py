"""The heartbeat of a connection: for how long the broker is silent, whoever has read its answer."""

from __future__ import annotations

from danube_fast.client.link.answers import Answers, answer
from danube_fast.client.link.heartbeat import Heartbeat

LINK = 3


def rows_of(answers: Answers) -> int:
    """How many rows were ever used."""
    return int(answers._words[0])


def test_silence_counts_from_the_first_heartbeat_that_went_unanswered() -> None:
    heartbeat = Heartbeat(Answers(), LINK)
    assert heartbeat.silent_ns(1000, 0) == 0, "none was sent"
    heartbeat.beat(1000, 1)
    assert heartbeat.silent_ns(1500, 400) == 500
    heartbeat.beat(1500, 2)
    assert heartbeat.silent_ns(2000, 400) == 1000


def test_whatever_is_heard_ends_the_silence() -> None:
    heartbeat = Heartbeat(Answers(), LINK)
    heartbeat.beat(1000, 1)
    assert heartbeat.silent_ns(1500, 1000) == 0
    heartbeat.beat(1500, 2)
    assert heartbeat.silent_ns(2500, 1000) == 1000


def test_an_answer_that_a_kernel_has_read_ends_it_too() -> None:
    answers = Answers()
    heartbeat = Heartbeat(answers, LINK)
    heartbeat.beat(1000, 7)
    answer(heartbeat._answer.row, 0, 0)
    assert heartbeat.silent_ns(1500, 0) == 0
    heartbeat.beat(1500, 8)
    assert heartbeat.silent_ns(2000, 0) == 500, "the answer to an older one counts once"
    assert rows_of(answers) == 1


def test_a_row_is_given_back() -> None:
    answers = Answers()
    for number in range(5):
        heartbeat = Heartbeat(answers, LINK + number)
        heartbeat.beat(1000, 1)
        heartbeat.forget()
        assert heartbeat.silent_ns(9000, 0) == 0
        answers.no_leader_looks()
    assert rows_of(answers) == 1


def test_without_a_row_that_is_free_others_read_the_answer() -> None:
    answers = Answers()
    beats = [Heartbeat(answers, LINK) for _ in range(300)]
    for number, heartbeat in enumerate(beats):
        heartbeat.beat(1000, 1 + number)
    assert [each.silent_ns(1500, 1200) for each in beats] == [0] * 300
    assert {each.silent_ns(1500, 0) for each in beats} == {0}
