"""Bugs planted in a worker's turn over rings are where they should be; `turn_mutants.py` runs what must find them."""

from __future__ import annotations

import pytest

from tests.workers.turn_mutants import MUTANTS, count


@pytest.mark.parametrize("name", MUTANTS)
def test_the_line_is_there_once(name: str) -> None:
    mutant = MUTANTS[name]
    assert count(mutant) == 1, f"give the mutant {name} another line of {mutant.path}"
    assert mutant.before != mutant.after


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 10
