"""Lines of one cause are bounded, and none of another."""

from __future__ import annotations

import io
import logging

import pytest

from danube_fast.workers.process import logs


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    logs.configure("worker 0", "text")
    return stream


def say(seconds: float, text: str, *values: object, level: int = logging.ERROR) -> None:
    record = logging.LogRecord("a", level, "f", 1, text, values, None)
    record.created = seconds
    logging.root.handle(record)


def test_a_cause_that_goes_on_has_one_line_a_second(lines: io.StringIO) -> None:
    for turn in range(2000):
        say(1000 + turn / 200, "log %d: sync failed at %d", 3, turn)
    written = lines.getvalue().splitlines()
    assert len(written) == logs.BURST_LINES + 9, "one for each whole second behind the first ten"
    assert written[-1].endswith("(and 199 lines like this one left out)")


def test_other_causes_are_not_held_back(lines: io.StringIO) -> None:
    for _ in range(100):
        say(1000, "one cause %s", "a")
    say(1000, "another cause")
    say(1000, "one cause %s", "a", level=logging.WARNING)
    written = lines.getvalue().splitlines()
    assert len(written) == logs.BURST_LINES + 2


def test_a_clock_that_is_set_back_silences_nothing_for_long(lines: io.StringIO) -> None:
    for _ in range(100):
        say(5000, "a cause")
    say(1000, "a cause")
    say(1001, "a cause")
    assert len(lines.getvalue().splitlines()) == logs.BURST_LINES + 1


def test_texts_that_are_all_different_do_not_fill_the_memory(lines: io.StringIO) -> None:
    for number in range(3 * logs.CAUSES_MAX):
        say(1000, f"text {number}")
    assert len(logging.root.handlers[0].filters[0]._causes) <= logs.CAUSES_MAX  # type: ignore[union-attr]
