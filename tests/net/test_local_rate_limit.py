"""How often a local user comes in over ipc."""

from __future__ import annotations

from danube_fast.clock import SECOND_NS
from danube_fast.net.local_rate_limit import PER_SECOND, LocalRateLimit

AT_ONCE = 1000


def count(limit: LocalRateLimit, proof: str, now: int, tries: int = 2 * AT_ONCE) -> int:
    return sum(limit.admits(proof, now) for _ in range(tries))


def test_many_at_once_then_some_each_second() -> None:
    limit = LocalRateLimit(AT_ONCE)
    assert count(limit, "uid:1", 100 * SECOND_NS) == AT_ONCE
    assert count(limit, "uid:1", 100 * SECOND_NS + SECOND_NS // 2) == PER_SECOND // 2
    assert count(limit, "uid:1", 110 * SECOND_NS + SECOND_NS // 2) == 10 * PER_SECOND
    assert count(limit, "uid:1", (100 + 10 * AT_ONCE) * SECOND_NS) == AT_ONCE, (
        "none of before counts"
    )


def test_users_do_not_count_for_each_other() -> None:
    limit = LocalRateLimit(AT_ONCE)
    assert count(limit, "uid:1", 0) == count(limit, "uid:2", 0) == AT_ONCE


def test_users_are_forgotten() -> None:
    limit = LocalRateLimit(AT_ONCE)
    for number in range(1000):
        assert limit.admits(f"uid:{number}", number * SECOND_NS)
    assert len(limit._free_ns) < 3
