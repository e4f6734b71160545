"""The workloads about delivery, tiny, over real processes; and that they would see what they look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from danube_fast.bench.floors import CASES
from danube_fast.bench.load.payloads import LIST_MESSAGES
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures
from danube_fast.bench.workloads import crowd, delayed, promotion, share, unacked
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.bench.workloads.delayed import Outage
from danube_fast.errors import DataLoss, DeadlineExceeded, FailedPrecondition

MS = 1_000_000


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def run(rig: Rig, name: str, **changes: Any) -> Figures:
    return WORKLOADS[name].run(rig, planned(name, **changes))


@pytest.mark.parametrize("name", ["failover", "acks", "promotion", "delayed", "unacked", "crowd"])
def test_each_floor_is_a_figure_that_its_workload_finds(name: str) -> None:
    assert [case for case in CASES if case.workload == name]


# ---------------------------------------------------------------- rates beside exclusive


@pytest.mark.parametrize(
    ("name", "others"),
    [("failover", ["exclusive"]), ("acks", ["batch_acks", "same_with_batch_acks"])],
)
def test_rates_beside_others(rig: Rig, name: str, others: list[str]) -> None:
    figures = run(rig, name, messages=25_000)
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    for other in others:
        ratio = (figures.messages_per_s or 0) / figures.extra[f"{other}_per_s"]
        assert figures.extra[f"vs_{other}"] == pytest.approx(ratio)
        assert ratio > 0.01


def test_faults_of_the_runs_beside_count() -> None:
    def found(rate: float, lost: int) -> Any:
        return lambda: Figures(workload="acks", messages_per_s=rate, message_bytes=100, lost=lost)

    figures = share._in_turns(found(50.0, 1), {"other": found(100.0, 2)})
    assert figures.lost == 6, "two runs of each"
    assert figures.extra == {"vs_other": 0.5, "other_per_s": 100.0}
    assert figures.mb_per_s == pytest.approx(0.005)


def test_acks_that_do_nothing_are_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "_HERE", "tests.bench.lossy")
    with pytest.raises(DataLoss, match="counts them as unacked"):
        share._run(rig, planned("acks", messages=25_000), "exclusive", share.ALONE)


# ---------------------------------------------------------------- promotion


def test_promotions(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "ROUNDS", 2)
    monkeypatch.setattr(promotion, "LOAD_SECONDS", 0.3)
    figures = run(rig, "promotion", messages=40_000, rate=500.0)
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert (figures.messages or 0) > 100 and figures.extra["rounds"] == 2
    for name in ("kill", "stop"):
        assert 0 < figures.extra[f"{name}_seconds"] <= figures.extra[f"{name}_seconds_max"]


def test_a_promotion_that_leaves_out_messages_is_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "ROUNDS", 2)
    monkeypatch.setattr(promotion, "LOAD_SECONDS", 0.2)
    monkeypatch.setattr(promotion, "_HERE", "tests.bench.lossy")
    figures = run(rig, "promotion", messages=40_000, rate=500.0)
    assert (figures.corrupted or 0) > 0 and not figures.is_faultless


@pytest.mark.parametrize(
    ("active", "first", "missing", "repeated"),
    [((0, 90, 80), 90, 0, 0), ((0, 90, 80), 80, 0, 0), ((0, 90, 80), 93, 3, 0), ((0, 90, 80), 78, 0, 2)],
    ids=["all acked", "again what was not acked", "a gap", "again what was acked"],
)  # fmt: skip
def test_a_standby_goes_on_where_the_active_one_was(
    active: tuple[int, int, int], first: int, missing: int, repeated: int
) -> None:
    rounds: Any = promotion._Rounds.__new__(promotion._Rounds)
    rounds.missing = rounds.repeated = 0
    rounds.log = log = promotion.Log.__new__(promotion.Log)
    log.rows = np.zeros((2, promotion.WORDS), np.uint64)
    log.rows[0, [promotion.FIRST, promotion.NEXT, promotion.ACKED]] = active
    log.rows[1, promotion.FIRST] = first
    rounds.count(0)
    assert (rounds.missing, rounds.repeated) == (missing, repeated)


# ---------------------------------------------------------------- delayed


def test_delayed_messages_and_a_killed_worker(rig: Rig) -> None:
    figures = run(rig, "delayed", messages=12_000, rate=2000.0, watch_seconds=3.0)
    extra = figures.extra
    assert 5_000 < extra["watched_messages"] < 7_000
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert extra["early"] == 0
    assert 0 < extra["late_p50_ms"] <= extra["late_p99_ms"] <= extra["late_max_ms"]
    assert extra["outage_ms"] > 0 and extra["outage_messages"] > 0
    with Rig("danube://127.0.0.1:1") as other, pytest.raises(FailedPrecondition, match="--url"):
        run(other, "delayed")


def test_delayed_messages_that_never_come_are_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed, "_HERE", "tests.bench.lossy")
    figures = run(rig, "delayed", messages=3 * LIST_MESSAGES, rate=3.0 * LIST_MESSAGES)
    assert figures.lost == LIST_MESSAGES and not figures.is_faultless


def test_delays_that_start_before_all_is_published_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed, "LEAD_SECONDS", 0.0)
    monkeypatch.setattr(delayed, "PUBLISHED_PER_S_MIN", 10_000_000_000)
    with pytest.raises(DeadlineExceeded, match="take fewer --messages"):
        run(rig, "delayed", messages=3_000, rate=3000.0)


def taken(first: list[int], times: list[int]) -> dict[str, Any]:
    return {
        "first": (np.array(first, np.int64) * MS).tobytes(),
        "times": np.array(times, np.int64).tobytes(),
        "corrupted": 0,
    }


def test_lateness_of_an_outage_stands_apart() -> None:
    figures = Figures(workload="delayed")
    due = np.array([100, 200, 4990, 5500, 6300, 7000, 7100, 8000], np.int64) * MS
    came = [103, 210, 6200, 6200, 6305, 7001, 0, 0]
    outage = Outage(5000 * MS, 6000 * MS)
    delayed.figures_of(figures, due, taken(came, [1, 1, 1, 1, 1, 1, 0, 0]), outage, 8000 * MS)
    extra = figures.extra
    assert (figures.lost, figures.duplicated, extra["early"]) == (1, 0, 0)
    assert (extra["late_p50_ms"], extra["late_max_ms"]) == (4.0, 10.0)
    assert extra["watched_messages"] == 7 and extra["outage_messages"] == 2
    assert extra["outage_late_max_ms"] == 200.0
    assert extra["outage_ms"] == 1000.0 and extra["consumer_back_ms"] == 200.0


def test_what_comes_early_or_again_without_an_excuse_is_seen() -> None:
    figures = Figures(workload="delayed")
    due = np.array([100, 200, 4500, 4600, 9000], np.int64) * MS
    came = [99, 201, 4501, 4601, 9001]
    outage = Outage(5000 * MS, 6000 * MS)
    delayed.figures_of(figures, due, taken(came, [1, 2, 2, 3, 2]), outage, 10_000 * MS)
    assert figures.extra["early"] == 1 and figures.extra["redelivered"] == 4
    assert figures.duplicated == 3, "only the third one's ack may have died with the worker"


# ---------------------------------------------------------------- unacked


def test_unacked_messages_are_counted_by_the_broker(rig: Rig) -> None:
    figures = run(rig, "unacked", messages=3_001, consumers=3)
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert figures.extra["idle_anon_mb"] > 10 and figures.extra["unacked_messages"] == 9_003
    assert 0 <= figures.extra["holed_rss_mb"] <= figures.extra["peak_mb"] + 1 < 100


def test_acks_that_do_not_arrive_are_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unacked, "_HERE", "tests.bench.lossy")
    monkeypatch.setattr(unacked, "COUNT_SECONDS", 0.5)
    figures = run(rig, "unacked", messages=2_000, consumers=2)
    assert figures.lost == 2 * 2 * 1000, "of both subscriptions, unacked and lag"


# ---------------------------------------------------------------- crowd


def test_a_crowd_is_there_again(rig: Rig) -> None:
    figures = run(rig, "crowd", topics=30)
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert figures.messages == figures.extra["topics_there"] == 30
    for how in ("orderly", "killed"):
        assert 0 < figures.extra[f"{how}_ready_seconds"] < figures.extra[f"{how}_seconds"]


def test_a_topic_without_its_message_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "_HERE", "tests.bench.lossy")
    with pytest.raises(DataLoss, match="is not the one that was sent"):
        run(rig, "crowd", topics=5)
