"""`danube-fast bench --sweep`: one workload in turns on brokers that differ in one setting.

    round 1:  broker with V1, broker with V2, ...
    round 2:  broker with V1, broker with V2, ...         medians over the rounds

In turns, because a shared machine may be three times slower from one minute to the next: all values
see the same minutes. Each run has a new broker with an empty data directory. A value that is named
twice shows what the differences between the others are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from danube_fast.bench import harness
from danube_fast.bench.command import OWN_BROKER, WIDTH, Choices, Emit, Note, prepare
from danube_fast.bench.floors import measure, value_of
from danube_fast.bench.load import host
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.reporting import report
from danube_fast.bench.reporting.plot import Bar, write_bars
from danube_fast.config import load_settings, parse_setting
from danube_fast.errors import InvalidArgument

__all__ = ["Sweep", "in_turns", "parse_sweep"]

OPTION = "--sweep"
ROUNDS = 3
DEFAULT_WORKLOAD = "throughput"
VALUES_MIN = 2
VALUES_MAX = 32
_FIXED = ("data_dir", "listen", "advertise", "admin", "workers", "log_format")
"""Settings that the harness chooses itself."""
_WITHOUT = (*OWN_BROKER, "reference", "echo", "curve")
"""Workloads whose brokers, if any, do not take settings from a plan."""


class Sweep(NamedTuple):
    """A setting and the values to compare."""

    setting: str
    values: list[Any]

    def plan(self, plan: Plan, value: Any) -> Plan:
        """The plan with a broker, and where it concerns them clients, that have this value."""
        if self.setting == "spin_us":
            return msgspec.structs.replace(plan, spin_us=value)
        return msgspec.structs.replace(plan, broker={self.setting: value})


def parse_sweep(text: str) -> Sweep:
    """SETTING=V1,V2,... Raises InvalidArgument for a name or value that no broker would take."""
    name, separator, values = text.partition("=")
    name = name.strip()
    texts = values.split(",")
    if not separator or not VALUES_MIN <= len(texts) <= VALUES_MAX:
        raise InvalidArgument(
            f"{OPTION} {text!r} compares nothing; write SETTING=V1,V2,... with {VALUES_MIN} to "
            f"{VALUES_MAX} values"
        )
    if name in _FIXED:
        raise InvalidArgument(f"{OPTION} cannot vary {name}: bench chooses it; vary another one")
    found = [parse_setting(name, one.strip(), OPTION) for one in texts]
    for value in found:
        load_settings({name: value})  # together with the defaults
    return Sweep(name, found)


def _plan(choices: Choices, sweep: Sweep) -> Plan:
    """What is run for each value. Raises InvalidArgument for what does not go together."""
    names = choices.workloads or [DEFAULT_WORKLOAD]
    (plan, *others) = harness.plans(names, choices.changes)
    if others:
        raise InvalidArgument(f"{OPTION} runs one workload, not {', '.join(names)}; name one")
    if plan.workload in _WITHOUT:
        raise InvalidArgument(f"{OPTION} cannot set the broker of {plan.workload}; name another")
    if choices.url is not None or choices.peers is not None:
        raise InvalidArgument(f"{OPTION} starts brokers of its own; leave --url and --peers out")
    if sweep.setting in choices.changes:
        raise InvalidArgument(f"{sweep.setting} is varied by {OPTION}; leave its own option out")
    if sweep.setting.startswith("shm_") and plan.transport != "shm":
        raise InvalidArgument(f"{sweep.setting} matters in shared memory only; add --transport shm")
    return plan


def in_turns(choices: Choices, note: Note, emit: Emit) -> bool:
    """Run, print a row for each value, draw; whether nothing was lost or changed."""
    sweep = parse_sweep(choices.sweep or "")
    plan = _plan(choices, sweep)
    prepare(choices, note)
    rounds = choices.runs or ROUNDS
    found = _measured(sweep, plan, rounds, choices.changes.get("seconds"), note)
    medians = [harness.median_figures(runs) for runs in found]
    figure = "p50_us" if all(figures.p50_us for figures in medians) else "messages_per_s"
    if choices.is_json:
        for value, figures in zip(sweep.values, medians, strict=True):
            more = {"setting": sweep.setting, "value": value, "runs": rounds}
            emit(report.json_line(figures) | more)
    else:
        _print(sweep, found, figure)
    if choices.plot is not None:
        _draw(choices, sweep, medians, figure, rounds)
    return all(figures.is_faultless for figures in medians)


def _measured(
    sweep: Sweep, plan: Plan, rounds: int, seconds: float | None, note: Note
) -> list[list[Figures]]:
    """The figures of all rounds, by value."""
    found: list[list[Figures]] = [[] for _ in sweep.values]
    with Rig() as rig:
        if seconds is not None and not plan.rate:
            plan = harness.calibrated(rig, sweep.plan(plan, sweep.values[0]), seconds)
        for number in range(1, rounds + 1):
            for value, runs in zip(sweep.values, found, strict=True):
                rig.drop_broker()
                runs.append(measure(rig, sweep.plan(plan, value)))
                what = f"round {number} of {rounds}, {sweep.setting}={value}"
                note(report.progress(what, runs[-1]))
    return found


def _print(sweep: Sweep, found: Sequence[Sequence[Figures]], figure: str) -> None:
    """A row for each value; the range and the share of the first value are those of `figure`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(sweep.setting, no_wrap=True)
    named = ("msgs/s", "p50 us", "p99 us", "broker s", "client s", "RSS MB", "ref")
    names = (*named, f"{named[figure == 'p50_us']} from, to", "of first")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    first = value_of(harness.median_figures(found[0]), figure)
    for value, runs in zip(sweep.values, found, strict=True):
        f = harness.median_figures(runs)
        all_values = [one for run in runs if (one := value_of(run, figure)) is not None]
        middle = value_of(f, figure)
        table.add_row(
            str(value), report.amount(f.messages_per_s), report.amount(f.p50_us),
            report.amount(f.p99_us), report.amount(f.broker_cpu_s), report.amount(f.client_cpu_s),
            report.amount(f.broker_rss_mb), report.amount(f.vs_reference),
            f"{report.amount(min(all_values))}, {report.amount(max(all_values))}",
            f"{middle / first:.2f}" if middle and first else "-",
        )  # fmt: skip
    Console(highlight=False, width=WIDTH).print(table)


def _draw(
    choices: Choices, sweep: Sweep, medians: Sequence[Figures], figure: str, rounds: int
) -> None:
    """Bars of `figure`."""
    unit = "p50, us" if figure == "p50_us" else "messages a second"
    rows = [
        Bar(f"{sweep.setting}={value}", value_of(figures, figure) or 0.0)
        for value, figures in zip(sweep.values, medians, strict=True)
    ]
    first = medians[0]
    if choices.plot is not None:
        write_bars(
            choices.plot,
            f"{first.workload}, {first.durability}, {first.transport}: {unit}",
            rows,
            f"{host.machine()}; medians of {rounds} rounds, in turns",
        )
