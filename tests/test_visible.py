"""Fronts of names: the narrowest of some, and those that two have in common, beside what they mean."""

from __future__ import annotations

import random

import pytest

from danube_fast.visible import common, narrowest


@pytest.mark.parametrize("seed", range(300))
def test_fronts_are_what_names_begin_with(seed: int) -> None:
    draw = random.Random(seed)

    def word(most: int) -> str:
        return "".join(draw.choice("ab") for _ in range(draw.randrange(most)))

    for _ in range(20):
        given = [word(5) for _ in range(draw.randrange(6))]
        some, others = narrowest(given), narrowest(word(5) for _ in range(draw.randrange(6)))
        both = common(some, others)
        assert both == narrowest(both) and some == narrowest(some)
        for name in (word(7) for _ in range(20)):
            assert name.startswith(some) == name.startswith(tuple(given))
            assert name.startswith(both) == (name.startswith(some) and name.startswith(others))
