"""The workloads about history, tiny, over real processes; and that they would see what they look for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danube_fast.bench import floors
from danube_fast.bench.command import Choices, measure
from danube_fast.bench.load.payloads import LIST_MESSAGES
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures
from danube_fast.bench.workloads import catalog
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.bench.workloads.history import bare, offset, reads, topics, turn_probe
from danube_fast.bench.workloads.history.sink import Sink
from danube_fast.clock import SystemClock
from danube_fast.errors import AlreadyExists, DataLoss, FailedPrecondition
from danube_fast.history.stores.probe import probe_store

BOTH_WAYS = topics.there_and_back
ROWS = [name for name in WORKLOADS if name.startswith("history-")]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not there and back; without waiting for what is due later."""
    monkeypatch.setattr(
        topics, "there_and_back", lambda runs: {name: [each()] for name, each in runs.items()}
    )
    monkeypatch.setattr(reads, "FLUSH_SECONDS", 1)


def run(rig: Rig, name: str, **changes: Any) -> Figures:
    figures = WORKLOADS[name].run(rig, planned(name, **changes))
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    return figures


# ---------------------------------------------------------------- every row


@pytest.mark.parametrize("name", ROWS)
def test_each_has_a_floor(name: str) -> None:
    assert [case for case in floors.CASES if case.workload == name]


long_row = pytest.mark.skipif(
    "DANUBE_BENCH_LONG" not in os.environ, reason="a row of half a minute; DANUBE_BENCH_LONG=1"
)


@pytest.mark.parametrize(
    "name", ["history-upload", pytest.param("history-upload-s3", marks=long_row)]
)
def test_uploads_beside_a_bare_loop(rig: Rig, name: str) -> None:
    figures = run(rig, name, messages=20_000)
    extra = figures.extra
    assert extra["vs_bare"] == pytest.approx(extra["upload_mb_per_s"] / extra["bare_mb_per_s"])
    assert extra["upload_mb_per_s"] > (figures.mb_per_s or 0) > 0


@long_row
def test_publishing_beside_an_upload(rig: Rig) -> None:
    figures = run(rig, "history-publish", messages=20_000)
    extra, rate = figures.extra, figures.messages_per_s or 0.0
    assert extra["vs_no_upload"] == pytest.approx(rate / extra["no_upload_per_s"])
    ratio = extra["throttled_per_s"] / extra["no_upload_per_s"]
    assert extra["throttled_vs_no_upload"] == pytest.approx(ratio)


def test_a_lapped_consumer_of_history(rig: Rig) -> None:
    changes = {"messages": 90_000, "message_bytes": 1000, "rate": 3000.0, "transport": "shm"}
    figures = run(rig, "history-lapped", **changes)
    assert (figures.messages or 0) > 90_000, "the producer did not go on beside the consumer"
    extra = figures.extra
    assert extra["vs_log"] == pytest.approx((figures.messages_per_s or 0) / extra["log_per_s"])


def test_a_consumer_that_passes_the_seam(rig: Rig) -> None:
    figures = run(rig, "history-seam", messages=60_000, message_bytes=1000)
    extra = figures.extra
    assert reads.SEAM_SHARES[0] < extra["history_share"] < reads.SEAM_SHARES[1]
    assert extra["vs_log"] == pytest.approx((figures.messages_per_s or 0) / extra["log_per_s"])


def test_offsets_amid_many_objects(rig: Rig) -> None:
    figures = run(rig, "history-offset", messages=200)
    extra = figures.extra
    assert extra["objects"] == 200
    assert 0 < extra["first_ms"] <= extra["first_ms_max"] and extra["cold_ms"] > 0


@long_row
def test_round_trips_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset, "READS", 5)
    extra = run(rig, "history-offset-s3", messages=60).extra
    assert 1 <= extra["requests"] <= 3, "the object's blocks, and one of them"
    assert extra["cold_requests"] > extra["requests"], "the manifest, too"


@long_row
def test_turns_of_both_kinds(rig: Rig) -> None:
    figures = run(rig, "history-turns", messages=30_000, consumers=2)
    extra = figures.extra
    assert extra["turns"] > 0
    ratio = extra["history_turn_p99_us"] / extra["log_turn_p99_us"]
    assert extra["turn_ratio"] == pytest.approx(ratio)
    assert 0 < extra["log_turn_p50_us"] <= extra["log_turn_p99_us"] <= extra["log_turn_p999_us"]


