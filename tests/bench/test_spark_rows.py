"""The workloads of Spark, tiny, over real processes; and that they would see what they look for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from danube_fast.bench import floors
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.spark import exporting, scan

MESSAGES = 20_000


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.mark.skipif(
    "DANUBE_BENCH_LONG" not in os.environ, reason="a row of half a minute; DANUBE_BENCH_LONG=1"
)
def test_a_scan_is_measured_and_compared(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "ROUNDS", 1)
    monkeypatch.setitem(topics.HISTORY, "history_object_bytes", 1 << 20)
    figures = WORKLOADS["spark-scan"].run(rig, planned("spark-scan", messages=MESSAGES))
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert figures.messages_per_s and figures.messages_per_s > 0
    (case,) = [case for case in floors.CASES if case.workload == "spark-scan"]
    missing = [floor.figure for floor in case.floors if floor.figure not in figures.extra]
    assert not missing
    assert 0 < figures.extra["slice_bytes_share"] < 1


def test_an_export_is_measured_and_compared(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "ROUNDS", 1)
    monkeypatch.setitem(topics.HISTORY, "history_object_bytes", 1 << 20)
    figures = WORKLOADS["spark-export"].run(rig, planned("spark-export", messages=MESSAGES))
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert figures.messages_per_s and figures.messages_per_s > 0
    cases = [case for case in floors.CASES if case.workload == "spark-export"]
    assert [floor.figure for case in cases for floor in case.floors] == [
        "messages_per_s", "export_mb_per_s",
    ]  # fmt: skip
    assert figures.extra["export_mb_per_s"] > 0
