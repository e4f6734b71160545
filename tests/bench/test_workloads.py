"""Every workload, tiny, over real processes; and that nothing outlives the harness."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.bench import floors
from danube_fast.bench.command import Choices, check, measure
from danube_fast.bench.floors import value_of
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.reporting import pages
from danube_fast.bench.workloads import standing
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.errors import Internal, InvalidArgument
from tests.workers.broker import is_running, wait_until

PROGRAM = [sys.executable, "-m", "danube_fast.cli.main", "bench"]
END_SECONDS = 60.0


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def run(rig: Rig, name: str, **changes: Any) -> Figures:
    figures = WORKLOADS[name].run(rig, planned(name, **changes))
    assert figures.is_faultless, figures
    return figures


STREAMS = [
    ("throughput", {"messages": 25_000, "producers": 2}),
    ("throughput", {"messages": 25_000, "durability": "non_reliable", "consumers": 2}),
    ("throughput", {"messages": 500, "rate": 2000.0, "message_bytes": 9}),
    ("topics", {"messages": 5_000, "topics": 20}),
    ("throughput", {"messages": 25_000, "transport": "shm"}),
    ("merge", {"messages": 8_000, "transport": "shm"}),
    ("shared", {"messages": 25_000, "consumers": 2}),
    ("key-shared", {"messages": 25_000, "consumers": 2, "transport": "shm"}),
]


@pytest.mark.parametrize(("name", "changes"), STREAMS, ids=str)
def test_streams(rig: Rig, name: str, changes: dict[str, Any]) -> None:
    figures = run(rig, name, **changes)
    assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
    assert figures.messages_per_s is not None
    assert figures.messages_per_s > 0
    assert figures.broker_cpu_s
    assert figures.client_cpu_s
    assert (figures.p50_us is not None) == ("rate" in changes)
    if changes.get("durability", "fsync") == "fsync":
        assert figures.syncs
        assert figures.bytes_per_sync
        written = figures.syncs * figures.bytes_per_sync
        assert written >= changes["messages"] * (figures.message_bytes or 0)


def test_publishers(rig: Rig) -> None:
    figures = run(rig, "publishers", messages=100, producers=2, clients=5)
    assert figures.messages_per_s
    assert figures.extra["disk_bytes_per_message"] >= 228, "less than header and payload"


@pytest.mark.parametrize("name", ["publish-latency", "isolation"])
def test_latencies(rig: Rig, name: str) -> None:
    figures = run(rig, name, messages=100, rate=500.0)
    assert figures.p50_us
    assert figures.p99_us
    assert 0 < figures.p50_us <= figures.p99_us <= (figures.p999_us or 0)
    assert figures.extra["p50_scheduled_us"] >= figures.p50_us
    if name == "isolation":
        assert figures.extra["noise_per_s"] > 0
        quiet = figures.extra["quiet_p99_us"]
        assert figures.extra["p99_ratio"] == pytest.approx(figures.p99_us / quiet)


def test_spinning_and_used_segments_take_a_broker_of_their_own(rig: Rig) -> None:
    spun = run(rig, "publish-latency", messages=50, rate=500.0, spin_us=200, transport="shm")
    assert spun.p50_us and rig.broker().settings == {"spin_us": 200}
    run(rig, "throughput", messages=5_000, warm=True)
    assert rig.broker().is_warm and rig.broker().settings["retention_seconds_min"] == 1


def test_life_of_a_broker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "IDLE_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(standing, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(standing, "IDLE_WORKERS", 1)
    monkeypatch.setattr(standing, "LOAD_SECONDS", 0.1)
    idle = run(rig, "idle", topics=4, clients=2)
    assert 20 < idle.extra["rss_anon_mb"] < 1000
    recovery = run(rig, "recovery", topics=4, log_bytes=1_000_000)
    assert 0 < recovery.extra["ready_seconds"] < recovery.extra["read_seconds"]
    assert recovery.extra["log_bytes"] >= 1_000_000
    readback = run(rig, "readback", topics=4, log_bytes=2_000_000)
    assert readback.messages == 7
    assert value_of(readback, "read_ratio") is not None


def test_a_member_that_fails_is_named_with_its_words(rig: Rig) -> None:
    with rig.crew() as crew:
        member = crew.start("teller", "danube_fast.bench.nowhere:role", {})
        with pytest.raises(Internal, match=r"teller ended early.*ModuleNotFoundError"):
            member.hear(END_SECONDS)
    with rig.crew() as crew:
        wrong = {"fd": -1, "message_bytes": 100, "topics": ["bad"], "url": "nonsense"}
        member = crew.start("poor", "danube_fast.bench.workloads.latency:publish_in_a_loop",
                            {**wrong, "transport": "zmq", "spin_us": 0})  # fmt: skip
        with pytest.raises(InvalidArgument):
            member.hear(END_SECONDS)


# ------------------------------------------------------------------ the command


def measured(_: Rig, plan: Plan) -> Figures:
    """What `floors.measure` would find, at once."""
    return Figures(workload=plan.workload, messages_per_s=7e6, messages=plan.messages)


def test_check_prints_verdicts_and_fails_on_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "measure", measured)
    lines: list[dict[str, Any]] = []
    choices = Choices(["throughput"], {"messages": 300}, is_json=True)
    assert check(choices, lambda _: None, lines.append) is False
    assert [line["floor"] for line in lines] == [6e6, 7e6, 8e6, 0.8e6]
    assert [line["is_met"] for line in lines] == [True, True, False, True]
    assert {line["median"] for line in lines} == {7e6}
    assert {line["runs"] for line in lines} == {5}
    monkeypatch.setattr(floors, "CASES", floors.CASES[:2])
    assert check(choices, lambda _: None, lines.append) is True


@pytest.mark.parametrize("choice", [{"clients": 4, "producers": 2}, {"rate": 500.0}])
def test_the_echo_counts_round_trips(rig: Rig, choice: dict[str, Any]) -> None:
    figures = WORKLOADS["echo"].run(rig, planned("echo", messages=200, **choice))
    assert figures.system == "zeromq"
    assert figures.messages == 200
    assert (figures.messages_per_s or 0) > 0
    assert ((figures.p50_us or 0) > 0) == ("rate" in choice)


def test_the_reference_and_its_plot(tmp_path: Path) -> None:
    plot = tmp_path / "rates.svg"
    lines: list[dict[str, Any]] = []
    choices = Choices(["reference"], {"messages": 20_000}, plot=plot, is_json=True)
    assert measure(choices, lambda _: None, lines.append) is True
    assert lines[0]["workload"] == "reference"
    assert lines[0]["system"] == "zeromq"
    assert lines[0]["messages_per_s"] > 0
    assert "reference, zeromq" in plot.read_text()


def test_pages_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, table in pages.PAGES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# T\n<!-- bench:{table} -->\n<!-- bench:end -->\n")
    monkeypatch.setattr(floors, "measure", measured)
    command = ["pages", "--root", str(tmp_path), "--runs", "1", "--messages", "200", "fanout"]
    monkeypatch.setattr(sys, "argv", command)
    assert pages.main() == 0
    text = (tmp_path / "docs/measurements.md").read_text()
    assert "| fan-out 1 to 8, sum | fsync |" in text
    assert "8.00 M | 12.00 M | 7.00 M (missed) | msgs/s |" in text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["througput"], 2, "did you mean 'throughput'"),
        (["idle", "--rate", "5"], 2, "takes no --rate"),
        (["throughput", "--transport", "smoke"], 2, "use zmq or shm"),
        (["throughput", "--message-bytes", "3"], 2, "at least 8"),
        (["throughput", "--plot", "x.png"], 2, ".svg"),
        (["ready", "--url", "danube://127.0.0.1:1"], 4, "without --url"),
        (["--check", "--url", "danube://127.0.0.1:1"], 4, "leave --url out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_sentence(
    capfd: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    from danube_fast.cli.main import main

    assert main(["bench", *words]) == code
    out, err = capfd.readouterr()
    assert out == ""
    sentence = err.splitlines()[-1]
    assert sentence.startswith("danube-fast: ")
    assert said in sentence
    assert "Traceback" not in err


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | descendants(int(child))
    except OSError:
        pass
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "term", "kill -9"]
)
def test_nothing_outlives_the_harness(tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*PROGRAM, "throughput", "--rate", "1000", "--seconds", "300", "--output", "json"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            # serve, fork server, coordinator, two workers, producer, consumer
            wait_until("seven processes", lambda: len(descendants(process.pid)) >= 7)
            below = descendants(process.pid)
            process.send_signal(number)
            out, err = process.communicate(timeout=END_SECONDS)
        finally:
            process.kill()
    assert out == ""
    assert "Traceback" not in err
    wait_until("the end of all", lambda: not any(is_running(pid) for pid in below))
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_json_line(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    from danube_fast.cli.main import main

    words = ["messages", "--messages", "500", "--url", rig.broker().url, "--output", "json"]
    code = main(["bench", *words])
    out, err = capfd.readouterr()
    assert code == 0, err
    line = json.loads(out)
    assert (line["workload"], line["messages"], line["lost"]) == ("messages", 500, 0)
    assert line["vs_reference"] > 0
    assert line["broker_cpu_s"] is None, "of a broker that is not ours nothing is known"
    assert "danube-fast" in err
