"""The two things that `danube-fast bench` does: measure, or check against the floors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from danube_fast.bench import floors, harness
from danube_fast.bench.floors import Case
from danube_fast.bench.load import host
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, client_of
from danube_fast.bench.reporting import report
from danube_fast.bench.reporting.plot import Bar, write_bars
from danube_fast.bench.workloads.catalog import WORKLOADS
from danube_fast.errors import FailedPrecondition, InvalidArgument, NotFound
from danube_fast.version import VERSION

__all__ = [
    "OWN_BROKER",
    "TRANSPORTS",
    "WIDTH",
    "Choices",
    "Emit",
    "Note",
    "check",
    "measure",
    "prepare",
]

TRANSPORTS = ("zmq", "shm")
WIDTH = 170
OWN_BROKER = (
    "sustained", "ready", "recovery", "idle", "readback", "soak", "delayed", "unacked", "crowd",
    "auth", "handshakes", "policy", "answers",
    *(name for name in WORKLOADS if name.startswith(("history-", "spark-"))),
)  # fmt: skip
"""Workloads that start brokers of their own, with settings of their own."""


class Choices(NamedTuple):
    """What the command line said."""

    workloads: list[str]
    changes: dict[str, Any]
    runs: int | None = None
    url: str | None = None
    plot: Path | None = None
    is_json: bool = False
    peers: str | None = None
    sweep: str | None = None
    pages: Sequence[Path] = ()


Note = Callable[[str], None]
Emit = Callable[[dict[str, object]], None]


def prepare(choices: Choices, note: Note) -> None:
    """Refuse what cannot be; say where this runs."""
    transport = choices.changes.get("transport", "zmq")
    if transport not in TRANSPORTS:
        raise InvalidArgument(f"--transport {transport!r} is unknown; use zmq or shm")
    if choices.plot is not None and choices.plot.suffix != ".svg":
        raise InvalidArgument(f"--plot {choices.plot} is drawn as SVG; give it a name in .svg")
    for page in choices.pages:
        if choices.peers is None:
            raise InvalidArgument(f"--page {page} gets the table of --peers; add that")
        if not page.is_file():
            raise NotFound(f"there is no {page}; name a page with a place for the table")
    note(f"danube-fast {VERSION} on {host.machine()}")


def _note_absent(choices: Choices, note: Note) -> None:
    """Say what is left out of a run of all workloads, and why."""
    for name, workload in WORKLOADS.items() if not choices.workloads else ():
        reason = workload.why_absent()
        if reason:
            note(f"{name} is left out: {reason}")


def measure(choices: Choices, note: Note, emit: Emit) -> bool:
    """Run workloads, print their figures; whether nothing was lost or changed."""
    plans = harness.plans(choices.workloads, choices.changes)
    prepare(choices, note)
    _note_absent(choices, note)
    if not choices.workloads and choices.url is not None:
        plans = [plan for plan in plans if plan.workload not in OWN_BROKER]
    found: list[Figures] = []
    with Rig(choices.url) as rig:
        for plan in plans:
            figures = harness.run(
                rig, plan, choices.runs or 1, choices.changes.get("seconds"),
                lambda plan, figures: note(report.progress(plan.workload, figures)),
            )  # fmt: skip
            found.append(figures)
            if choices.is_json:
                emit(report.json_line(figures))
    if not choices.is_json:
        report.print_figures(Console(highlight=False, width=WIDTH), found)
    if choices.plot is not None:
        write_bars(choices.plot, "messages per second", _bars(found))
    return all(figures.is_faultless for figures in found)


def check(choices: Choices, note: Note, emit: Emit) -> bool:
    """Run the cases of the floors, print the verdicts; whether all were met."""
    cases = floors.select(choices.workloads, choices.changes.get("transport", "zmq"))
    if choices.peers is not None or choices.sweep is not None:
        option = "--sweep" if choices.peers is None else "--peers"
        raise InvalidArgument(f"--check and {option} are two runs; leave one of them out")
    if choices.url is not None:
        raise FailedPrecondition("--check starts brokers of its own; leave --url out")
    if "seconds" in choices.changes:
        raise InvalidArgument("--check counts messages; use --messages instead of --seconds")
    prepare(choices, note)
    _note_absent(choices, note)
    for case in floors.cases_of(choices.changes.get("transport", "zmq")):
        if not choices.workloads and (reason := case.why_absent()):
            note(f"{case.what} is left out: {reason}")
    runs = choices.runs or floors.RUNS
    with Rig() as rig:
        measured = floors.check(
            rig, cases, runs, choices.changes,
            lambda case, figures: note(report.progress(case.what, figures)),
        )  # fmt: skip
    found = floors.verdicts(cases, measured)
    if choices.is_json:
        for verdict in found:
            emit(_verdict_line(verdict, runs))
    else:
        report.print_verdicts(Console(highlight=False, width=WIDTH), found)
    if choices.plot is not None:
        write_bars(choices.plot, "messages per second", _case_bars(cases, measured))
    return all(verdict.is_met for verdict in found)


def _verdict_line(verdict: floors.Verdict, runs: int) -> dict[str, object]:
    floor = verdict.floor
    return {
        "what": verdict.case.what, "workload": verdict.case.workload, "figure": floor.figure,
        "unit": floor.unit, "floor": floor.floor, "target": floor.target, "median": verdict.median,
        "runs": runs, "vs_reference": verdict.vs_reference, "is_met": verdict.is_met,
    }  # fmt: skip


def _bars(found: Sequence[Figures]) -> list[Bar]:
    return [
        Bar(
            f"{figures.workload}, {figures.durability or figures.system}",
            figures.messages_per_s,
            figures.client,
        )
        for figures in found
        if figures.messages_per_s is not None and not figures.rate
    ]


def _case_bars(cases: Sequence[Case], measured: Sequence[list[Figures]]) -> list[Bar]:
    rows = []
    for case, runs in zip(cases, measured, strict=True):
        figures = harness.median_figures(runs)
        if figures.messages_per_s is not None and not figures.rate:
            rows.append(Bar(case.what, figures.messages_per_s, client_of(case.workload)))
    return rows
