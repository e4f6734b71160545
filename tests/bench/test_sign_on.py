"""The benchmark of sign-ons, tiny."""

from __future__ import annotations

import pytest

from danube_fast.bench.sign_on import ALGORITHMS, measure_requests, measure_verification


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_verifications_are_counted(algorithm: str) -> None:
    assert measure_verification(algorithm, 20) > 0


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
def test_requests_are_counted(fresh: bool) -> None:
    found = measure_requests("HS256", fresh=fresh, count=16)
    assert set(found) == {"per_cpu_second", "per_second"} and min(found.values()) > 0
