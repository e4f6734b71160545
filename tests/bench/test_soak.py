"""The workload `soak`, tiny; and that it would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures
from danube_fast.bench.workloads import soak, soak_roles
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.bench.workloads.soak import Sample, grown, left_behind, slopes
from danube_fast.bench.workloads.soak_roles import LIFE_MESSAGES, Tally, Watch, make
from danube_fast.errors import FailedPrecondition, InvalidArgument, Unavailable


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def test_seconds_are_messages_at_a_rate() -> None:
    from danube_fast.bench.harness import plans

    (plan,) = plans(["soak"], {"seconds": 30.0})
    assert plan.messages / plan.rate == 30
    with pytest.raises(InvalidArgument, match="choose one"):
        plans(["soak"], {"seconds": 30.0, "messages": 5})


def test_a_short_soak(rig: Rig) -> None:
    figures = WORKLOADS["soak"].run(rig, planned("soak", messages=16_000, rate=2000.0))
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    extra = figures.extra
    assert figures.is_faultless and extra["kills"] == 1 and extra["left_behind"] == 0
    assert extra["lives"] >= 2 and extra["requests"] == 2 * extra["lives"]
    assert (figures.messages or 0) > extra["lives"] * LIFE_MESSAGES, "the stander sent nothing"
    assert extra["topics_left"] == 2, "not the stander's two, or some of those that went"
    assert extra["worker_anon_mb"] > 10 and extra["worker_descriptors"] > 10
    assert {"anon_mb_growth", "rss_mb_growth", "descriptors_growth", "threads_growth"} <= set(extra)
    assert not any((rig.folder).glob("t-*"))


def test_a_soak_sees_what_was_lost_or_altered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_HERE", "tests.bench.lossy")
    figures = WORKLOADS["soak"].run(rig, planned("soak", messages=12_000, rate=2000.0))
    assert not figures.is_faultless
    assert (figures.lost or 0) >= LIFE_MESSAGES - soak_roles.PUBLISHED_ALONE
    assert (figures.corrupted or 0) >= 1


def test_what_a_soak_cannot_take(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="at least 20"):
        WORKLOADS["soak"].run(rig, planned("soak", message_bytes=19))
    with Rig("danube://127.0.0.1:1") as other, pytest.raises(FailedPrecondition, match="--url"):
        WORKLOADS["soak"].run(other, planned("soak"))


# ---------------------------------------------------------------- slopes


def samples(grow: Any) -> list[Sample]:
    return [Sample(t, grow(t), 2 * grow(t), 10.0, 3.0) for t in range(301)]


def test_what_fills_up_is_told_from_what_grows() -> None:
    leak, full = samples(lambda t: t / 30), samples(lambda t: min(t, 60) / 30)
    filling = samples(lambda t: min(t, 150) / 30)
    assert slopes(leak, "anon_mb") == pytest.approx((2.0, 2.0, 2.0))
    assert slopes(full, "anon_mb") == pytest.approx((0.0, 0.0, 2.0), abs=1e-9)
    first, second, _ = slopes(filling, "anon_mb")
    assert first > 1 and second == pytest.approx(0.0, abs=1e-9)
    assert slopes(leak[:10], "anon_mb") == slopes([], "anon_mb") == (0.0, 0.0, 0.0)
    figures = Figures(workload="soak")
    grown({"worker": leak, "coordinator": full}, figures)
    assert figures.extra["anon_mb_growth"] == pytest.approx(4.0)
    assert figures.extra["rss_mb_growth"] == pytest.approx(8.0)
    assert figures.extra["descriptors_growth"] == pytest.approx(0.0, abs=1e-9)
    assert figures.extra["worker_anon_mb_per_min_2"] == pytest.approx(2.0)


def test_what_is_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "GONE_SECONDS", 0.1)
    temporary, shm = tmp_path / "t", tmp_path / "shm"
    temporary.mkdir()
    shm.mkdir()
    (shm / "danube-fast-before").touch()
    monkeypatch.setattr(soak, "SHM", shm)
    before = soak._shared_memory()
    assert left_behind(temporary, before, []) == []
    (shm / "danube-fast-ring").touch()
    (temporary / "spool").touch()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert left_behind(temporary, before, [process.pid]) == [
            "file spool", "shared memory danube-fast-ring", f"process {process.pid}",
        ]  # fmt: skip
    finally:
        process.communicate(b"\n")
    assert f"process {process.pid}" not in left_behind(temporary, before, [process.pid])


# ---------------------------------------------------------------- watching


def messages(life: int, count: int, **fields: Any) -> list[danube_fast.Message]:
    return [danube_fast.Message(payload, **fields) for payload in make(life, range(count), 32)]


def test_a_watch_sees_what_is_wrong() -> None:
    tally = Tally()
    watch = Watch("exclusive", 5, 10, tally)
    for message in messages(5, 10, topic="/default/t"):
        watch.note(message)
    assert watch.got == 10 and not any(tally.report().values())
    watch.note(messages(5, 10)[3])
    assert tally.redelivered == 1 and not tally.disordered
    good = messages(5, 1)[0].payload or b""
    for payload in (None, b"", good[:-1], good[:-1] + b"x" + good[-1:], make(6, [0], 32)[0]):
        watch.note(danube_fast.Message(payload))
    assert tally.corrupted == 5 and watch.got == 10


@pytest.mark.parametrize(
    ("type_name", "faults"), [("exclusive", 1), ("key_shared", 0), ("shared", 0)]
)
def test_a_watch_knows_the_order_of_its_type(type_name: str, faults: int) -> None:
    tally = Tally()
    watch = Watch(type_name, 5, 4, tally)
    payloads = make(5, range(4), 32)
    for number in (1, 0, 2, 3):  # 0 and 1 have different keys
        watch.note(
            danube_fast.Message(payloads[number], key=b"%d" % (number % 2), topic="/default/t")
        )
    assert tally.disordered == faults and watch.got == 4
    watch = Watch(type_name, 5, 4, tally)
    for number in (2, 0):  # the same key
        watch.note(danube_fast.Message(payloads[number], key=b"0", topic="/default/t"))
    assert tally.disordered == faults + (type_name != "shared")


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def step() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise Unavailable("away")
        return 5

    assert soak_roles.patiently(step) == 5
    monkeypatch.setattr(soak_roles, "PATIENCE_SECONDS", 0.0)
    tries.clear()
    with pytest.raises(Unavailable):
        soak_roles.patiently(step)
