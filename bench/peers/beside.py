"""`danube-fast bench --peers`: danube-fast and other systems under the same load, in the same rounds.

    round 1   danube-fast | zeromq | nats | redis | ...      every row once, each on a server of its own
    round 2   danube-fast | zeromq | nats | redis | ...
    ...       medians, with the smallest and the largest, of each row

An hour of a shared machine may be three times slower than the next one. Whoever measures one system after the
other compares hours; rounds give each system some of every hour.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from danube_fast.bench import harness
from danube_fast.bench.command import TRANSPORTS, WIDTH, Choices, Emit, Note, prepare
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.peers import catalog
from danube_fast.bench.peers.adapter import STREAMS, Adapter, Variant
from danube_fast.bench.peers.runs import Bench, sized
from danube_fast.bench.peers.table import Row, fastest, joined, label, markdown, print_rows
from danube_fast.bench.plan import NON_RELIABLE, Figures, Plan
from danube_fast.bench.reporting import report
from danube_fast.bench.reporting.pages import machine_note, replaced
from danube_fast.bench.reporting.plot import Bar, write_bars
from danube_fast.bench.workloads.catalog import WORKLOADS
from danube_fast.errors import DanubeError, InvalidArgument

__all__ = ["WORKLOADS_COMPARED", "beside"]

WORKLOADS_COMPARED = (*STREAMS, "topics", "requests")
RATES = ("throughput", "topics")
"""Those as fast as it goes, which a pace does not concern."""
FASTEST = "fastest"
"""Marks the place of a table with a row or two of each system."""
TAKES = frozenset(
    {"transport", "durability", "message_bytes", "messages", "seconds", "rate", "topics"}
)
DURABILITIES = (NON_RELIABLE, "memory", "os", "fsync")
SECONDS = 5.0
"""How long a row takes, unless told; rates differ a thousandfold, so a number of messages will not do."""
WARM_UP_SHARE = 5
"""Before a server is measured it gets a run of so small a part."""

Run = Callable[[Plan], Figures]


class _Entrant(NamedTuple):
    """One system in one durability, and what is run on it in each round."""

    what: str
    plans: list[Plan]
    open: Callable[[], AbstractContextManager[Run]]


def _plans(choices: Choices) -> list[Plan]:
    names = choices.workloads or list(STREAMS)
    others = [name for name in names if name not in WORKLOADS_COMPARED]
    if others:
        raise InvalidArgument(
            f"--peers compares {', '.join(WORKLOADS_COMPARED)}; leave out {', '.join(others)}"
        )
    if (choices.pages or choices.plot) and not set(names) <= set(STREAMS):
        raise InvalidArgument(
            f"--page and --plot show {' and '.join(STREAMS)} alone; leave the others out"
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
        if name in RATES:
            changes.pop("rate", None)  # the pace is that of `latency`
        plans += harness.plans([name], changes)
    return plans


def _ours(rig: Rig, plans: Sequence[Plan], choices: Choices) -> Iterator[_Entrant]:
    """danube-fast itself, over each transport, in each durability that another system may have."""

    def once(plan: Plan) -> Figures:
        rig.broker().rest()
        return WORKLOADS[plan.workload].run(rig, plan)

    @contextmanager
    def opened() -> Iterator[Run]:
        try:
            yield once
        finally:
            rig.drop_broker()

    durability, transport = (choices.changes.get(name) for name in ("durability", "transport"))
    for over in TRANSPORTS[::-1] if transport is None else (transport,):
        for chosen in DURABILITIES if durability is None else (durability,):
            own = []
            for plan in plans:
                own.append(msgspec.structs.replace(plan, durability=chosen, transport=over))
                if plan.workload == "throughput":
                    own.append(msgspec.structs.replace(own[-1], workload="messages"))
            yield _Entrant(f"danube-fast, {over}, {chosen}", own, opened)


def _peers(rig: Rig, plans: Sequence[Plan], names: Sequence[str]) -> Iterator[_Entrant]:
    """Every variant of other systems."""

    def opening(adapter: Adapter, variant: Variant) -> Callable[[], AbstractContextManager[Run]]:
        @contextmanager
        def opened() -> Iterator[Run]:
            with Bench.of(rig, adapter, variant) as bench:
                yield bench.run

        return opened

    for name in names:
        adapter = catalog.find(name)
        for variant in adapter.variants:
            own = [plan for plan in plans if plan.workload in variant.workloads]
            if own:
                what = f"{variant.system}, {variant.durability}"
                yield _Entrant(what, own, opening(adapter, variant))


def _lacking(name: str, plans: Sequence[Plan]) -> str | None:
    """That a system has no adapter for any of these workloads; None: it has for some."""
    known = {workload for x in catalog.find(name).variants for workload in x.workloads}
    wanted = [plan.workload for plan in plans]
    return None if known & set(wanted) else f"it has no adapter for {' and '.join(wanted)}"


class _Rounds:
    """Runs all entrants in rounds; who has failed once is left out from then on."""

    def __init__(self, entrants: Sequence[_Entrant], choices: Choices, note: Note) -> None:
        self._entrants = entrants
        self._changes = choices.changes
        self._note = note
        self.failed: dict[int, str] = {}
        self._sizes: dict[tuple[int, str], Plan] = {}
        self._runs: dict[tuple[int, str], list[Figures]] = {}

    def measure(self, rounds: int) -> list[Figures]:
        """Medians of each row, in the order of the entrants."""
        for number in range(1, rounds + 1):
            for index, entrant in enumerate(self._entrants):
                if index not in self.failed:
                    self._try(index, entrant, f"round {number} of {rounds}, " if rounds > 1 else "")
        return [harness.median_figures(runs, with_range=True) for runs in self._runs.values()]

    def _try(self, index: int, entrant: _Entrant, when: str) -> None:
        try:
            with entrant.open() as run:
                for place, plan in enumerate(entrant.plans):
                    sized_plan = self._sized((index, plan.workload), run, plan)
                    if not place:
                        self._warm_up(run, sized_plan)
                    figures = run(sized_plan)
                    self._runs.setdefault((index, plan.workload), []).append(figures)
                    self._note(report.progress(f"{when}{entrant.what}, {plan.workload}", figures))
        except (DanubeError, OSError, subprocess.SubprocessError) as error:
            self.failed[index] = f"{entrant.what}: {error}"
            self._note(f"FAILED {self.failed[index]}")

    def _warm_up(self, run: Run, plan: Plan) -> None:
        """A short run that does not count: a server that has just started is slower, most of all one in Java."""
        run(msgspec.structs.replace(plan, messages=max(1, plan.messages // WARM_UP_SHARE)))

    def _sized(self, key: tuple[int, str], run: Run, plan: Plan) -> Plan:
        """As many messages as take the wanted time: found out in the first round."""
        if key not in self._sizes:
            seconds = self._changes.get("seconds", SECONDS)
            is_sized = "messages" not in self._changes and not plan.rate
            self._sizes[key] = sized(run, plan, seconds) if is_sized else plan
        return self._sizes[key]


def beside(choices: Choices, note: Note, emit: Emit) -> bool:
    """Run everything, print a row each; whether all that is here ran and ours was faultless."""
    names = catalog.select(choices.peers or "")
    plans = _plans(choices)
    prepare(choices, note)
    for page in choices.pages:
        replaced(page.read_text(), _marker(page), "")  # before an hour of measuring
    reasons = {name: _lacking(name, plans) or catalog.absence(name) for name in names}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in absent.items():
        note(f"absent: {name}: {reason}")
    count = choices.runs or 1
    with Rig() as rig:
        present = [name for name in names if name not in absent]
        entrants = [*_ours(rig, plans, choices), *_peers(rig, plans, present)]
        rounds = _Rounds(entrants, choices, note)
        found = rounds.measure(count)
    if choices.is_json:
        for figures in found:
            emit(report.json_line(figures))
    else:
        print_rows(Console(highlight=False, width=WIDTH), found, absent)
    _publish(choices, found, count)
    ours = [figures for figures in found if figures.system == "danube-fast"]
    return not rounds.failed and all(figures.is_faultless for figures in ours)


def _publish(choices: Choices, found: Sequence[Figures], count: int) -> None:
    """The picture, and the tables of pages, each with a picture of its rows."""
    rows, note = joined(found), machine_note(count)
    if choices.plot is not None:
        _draw(choices.plot, rows, note)
    for page in choices.pages:
        marker, plot, shown = _marker(page), choices.plot, rows
        if marker == FASTEST:
            shown = fastest(rows)
            if plot is not None:
                plot = plot.with_stem(f"{plot.stem}-{FASTEST}")
                _draw(plot, shown, note)
        table = markdown(shown, note, found)
        if plot is not None:
            table += f"\n\n![messages a second]({os.path.relpath(plot, page.parent)})"
        page.write_text(replaced(page.read_text(), marker, table))


def _draw(plot: Path, rows: Sequence[Row], note: str) -> None:
    bars = [
        Bar(label(row), row.rate, row.client, row.rate_min, row.rate_max)
        for row in rows
        if row.rate is not None
    ]
    write_bars(plot, "messages a second", bars, note)


def _marker(page: Path) -> str:
    """Which table a page has a place for."""
    return FASTEST if f"<!-- bench:{FASTEST} -->" in page.read_text() else "peers"
