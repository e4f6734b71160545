"""The workload `history-turns`: how long a worker's turns take while consumers read history.

    one worker <-- 8 consumers, each with a subscription of its own, from the beginning to the end
                   all in the store           beside     all in the log

A turn is one call of the worker's `do_work`, timed inside its process (turn_probe.py): all that the worker's other
topics wait for. `turn_ratio` is its p99 beside that of the same reads from the log, medians of two runs each. Every
consumer compares every message.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from danube_fast.bench.load.processes import HEAR_SECONDS, Crew, hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.history.reads import put_away
from danube_fast.bench.workloads.history.stores import Store, local, module_path, surroundings
from danube_fast.bench.workloads.history.turn_probe import (
    VARIABLE,
    percentile_us,
    read_counts,
    write_site,
)
from danube_fast.errors import Internal

__all__ = ["run_turns"]

PERCENTS = {"p50": 50.0, "p99": 99.0, "p999": 99.9}


def run_turns(rig: Rig, plan: Plan) -> Figures:
    """The p99 of turns while history is read, in times of that while the log is read."""
    found = topics.there_and_back(
        {
            "log": partial(_run, rig, plan, is_history=False),
            "history": partial(_run, rig, plan, is_history=True),
        }
    )
    middle = {
        (kind, name): statistics.median([each.extra[f"turn_{name}_us"] for each in both])
        for kind, both in found.items()
        for name in PERCENTS
    }
    figures = found["history"].pop()
    for (kind, name), value in middle.items():
        figures.extra[f"{kind}_turn_{name}_us"] = value
    figures.extra["log_per_s"] = found["log"][-1].messages_per_s or 0.0
    figures.extra["turn_ratio"] = middle["history", "p99"] / middle["log", "p99"]
    for both in found.values():
        for other in both:
            topics.add_faults(figures, {x: getattr(other, x) for x in topics.FAULTS})
    return figures


def _run(rig: Rig, plan: Plan, *, is_history: bool) -> Figures:
    with local(rig) as store:
        probe = store.folder / "probe"
        probe.mkdir()
        write_site(probe)
        settings = topics.HISTORY | topics.SMALL_SEGMENTS | {"store": store.url}
        settings |= {} if is_history else {"retention_seconds_min": 3600}
        with (
            surroundings(PYTHONPATH=module_path(probe), **{VARIABLE: str(probe)}),
            rig.own_broker(plan.workload, 1, settings) as broker,
        ):
            return _measure(rig, plan, broker, store, probe, is_history=is_history)


def _measure(
    rig: Rig, plan: Plan, broker: Any, store: Store, probe: Path, *, is_history: bool
) -> Figures:
    (topic,) = rig.topics(1)
    topics.create(broker, plan, topic, topics.FOREVER if is_history else None)
    options = topics.options_of(rig, plan, broker, topic)
    with rig.crew() as crew:
        topics.publish(crew, options)
        if is_history:
            put_away(rig, broker, store, topic, plan.messages, 0)
        else:
            topics.roll_log(rig, broker)
        broker.rest()
        broker.close_client()
        reports, counts = _read(crew, plan, options, probe)
    figures = blank(plan)
    for report in reports:
        topics.add_faults(figures, report)
    seconds = (max(report["ended_ns"] for report in reports) - min(_began(reports))) / 1e9
    figures.messages_per_s = sum(report["received"] for report in reports) / max(seconds, 1e-9)
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
    figures.client_cpu_s = sum(report["cpu"] for report in reports)
    figures.extra["turns"] = float(counts.sum())
    for name, percent in PERCENTS.items():
        figures.extra[f"turn_{name}_us"] = percentile_us(counts, percent)
    return figures


def _began(reports: list[dict[str, Any]]) -> list[int]:
    return [report["arrivals"][0][1] for report in reports if report["arrivals"]] or [0]


def _read(
    crew: Crew, plan: Plan, options: dict[str, Any], probe: Path
) -> tuple[list[dict[str, Any]], Any]:
    """All consumers at once; their reports, and the turns meanwhile. Raises Internal without any."""
    consumers = [
        crew.start(
            f"consumer-{number}", f"{topics.STREAMS}:consume_batches",
            options | {"subscription": f"bench-{number}"}, [options["fd"]],
        )
        for number in range(plan.consumers)
    ]  # fmt: skip
    hear_all(consumers)
    before = read_counts(probe)
    for consumer in consumers:
        consumer.tell("go")
    reports = hear_all(consumers, HEAR_SECONDS)
    counts = read_counts(probe) - before
    for consumer in consumers:
        consumer.tell("bye")
    if not counts.sum():
        raise Internal("the worker has counted no turn: is PYTHONPATH handed on to it?")
    return reports, counts
