"""`danube-fast bench` without its options: settles plans, runs them, hands on what they found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from danube_fast.bench.floors import measure
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.catalog import (
    EVERYWHERE,
    WORKLOADS,
    find,
    planned,
    require_present,
)
from danube_fast.errors import InvalidArgument

__all__ = ["calibrated", "median_figures", "plans", "run"]

RANGED = ("messages_per_s", "p50_us", "p99_us")
CALIBRATION_SHARE = 20
"""A run by time is preceded by one of a twentieth of the usual messages, which tells the rate."""


def plans(names: Sequence[str], changes: dict[str, Any]) -> list[Plan]:
    """A plan for each workload; without names, for all that can run here. Raises InvalidArgument, or
    FailedPrecondition for one that was named and cannot run here.

    A choice that a named workload cannot take is an error; without names, it counts where it can.
    """
    for name in names:
        find(name)
    for name in names:
        require_present(name)
    if names:
        return [planned(name, **_without_seconds(name, changes)) for name in names]
    taken = {field for workload in WORKLOADS.values() for field in workload.takes}
    unknown = set(changes) - taken - EVERYWHERE
    if unknown:
        raise InvalidArgument(f"no workload takes {', '.join(sorted(unknown))}")
    return [
        planned(
            name,
            **_without_seconds(
                name, {k: v for k, v in changes.items() if k in workload.takes | EVERYWHERE}
            ),
        )
        for name, workload in WORKLOADS.items()
        if not workload.why_absent()
    ]


def _without_seconds(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Choices for the plan; with a rate, seconds are a number of messages."""
    seconds = changes.get("seconds")
    if seconds is None:
        return changes
    workload = find(name)
    if "seconds" not in workload.takes:
        raise InvalidArgument(f"the workload {name} takes no --seconds; leave it out")
    if "messages" in changes:
        raise InvalidArgument("--messages and --seconds both say how long; choose one of them")
    left = {k: v for k, v in changes.items() if k != "seconds"}
    rate = left.get("rate") or workload.defaults.get("rate")
    if rate:
        left["messages"] = max(1, int(rate * seconds))
    return left


def run(
    rig: Rig,
    plan: Plan,
    runs: int,
    seconds: float | None,
    on_run: Callable[[Plan, Figures], None],
) -> Figures:
    """Run a plan some times; the medians."""
    if seconds is not None and not plan.rate:
        plan = calibrated(rig, plan, seconds)
    found = []
    for _ in range(runs):
        found.append(measure(rig, plan))
        on_run(plan, found[-1])
    rig.drop_broker()
    return median_figures(found)


def calibrated(rig: Rig, plan: Plan, seconds: float) -> Plan:
    """The plan with as many messages as will take about so long."""
    short = msgspec.structs.replace(
        plan, messages=max(plan.clients, plan.messages // CALIBRATION_SHARE)
    )
    rate = (WORKLOADS[plan.workload].run(rig, short).messages_per_s or 1.0) / plan.consumers
    return msgspec.structs.replace(plan, messages=max(plan.clients, int(rate * seconds)))


def median_figures(runs: Sequence[Figures], *, with_range: bool = False) -> Figures:
    """Each figure's median; of what must not happen, the worst. `with_range`: beside those of RANGED the
    smallest and the largest, as `extra`."""
    if len(runs) == 1:
        return runs[0]
    merged: dict[str, Any] = {}
    for name in Figures.__struct_fields__:
        values = [getattr(figures, name) for figures in runs]
        known = [value for value in values if isinstance(value, int | float)]
        if name in ("lost", "duplicated", "corrupted"):
            merged[name] = max(known) if known else None
        elif name != "extra":
            merged[name] = _middle(known) if known else values[0]
    merged["extra"] = {
        name: _middle([figures.extra[name] for figures in runs]) for name in runs[0].extra
    }
    for name in RANGED if with_range else ():
        values = [value for figures in runs if (value := getattr(figures, name)) is not None]
        if values:
            merged["extra"] |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    return Figures(**merged)


def _middle(values: Sequence[Any]) -> Any:
    """The median; whole where all are."""
    median = statistics.median(values)
    return int(median) if all(isinstance(value, int) for value in values) else median