# ---------------------------------------------------------------- what they would see


def test_what_was_not_published_is_missed_in_the_store(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "STREAMS", "tests.bench.lossy")
    with pytest.raises(DataLoss, match=f"no partition of the log .* has {3 * LIST_MESSAGES}"):
        run(rig, "history-upload", messages=3 * LIST_MESSAGES)


def test_what_the_store_has_wrong_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = topics.compare

    def altered(figures: Figures, store: Any, topic: str, payloads: Any) -> None:
        payloads._map[100] ^= 1
        try:
            compare(figures, store, topic, payloads)
        finally:
            payloads._map[100] ^= 1

    monkeypatch.setattr(topics, "compare", altered)
    plan = planned("history-upload", messages=LIST_MESSAGES)
    figures = WORKLOADS["history-upload"].run(rig, plan)
    assert (figures.lost, figures.corrupted) == (1, 1) and not figures.is_faultless


# ---------------------------------------------------------------- without SeaweedFS


def test_without_seaweed_rows_are_left_out_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = WORKLOADS["history-offset-s3"]._replace(why_absent=lambda: "it is not installed")
    monkeypatch.setitem(catalog.WORKLOADS, "history-offset-s3", absent)
    assert not [c for c in floors.select([]) if c.workload == "history-offset-s3"]
    with pytest.raises(FailedPrecondition, match="history-offset-s3 cannot run here: it is not"):
        floors.select(["history-offset-s3"])
    notes: list[str] = []
    with pytest.raises(FailedPrecondition, match="cannot run here"):
        measure(Choices(["history-offset-s3"], {}), notes.append, lambda _: None)


# ---------------------------------------------------------------- parts


def test_runs_beside_each_other_go_there_and_back() -> None:
    order: list[str] = []

    def noted(name: str) -> Any:
        return lambda: order.append(name) or Figures(workload=name)

    found = BOTH_WAYS({"a": noted("a"), "b": noted("b")})
    assert order == ["a", "b", "b", "a"]
    assert [each.workload for each in found["b"]] == ["b", "b"]


def test_a_sink_is_a_store_that_keeps_its_promises(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "sink", SystemClock())
    probe_store(sink)
    upload = sink.begin("objects/1/1")
    second = sink.put_part(upload, 2, 5, b"world")
    first = sink.put_part(upload, 1, 0, b"hello")
    sink.complete(upload, [first, second])
    assert sink.read("objects/1/1", 3, 4) == b"lowo" and sink.read("objects/1/1") == b"helloworld"
    info = sink.head("objects/1/1")
    assert info is not None and info.size == 10
    with pytest.raises(AlreadyExists):
        sink.create("objects/1/1", b"")
    assert list((tmp_path / "sink").rglob("1")) == [], "frames are in memory"


def test_a_percentile_is_the_end_of_its_bucket() -> None:
    counts = np.zeros(turn_probe.BUCKETS, np.int64)
    counts[[16 * 10, 16 * 14]] = 98, 2
    assert turn_probe.percentile_us(counts, 50) == pytest.approx(2 ** (10 + 1 / 16) / 1000)
    assert turn_probe.percentile_us(counts, 99) == pytest.approx(2 ** (14 + 1 / 16) / 1000)


def test_ranges_of_frames_join_up_to_what_is_read_at_once() -> None:
    ranges: list[bare.Range] = []
    for place in (("a", 0, 10), ("a", 10, 5), ("a", 20, 5), ("b", 25, 5), ("b", 30, 4 << 20)):
        bare._extend(ranges, place)
    assert ranges == [("a", 0, 15), ("a", 20, 5), ("b", 25, 5), ("b", 30, 4 << 20)]


def test_the_rate_counts_from_behind_the_credit() -> None:
    figures = Figures(workload="history-seam", message_bytes=100)
    arrivals = [(100, 0), (200, 1_000_000_000), (400, 3_000_000_000)]
    reads.set_rate(figures, {"arrivals": arrivals}, 150)
    assert (figures.messages_per_s, figures.mb_per_s) == (100.0, 0.01)
    reads.set_rate(figures, {"arrivals": arrivals}, 1_000_000)
    assert figures.messages_per_s == 100.0, "half of them at most are left out"
