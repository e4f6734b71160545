"""Planted bugs are where they should be, and the simulation finds the quick ones of them."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, ROOT, hunt, places_of

QUICK = ("cursor_past_a_hole", "redelivery_count_not_raised", "frontier_before_its_manifest")
SEEDS_MAX = 60


@pytest.mark.parametrize("name", MUTANTS)
def test_the_line_is_there_once(name: str):
    mutant = MUTANTS[name]
    places = places_of(mutant, ROOT / "danube_fast")
    assert len(places) == 1, f"give the mutant {name} another line: it is in {places}"
    assert mutant.before != mutant.after


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str):
    found = hunt(name, SEEDS_MAX)
    assert found.seeds, f"{name} was not found within {SEEDS_MAX} seeds: {found.text}"


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 15
