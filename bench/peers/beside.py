"""`danube-fast bench --peers`: danube-fast and other systems under the same load, in the same run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from danube_fast.bench import harness, report
from danube_fast.bench.command import WIDTH, Choices, Emit, Note, prepare
from danube_fast.bench.peers import catalog
from danube_fast.bench.peers.runs import Bench, sized
from danube_fast.bench.peers.table import print_rows
from danube_fast.bench.plan import NON_RELIABLE, Figures, Plan
from danube_fast.bench.plot import write_bars
from danube_fast.bench.rig import Rig
from danube_fast.bench.workloads import WORKLOADS
from danube_fast.errors import DanubeError, InvalidArgument

__all__ = ["WORKLOADS_COMPARED", "beside"]

WORKLOADS_COMPARED = ("throughput", "latency")
TAKES = frozenset({"transport", "durability", "message_bytes", "messages", "seconds", "rate"})
DURABILITIES = (NON_RELIABLE, "memory", "os", "fsync")
SECONDS = 5.0
"""How long a row takes, unless told; rates differ a thousandfold, so a number of messages will not do."""


class _Session(NamedTuple):
    """What all rows share."""

    rig: Rig
    plans: list[Plan]
    choices: Choices
    note: Note
    keep: Callable[[Figures], None]

    def measure(self, run: Callable[[Plan], Figures], plan: Plan) -> None:
        """One row: the medians of its runs."""
        if "messages" not in self.choices.changes and not plan.rate:
            plan = sized(run, plan, self.choices.changes.get("seconds", SECONDS))
        figures = harness.median_figures([run(plan) for _ in range(self.choices.runs or 1)])
        self.note(
            report.progress(f"{figures.system}, {plan.workload}, {figures.durability}", figures)
        )
        self.keep(figures)


def _plans(choices: Choices) -> list[Plan]:
    names = choices.workloads or list(WORKLOADS_COMPARED)
    others = [name for name in names if name not in WORKLOADS_COMPARED]
    if others:
        raise InvalidArgument(
            f"--peers compares {' and '.join(WORKLOADS_COMPARED)}, not {', '.join(others)}"
        )
    taken = sorted(set(choices.changes) - TAKES)
    if taken:
        raise InvalidArgument(
            f"--peers takes no --{taken[0].replace('_', '-')}: one producer and one consumer each"
        )
    if choices.url is not None:
        raise InvalidArgument("--peers starts brokers of its own; leave --url out")
    plans = []
    for name in names:
        changes = dict(choices.changes)
        if name == "throughput":
            changes.pop("rate", None)  # the pace is that of `latency`
        plans += harness.plans([name], changes)
    return plans


def _own_rows(session: _Session) -> None:
    """danube-fast itself, in each durability that somebody else may be compared with."""
    chosen = session.choices.changes.get("durability")
    for durability in DURABILITIES if chosen is None else (chosen,):
        for plan in session.plans:
            run = WORKLOADS[plan.workload].run
            own = msgspec.structs.replace(plan, durability=durability)

            def once(plan: Plan, run: Any = run) -> Figures:
                session.rig.broker().rest()
                return run(session.rig, plan)  # type: ignore[no-any-return]

            session.measure(once, own)
            session.rig.drop_broker()


def _peer_rows(session: _Session, name: str) -> list[str]:
    """Every variant of a system; what failed, in words."""
    adapter, failed = catalog.find(name), []
    for variant in adapter.variants:
        try:
            with Bench.of(session.rig, adapter, variant) as bench:
                for plan in session.plans:
                    if plan.workload in variant.workloads:
                        session.measure(bench.run, plan)
        except (DanubeError, OSError, subprocess.SubprocessError) as error:
            failed.append(f"{variant.system}, {variant.durability}: {error}")
            session.note(f"FAILED {failed[-1]}")
    return failed


def beside(choices: Choices, note: Note, emit: Emit) -> bool:
    """Run everything, print a row each; whether all that is here ran and ours was faultless."""
    names = catalog.select(choices.peers or "")
    plans = _plans(choices)
    prepare(choices, note)
    found: list[Figures] = []

    def keep(figures: Figures) -> None:
        found.append(figures)
        if choices.is_json:
            emit(report.json_line(figures))

    reasons = {name: catalog.absence(name) for name in names}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in absent.items():
        note(f"absent: {name}: {reason}")
    failed: list[str] = []
    with Rig() as rig:
        session = _Session(rig, plans, choices, note, keep)
        _own_rows(session)
        for name in names:
            if name not in absent:
                failed += _peer_rows(session, name)
    if not choices.is_json:
        print_rows(Console(highlight=False, width=WIDTH), found, absent)
    if choices.plot is not None:
        write_bars(choices.plot, "messages per second", _bars(found))
    ours = [figures for figures in found if figures.system == "danube-fast"]
    return not failed and all(figures.is_faultless for figures in ours)


def _bars(found: Sequence[Figures]) -> list[tuple[str, float]]:
    return [
        (f"{f.system}, {', '.join((f.durability or '').split(', ')[:2])}", f.messages_per_s)
        for f in found
        if f.messages_per_s is not None and not f.rate
    ]
