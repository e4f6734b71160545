"""The parts of the harness: a verifier that sees every fault, even paces, honest verdicts."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.bench import floors, harness
from danube_fast.bench.floors import CASES, LANE_CASES
from danube_fast.bench.load import host, verify
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import Payloads, create_payloads
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.plan import LISTS, ONE_BY_ONE, Figures
from danube_fast.bench.reporting import pages, report
from danube_fast.bench.reporting.plot import Bar, bars
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.errors import InvalidArgument, NotFound, ResourceExhausted

COUNT, SIZE = 2000, 100
PR_GET_TIMERSLACK = 30


@pytest.fixture
def payloads() -> Iterator[Payloads]:
    fd = create_payloads(COUNT, SIZE)
    yield Payloads(fd, SIZE)
    os.close(fd)


@pytest.fixture(params=["kernel", "plain"])
def verifier(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, payloads: Payloads
) -> Verifier:
    monkeypatch.setattr(verify, "OBJECTS_READABLE", request.param == "kernel")
    return Verifier(payloads, 4)


def counts(verifier: Verifier) -> tuple[int, int, int]:
    return verifier.lost, verifier.duplicated, verifier.corrupted


def test_payloads_are_numbered_and_do_not_compress(payloads: Payloads) -> None:
    cut = payloads.cut()
    assert len(cut) == COUNT
    assert [int.from_bytes(one[:8], "little") for one in cut] == list(range(COUNT))
    tails = b"".join(one[8:] for one in cut)
    assert len(zlib.compress(tails)) > 0.99 * len(tails)
    assert payloads.cut(3, 7) == cut[3::7]
    lists = payloads.lists(1, 3, 10)
    assert {len(some) for some in lists} <= {10, 7, 6}
    assert [one for some in lists for one in some] == cut[1::3]


def test_payloads_too_small_or_too_many_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 8"):
        create_payloads(1, 7)
    with pytest.raises(ResourceExhausted, match="take fewer"):
        create_payloads(10**9, 10**6)


def test_what_was_sent_is_right_in_any_interleaving_of_streams(
    verifier: Verifier, payloads: Payloads
) -> None:
    cut = payloads.cut()
    for stream in (2, 0, 3, 1):
        some = cut[stream::4]
        verifier.take(some[:100])
        verifier.take(some[100:])
    assert counts(verifier) == (0, 0, 0)
    assert verifier.received == verifier.right == COUNT


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda x: x.__delitem__(1000), (1, 0, 0)),
        (lambda x: x.insert(1001, x[1000]), (0, 1, 0)),
        (lambda x: x.insert(1500, x[0]), (0, 1, 0)),
        (lambda x: x.__setitem__(7, x[7][:-1] + bytes([x[7][-1] ^ 1])), (1, 0, 1)),
        (lambda x: x.__setitem__(7, bytes([x[7][0] ^ 4]) + x[7][1:]), (1, 0, 1)),
        (lambda x: x.__setitem__(7, x[7] + b"x"), (1, 0, 1)),
        (lambda x: x.__setitem__(7, x[7][:-1]), (1, 0, 1)),
        (lambda x: x.__setitem__(7, None), (1, 0, 1)),
        (lambda x: x.__setitem__(7, b"\xff" * SIZE), (1, 0, 1)),
        (lambda x: x.__setitem__(7, b""), (1, 0, 1)),
        (lambda x: x.__setitem__(slice(40, 48), x[44:48] + x[40:44]), (4, 4, 0)),
    ],
    ids=[
        "gone",
        "twice",
        "late",
        "flipped",
        "renumbered",
        "longer",
        "shorter",
        "none",
        "unknown",
        "empty",
        "swapped",
    ],
)
def test_every_fault_is_seen(
    verifier: Verifier, payloads: Payloads, fault: Any, expected: tuple[int, int, int]
) -> None:
    received: list[Any] = payloads.cut()
    fault(received)
    verifier.take(received)
    assert counts(verifier) == expected


def test_the_pacer_is_never_early_and_its_sleeps_end_on_time() -> None:
    late, slack = [], []

    def run() -> None:  # the slack belongs to a thread
        pacer = Pacer(1000)
        slack.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))
        began = pacer.start()
        for number in range(50):
            due = pacer.wait(number)
            late.append(time.monotonic_ns() - due)
            assert due == began + number * 1_000_000

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert len(late) == 50, "the pacer's thread failed"
    assert min(late) >= 0
    assert slack == [1]


# ------------------------------------------------------------------ the table of floors


def figures(**fields: Any) -> Figures:
    return Figures(workload="throughput", **{"durability": "fsync", "lost": 0, **fields})


def test_every_workload_has_a_floor_but_raw_zeromq() -> None:
    cases = (*CASES, *LANE_CASES)
    assert {case.workload for case in cases} == set(WORKLOADS) - {"reference", "echo", "curve"}
    known = set(Figures.__struct_fields__)
    known |= {"disk_bytes_per_message", "p99_ratio", "ready_seconds", "read_seconds"}
    known |= {"cpu_percent", "rss_anon_mb", "read_ratio", "vs_one_producer"}
    known |= {"vs_bare_writes", "vs_exclusive"}
    known |= {"anon_mb_growth", "descriptors_growth", "left_behind"}
    known |= {"vs_batch_acks", "early", "late_p99_ms", "late_max_ms", "peak_mb"}
    known |= {"outage_late_max_ms"}
    known |= {"first_ms", "requests", "throttled_vs_no_upload", "turn_ratio"}
    known |= {"vs_bare", "vs_log", "vs_no_upload", "vs_nats"}
    known |= {
        "vs_parquet",
        "ten_columns_vs_parquet",
        "counted_per_s",
        "streamed_per_s",
        "export_mb_per_s",
    }
    known |= {
        "rate_ratio",
        "latency_ratio",
        "lists_ratio",
        "handshakes_per_s",
        "check_p99_us",
        "load_seconds",
    }
    known |= {f"{name}_apart" for name in ("lookup", "describe", "watch", "open", "subscribe")}
    known |= {"broker_cpu_share", "slice_bytes_share"}
    known |= {"orderly_seconds", "killed_seconds", "stop_seconds_max", "kill_seconds_max"}
    assert {floor.figure for case in cases for floor in case.floors} <= known
    for case in cases:
        case.plan()  # every change is one that the workload takes


def verdict_of(case: floors.Case, *runs: Figures) -> list[bool]:
    return [verdict.is_met for verdict in floors.verdicts([case], [list(runs)])]


def test_a_median_meets_a_floor_or_misses_it() -> None:
    rate, ceiling = CASES[0], next(case for case in CASES if case.workload == "publishers")
    good, bad = figures(messages_per_s=6.0e6), figures(messages_per_s=5.99e6)
    assert verdict_of(rate, good, good, bad) == [True]
    assert verdict_of(rate, good, bad, bad) == [False]
    assert verdict_of(rate, figures()) == [False], "not measured is not met"
    fast = figures(messages_per_s=30e3, extra={"disk_bytes_per_message": 600.0})
    fat = figures(messages_per_s=30e3, extra={"disk_bytes_per_message": 600.1})
    assert verdict_of(ceiling, fast) == [True, True]
    assert verdict_of(ceiling, fat) == [True, False]


@pytest.mark.parametrize("fault", [{"lost": 1}, {"duplicated": 1}, {"corrupted": 1}])
def test_a_fast_run_that_is_wrong_misses_its_floor(fault: dict[str, int]) -> None:
    wrong = figures(messages_per_s=1e9, messages=1000, **fault)
    right = figures(messages_per_s=1e9, messages=1000)
    assert not wrong.is_faultless
    assert verdict_of(CASES[0], wrong, right, right) == [False]


def test_non_reliable_may_lose_one_in_a_thousand() -> None:
    def lost(count: int) -> bool:
        some = {"durability": "non_reliable", "messages": 10_000, "lost": count}
        return figures(**some).is_faultless

    assert lost(10)
    assert not lost(11)


def test_unknown_workloads_and_choices_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'throughput'"):
        floors.select(["througput"])
    with pytest.raises(InvalidArgument, match="reference has no floor"):
        floors.select(["reference"])
    with pytest.raises(InvalidArgument, match="idle takes no --rate"):
        planned("idle", rate=5.0)
    with pytest.raises(InvalidArgument, match="choose one"):
        harness.plans(["throughput"], {"seconds": 1.0, "messages": 5})
    with pytest.raises(InvalidArgument, match="takes no --seconds"):
        harness.plans(["ready"], {"seconds": 1.0})
    assert harness.plans(["latency"], {"seconds": 3.0})[0].messages == 3000
    assert {plan.workload for plan in harness.plans([], {"messages": 9})} == set(WORKLOADS)


# ------------------------------------------------------------------ what is printed


def test_the_json_line_has_the_fields_that_others_hold_on_to() -> None:
    line = report.json_line(figures(extra={"acked_per_s": 1.23456}))
    fields = (
        "system version workload transport durability message_bytes messages messages_per_s "
        "mb_per_s p50_us p99_us p999_us syncs bytes_per_sync lost duplicated corrupted "
        "broker_cpu_s client_cpu_s broker_rss_mb"
    )
    assert list(line)[:20] == fields.split()
    assert line["system"] == "danube-fast"
    assert line["acked_per_s"] == 1.235


def test_medians_of_figures_and_the_worst_of_faults() -> None:
    rates = [
        figures(messages_per_s=rate, lost=lost) for rate, lost in ((1.0, 0), (9.0, 3), (5.0, 0))
    ]
    merged = harness.median_figures(rates)
    assert (merged.messages_per_s, merged.lost, merged.workload) == (5.0, 3, "throughput")


def test_tables_go_between_the_markers_and_nowhere_else() -> None:
    page = "before\n<!-- bench:rates -->\nold\n<!-- bench:end -->\nafter\n"
    new = pages.replaced(page, "rates", "| a |")
    assert new == "before\n<!-- bench:rates -->\n| a |\n<!-- bench:end -->\nafter\n"
    assert pages.replaced(new, "rates", "| a |") == new
    with pytest.raises(NotFound, match="bench:floors"):
        pages.replaced(page, "floors", "")
    root = Path(__file__).parents[2]
    for name, table in pages.PAGES.items():
        pages.replaced((root / name).read_text(), table, "")


def test_the_tables_of_the_pages_name_what_was_measured() -> None:
    case = CASES[0]
    raw = {"reference_messages_per_s": 14e6}
    found = floors.verdicts([case], [[figures(messages_per_s=7e6, vs_reference=0.5, extra=raw)]])
    table = pages.floors_table(found, ["fsync"], 3)
    assert "6.00 M | 9.00 M | 7.00 M | msgs/s | 14.00 M |" in table
    for words in ("cores", "Linux", "Python", "medians of 3 runs"):
        assert words in table
    assert pages.plots(found, ["fsync"])["rates.svg"][1] == [Bar(f"{case.what}, fsync", 7e6, LISTS)]


def test_latencies_are_drawn_beside_raw_zeromq() -> None:
    case = next(case for case in CASES if case.workload == "publish-latency")
    extra = {"reference_p50_us": 100.0, "reference_p99_us": 200.0}
    runs = [figures(p50_us=300.0, p99_us=time, extra=extra) for time in (500.0, 700.0, 400.0)]
    found = floors.verdicts([case], [runs])
    _, rows = pages.plots(found, ["os"] * len(found))["latencies.svg"]
    assert [(row.label, row.value) for row in rows[-2:]] == [
        (f"{case.what}, p99", 500.0), (pages.RAW, 200.0),
    ]  # fmt: skip
    assert len({row.group for row in rows}) == 2


def test_bars_are_svg() -> None:
    rows = [Bar("a & b", 1e6, LISTS, 9e5, 2e6), Bar("c", 1e4, ONE_BY_ONE), Bar("d", 1e2, LISTS)]
    drawn = ET.fromstring(bars("<rates> & more", rows))
    found = [x for x in drawn if x.tag.endswith("rect")][1:]
    widths = [float(x.get("width", "0")) for x in found]
    assert widths[0] - widths[1] == pytest.approx(widths[1] - widths[2], abs=0.2), "logarithms"
    colours = [x.get("fill") for x in found]
    assert colours[0] == colours[2] != colours[1]
    text = ET.tostring(drawn)
    assert text.count(b"a &amp; b") == 1
    assert text.count(b"one by one") == text.count(b"lists") == 1, "the legend"
    assert text.count(b"stroke-width") == 1, "a range where there is one"


def test_processor_time_of_threads_that_have_ended_counts():
    def burn() -> None:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass

    before = host.cpu_seconds([os.getpid()])
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert host.cpu_seconds([os.getpid()]) - before >= 0.2
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert host.cpu_seconds([child.pid]) == 0
