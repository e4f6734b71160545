"""Keys in blocks beside a sorted list."""

from __future__ import annotations

import random

import pytest

from danube_fast.security.ordered_keys import BLOCK_KEYS_MAX, OrderedKeys


@pytest.mark.parametrize("seed", range(5))
def test_they_are_as_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    keys, beside = OrderedKeys(), set[str]()
    for target in (8 * BLOCK_KEYS_MAX, BLOCK_KEYS_MAX // 2, 4 * BLOCK_KEYS_MAX, 0):
        while len(beside) != target:
            key = f"{rng.choice('abc')}/{rng.randrange(20 * BLOCK_KEYS_MAX)}"
            if len(beside) > target:
                key = min((each for each in beside if each >= key), default=min(beside))
                beside.remove(key)
                keys.remove(key)
            elif key not in beside:
                beside.add(key)
                keys.add(key)
            if rng.random() < 0.01:
                after, limit = rng.choice(["", key, "b/", "c/99999", "z"]), rng.randrange(2000)
                expected = sorted(each for each in beside if each > after)[:limit]
                assert keys.behind(after, limit) == expected, (seed, after, limit)
        assert keys.behind("", 10**6) == sorted(beside)
        assert max(map(len, keys._blocks)) <= BLOCK_KEYS_MAX
    assert vars(keys) == vars(OrderedKeys())
