"""What people see: bars or lines meanwhile, tables and a verdict at the end."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from danube_fast.cli.main import main
from danube_fast.demo import dataset, scenario
from danube_fast.demo.analysis import has_spark
from danube_fast.demo.check import Kill, Latency, Subscription
from danube_fast.demo.progress import View
from danube_fast.demo.report import print_outcome
from danube_fast.demo.scenario import Options, Outcome

BILLING = Subscription(
    name="billing",
    type="exclusive",
    received=1_100,
    received_by_consumer=[1_100],
    distinct=1_000,
    redelivered=100,
    lost=0,
    duplicated=0,
    foreign=0,
    out_of_order=0,
    messages_per_s=12_345.6,
    latency=Latency(1.5, 2_000.25, 2_100.0),
    latency_undisturbed=Latency(1.4, 9.9, 12.0),
    published_before_kill=400,
    received_before_kill=350,
    silence_seconds=1.25,
    carriers={"UA": 600, "AA": 400},
)
OUTCOME = Outcome(
    ok=True,
    problems=[],
    messages=1_000,
    payload_bytes=92_000,
    producers=3,
    workers=2,
    partitions=4,
    durability="fsync",
    pace_messages_per_s=60_000,
    published_messages_per_s=59_000,
    kill=Kill(worker=1, pid=4711, kill_ns=1, partitions=[1, 3]),
    worker_restarts=1,
    subscriptions=[BILLING],
    carriers={"UA": 600, "AA": 400},
    seconds=9.5,
)


def printed(outcome: Outcome, width: int = 120) -> str:
    stream = io.StringIO()
    print_outcome(Console(file=stream, width=width), outcome, {"UA": "United"})
    return stream.getvalue()


def test_a_good_end() -> None:
    text = printed(OUTCOME)
    for part in ("1,100", "12,346", "2,000.2 ms", "9.9 ms", "United", "4711", "after 1.25 s"):
        assert part in text, part
    assert "COMPLETE AND CORRECT in 9.5 s" in text
    assert "FAILED" not in text and "DIFFERS" not in text
    assert "600 were still to be published" in text


def test_a_bad_end() -> None:
    bad = msgspec.structs.replace(BILLING, lost=2, carriers={"UA": 598, "AA": 400})
    outcome = msgspec.structs.replace(
        OUTCOME, ok=False, problems=["billing: 2 messages never came"], subscriptions=[bad]
    )
    text = printed(outcome)
    assert "billing: 2 messages never came" in text
    assert text.count("DIFFERS") == text.count("equal") == 1
    assert "FAILED" in text and "COMPLETE" not in text


def test_the_exit_code_follows_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Options] = []

    def run(options: Options, view: View) -> Outcome:
        seen.append(options)
        return msgspec.structs.replace(OUTCOME, ok=not options.messages_per_s)

    monkeypatch.setattr(scenario, "run", run)
    assert main(["demo", "--rate", "0", "--messages", "5000"]) == 0
    assert main(["demo", "--output", "json"]) == 1
    assert main(["demo", "--no-spark"]) == 1
    spark = has_spark()
    assert seen == [Options(5000, 0.0, spark), Options(with_spark=spark), Options()]
    capfd.readouterr()
    assert main(["demo", "--messages", "336777"]) == 2


def test_without_the_data_set(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dataset, "PACKAGE", "no-such-package-here")
    monkeypatch.setattr(dataset, "FILE", "no-such-package-here/data/flights.csv.zip")
    assert main(["demo"]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and "not installed" in err


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with View(Console(file=stream)) as view:
        view.say("begin")
        for count in range(1000):
            view.show({"billing": count}, 1000)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("begin") and "billing 0 of 1,000" in lines[1]
    assert len(lines) < 10, "a line a second at most"


def test_bars_on_a_terminal() -> None:
    stream = io.StringIO()
    with View(Console(file=stream, force_terminal=True, width=100)) as view:
        view.show({"billing": 10, "boarding": 0}, 1000)
        view.show({"billing": 1000, "boarding": 990}, 1000)
        view.rest()
    text = stream.getvalue()
    assert "billing" in text and "990 of 1,000" in text
