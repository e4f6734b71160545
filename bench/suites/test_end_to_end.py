"""Messages from a producer process over a broker to a consumer process: every byte compared.

The figures stand in the extra info of the report; `danube-fast bench` prints more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.bench.load.rig import Rig
from danube_fast.bench.reporting.report import json_line
from danube_fast.bench.workloads.catalog import WORKLOADS, planned

FULL_ROUNDS = 5
TINY = {"throughput": 30_000, "messages": 5_000}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--benchmark")
    modes = [("throughput", mode) for mode in ("fsync", "os", "memory", "non_reliable")]
    metafunc.parametrize(
        ("workload", "durability"), [*modes, ("messages", "fsync")] if full else [modes[0]]
    )


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def test_end_to_end(
    benchmark: Any, rig: Rig, full_size: bool, workload: str, durability: str
) -> None:
    changes = {} if full_size else {"messages": TINY[workload]}
    plan = planned(workload, durability=durability, **changes)
    figures = benchmark.pedantic(
        lambda: WORKLOADS[workload].run(rig, plan), rounds=FULL_ROUNDS if full_size else 1
    )
    assert figures.is_faultless, figures
    assert figures.messages_per_s > 0
    benchmark.extra_info.update(json_line(figures))
