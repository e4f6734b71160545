"""Sweeps: names and values are checked, values take turns, brokers have them, medians are shown."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from danube_fast.bench import sweep
from danube_fast.bench.command import Choices
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.sweep import in_turns, parse_sweep
from danube_fast.bench.workloads.catalog import planned

INVALID = 2
"""Exit code."""


def test_values_are_those_of_the_setting() -> None:
    assert parse_sweep("spin_us=0,50, 200") == ("spin_us", [0, 50, 200])
    assert parse_sweep("pin=no,yes").values == [False, True]
    assert parse_sweep("shm_ring_bytes=65536,65536").values == [65536, 65536]


def test_a_plan_has_the_value_for_brokers_and_spinning_for_clients_too() -> None:
    plan = planned("latency", spin_us=7)
    ring = parse_sweep("shm_ring_bytes=65536,131072").plan(plan, 131072)
    assert ring.settings == {"spin_us": 7, "shm_ring_bytes": 131072}
    spun = parse_sweep("spin_us=0,50").plan(plan, 50)
    assert (spun.spin_us, spun.settings) == (50, {"spin_us": 50})
    assert plan.settings == {"spin_us": 7}, "the plan itself stays as it is"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["spin=0,50"], "no setting 'spin' (in --sweep)"),
        (["spin_us=50"], "compares nothing; write SETTING=V1,V2"),
        (["spin_us"], "compares nothing; write SETTING=V1,V2"),
        (["spin_us=0," + ",".join(map(str, range(32)))], "2 to 32 values"),
        (["spin_us=0,"], "spin_us must be a whole number, or written as 10s, and --sweep gives ''"),
        (["spin_us=0,10001"], "spin_us must be from 0 to 10000, and --sweep gives 10001"),
        (["pin=yes,perhaps"], "pin must be true or false, and --sweep gives 'perhaps'"),
        (["session_timeout_ms=500,5000"], "at least twice heartbeat_ms"),
        (["workers=1,2"], "cannot vary workers"),
        (["shm_ring_bytes=65536,131072"], "add --transport shm"),
        (["spin_us=0,50", "--spin-us", "5"], "leave its own option out"),
        (["spin_us=0,50", "--url", "danube://127.0.0.1:1"], "leave --url and --peers out"),
        (["spin_us=0,50", "--peers", "nats"], "leave --url and --peers out"),
        (["spin_us=0,50", "--check"], "--check and --sweep are two runs"),
        (["spin_us=0,50", "latency", "throughput"], "runs one workload, not latency, throughput"),
        (["spin_us=0,50", "idle"], "cannot set the broker of idle"),
        (["spin_us=0,50", "echo"], "cannot set the broker of echo"),
        (["spin_us=0,50", "--plot", "x.png"], ".svg"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_swept_is_said_in_one_sentence(
    capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    from danube_fast.cli.main import main

    assert main(["bench", "--sweep", *words]) == INVALID
    out, err = capfd.readouterr()
    assert out == ""
    sentence = err.splitlines()[-1]
    assert sentence.startswith("danube-fast: ")
    assert said in sentence
    assert "Traceback" not in err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans in the order in which they ran. Each run is faster than the one before."""
    plans: list[Plan] = []

    def measure(rig: Rig, plan: Plan) -> Figures:
        plans.append(plan)
        rate = 1000.0 * plan.spin_us + len(plans)
        lost = int(plan.spin_us == 13)
        return Figures(workload=plan.workload, durability="os", messages_per_s=rate, lost=lost)

    monkeypatch.setattr(sweep, "measure", measure)
    return plans


def swept(text: str, **options: Any) -> tuple[bool, list[dict[str, Any]]]:
    """Whether all was right, and the JSON lines."""
    lines: list[dict[str, Any]] = []
    choices = Choices(["throughput"], {}, sweep=text, **options)
    return in_turns(choices, lambda _: None, lines.append), lines


def test_values_take_turns_and_medians_are_kept(measured: list[Plan], tmp_path: Path) -> None:
    plot = tmp_path / "spin.svg"
    right, lines = swept("spin_us=1,2", runs=3, plot=plot, is_json=True)
    assert right
    assert [plan.spin_us for plan in measured] == [1, 2, 1, 2, 1, 2]
    # runs 1, 3, 5 had the first value, 2, 4, 6 the second
    found = [(x["setting"], x["value"], x["runs"], x["messages_per_s"]) for x in lines]
    assert found == [("spin_us", 1, 3, 1003.0), ("spin_us", 2, 3, 2004.0)]
    texts = [element.text or "" for element in ET.fromstring(plot.read_text()).iter()]
    assert {"spin_us=1", "spin_us=2"} <= set(texts)
    assert any("medians of 3 rounds" in text for text in texts)


def test_the_table_has_a_row_for_each_value(
    measured: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept("spin_us=1,2", runs=3) == (True, [])
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[0] == "spin_us"
    assert [(row[0], row[1], row[-3:]) for row in rows] == [
        ("1", "1,003", ["1,001,", "1,005", "1.00"]),
        ("2", "2,004", ["2,002,", "2,006", "2.00"]),
    ]


def test_a_run_that_lost_something_fails_the_sweep(measured: list[Plan]) -> None:
    assert not swept("spin_us=1,13", runs=2, is_json=True)[0]


def test_brokers_have_the_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real brokers: the workers of the second keep to one core each."""
    cores: list[list[int]] = []
    real = sweep.measure

    def measure(rig: Rig, plan: Plan) -> Figures:
        figures = real(rig, plan)
        cores.append([len(os.sched_getaffinity(pid)) for pid in rig.broker(plan).worker_pids])
        return figures

    monkeypatch.setattr(sweep, "measure", measure)
    changes = {"messages": 50, "rate": 500.0, "transport": "shm"}
    choices = Choices(["latency"], changes, runs=1, sweep="pin=no,yes")
    notes: list[str] = []
    assert in_turns(choices, notes.append, lambda _: None)
    assert cores == [[len(os.sched_getaffinity(0))] * 2, [1, 1]]
    header, *rows = capsys.readouterr().out.splitlines()
    assert "p50 us from, to" in header
    assert [row.split()[0] for row in rows] == ["False", "True"]
    assert [note.partition(";")[0] for note in notes[1:]] == [
        "round 1 of 1, pin=False",
        "round 1 of 1, pin=True",
    ]
