"""The workload `policy`: a policy of 100,000 bindings: checks, loading, and a worker's turns while bindings change.

    check     each question asked once, timed alone; half of them are granted by a known binding
    load      from the store of the broker, as its coordinator does at the start
    turns     one worker --> lists at a pace, and `clients` producers that stay open
                  quiet, changed, quiet, changed, ...     `CHANGES_PER_S` bindings a second are made or deleted

A turn is one call of the worker's `do_work` (history/turn_probe.py). Behind each change a worker looks which sessions it
concerns, and at what those have open inside its scope. `turn_ratio` is the median of the ratios of neighbours' p99.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import danube_fast
from danube_fast.bench.load.member import Link
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.load.streams import open_client
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history.stores import module_path, surroundings
from danube_fast.bench.workloads.history.turn_probe import (
    VARIABLE,
    percentile_us,
    read_counts,
    write_site,
)
from danube_fast.bench.workloads.security.records import (
    load_records,
    make_records,
    questions,
    store_records,
    user_name,
)
from danube_fast.bench.workloads.security.secured import ADMIN, Secured, secured
from danube_fast.bench.workloads.security.turns import END, Pair, add_faults
from danube_fast.errors import Internal
from danube_fast.security.policy import Policy

__all__ = ["change_bindings", "run_policy"]

_HERE = "danube_fast.bench.workloads.security.policy"
QUESTIONS = 40_000
PAIRS = 5
CHANGES_PER_S = 20.0
BINDING = "changing"
STEP_SECONDS = 0.005
OPEN_SECONDS = 60.0


# ------------------------------------------------------------------ checks


def _check(policy: Policy, records: list[Any]) -> tuple[float, float]:
    """p50 and p99 of a check in microseconds. Raises Internal for a right that is refused."""
    asked = questions(records, QUESTIONS)
    times = np.zeros(len(asked), np.int64)
    clock, permits, granted = time.perf_counter_ns, policy.permits, 0
    for number, (principal, permission, resource, is_granted) in enumerate(asked):
        began = clock()
        answer = permits(principal, permission, resource)
        times[number] = clock() - began
        granted += answer
        if is_granted and not answer:
            raise Internal(
                f"the policy refuses {principal} {permission} on {resource}, which is bound"
            )
    if granted == len(asked):
        raise Internal("the policy grants everything; no time of it says anything")
    p50, p99 = np.percentile(times, [50, 99]) / 1e3
    return float(p50), float(p99)


def _in_memory(records: list[Any]) -> Policy:
    policy = Policy()
    for record in records:
        policy.put(record)
    return policy


# ------------------------------------------------------------------ changes


def change_bindings(link: Link, options: dict[str, Any]) -> None:
    """Hold producers open; from one order to the next make and delete a binding, so many times a second, again and again;
    report how many a second. Raises Internal if the last change is not in force."""
    with ExitStack() as stack:
        holder = stack.enter_context(open_client(options))
        for topic in options["held"]:
            stack.enter_context(
                holder.producer(topic, timeout=OPEN_SECONDS, **options["topic_options"])
            )
        admin = stack.enter_context(
            danube_fast.connect(options["url"], transport="zmq", **options["admin_access"])
        ).admin
        link.ready()
        while link.hear() != END:
            rate = _change(link, admin, options)
            link.hear()
            link.say(rate)


def _change(link: Link, admin: Any, options: dict[str, Any]) -> float:
    user, resource = options["user"], options["held"][0]
    began, count = time.monotonic(), 0
    while not link.has_order():
        ahead = count / options["rate"] - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(min(ahead, STEP_SECONDS))
            continue
        if count % 2:
            admin.delete_security("binding", BINDING)
        else:
            admin.set_binding(BINDING, f"user:{user}", "producer", resource)
        count += 1
    rate = count / (time.monotonic() - began)
    is_bound = bool(count % 2)
    if admin.check_permission(user, "produce", resource)["allowed"] != is_bound:
        raise Internal(f"the change {count} of a binding is not in force")
    if is_bound:
        admin.delete_security("binding", BINDING)
    return rate


# ------------------------------------------------------------------ the run


def run_policy(rig: Rig, plan: Plan) -> Figures:
    """Times of checks and of loading, and the p99 of turns while bindings change, in times of that without."""
    extra: dict[str, float] = {}
    in_groups = make_records(with_groups=True)
    extra["groups_check_p50_us"], extra["groups_check_p99_us"] = _check(
        _in_memory(in_groups), in_groups
    )
    del in_groups
    probe = rig.folder / "probe"
    probe.mkdir(exist_ok=True)
    write_site(probe)
    with (
        surroundings(PYTHONPATH=module_path(probe), **{VARIABLE: str(probe)}),
        secured(rig, plan) as made,
    ):
        extra |= _refill(made)
        figures, found = _turns(rig, plan, made, probe)
    figures.extra |= extra | found
    return figures


def _refill(made: Secured) -> dict[str, float]:
    """Stop the broker, put the records into its store, and start it again: times of loading and of checks."""
    broker, extra = made.broker, {}
    records = make_records(with_groups=False)
    broker.stop()
    store_records(broker.data_dir, records)
    began, cpu = time.monotonic(), time.process_time()
    policy = load_records(broker.data_dir)
    extra["load_seconds"] = time.monotonic() - began
    extra["load_cpu_seconds"] = time.process_time() - cpu
    if len(policy) < len(records):
        raise Internal(f"{len(policy)} of {len(records)} records were loaded")
    extra["records"] = float(len(policy))
    extra["check_p50_us"], extra["check_p99_us"] = _check(policy, records)
    broker.start()
    extra["ready_seconds"] = broker.ready_seconds
    return extra


def _turns(rig: Rig, plan: Plan, made: Secured, probe: Path) -> tuple[Figures, dict[str, float]]:
    broker = made.broker
    parts: list[Figures] = []
    found: dict[str, list[float]] = {"quiet": [], "changed": []}
    rates, turns = [], 0
    with rig.crew() as crew:
        pair = Pair(crew, rig, plan, broker)
        changer = crew.start(
            "changer", f"{_HERE}:change_bindings",
            {
                "url": broker.url, "access": broker.access, "transport": plan.transport,
                "spin_us": plan.spin_us, "admin_access": made.access(ADMIN),
                "held": rig.topics(plan.clients), "topic_options": plan.topic_options,
                "user": user_name(0), "rate": CHANGES_PER_S,
            },
        )  # fmt: skip
        changer.hear()
        changer.tell("go")
        parts.append(pair.lists(plan.messages, plan.rate))
        for _ in range(PAIRS):
            for name in found:
                if name == "changed":
                    changer.tell("change")
                before = read_counts(probe)
                parts.append(pair.lists(plan.messages, plan.rate))
                counts = read_counts(probe) - before
                turns += int(counts.sum())
                if name == "changed":
                    changer.tell("stop")
                    rates.append(changer.hear())
                found[name].append(_p99_us(counts))
        changer.tell(END)
        pair.end()
        figures = parts.pop()
        figures.broker_rss_mb = broker.resident_mb()
    for part in parts:
        add_faults(figures, part)
    ratios = [c / q for q, c in zip(found["quiet"], found["changed"], strict=True)]
    return figures, {
        "turn_ratio": statistics.median(ratios), "turns": float(turns),
        "quiet_turn_p99_us": statistics.median(found["quiet"]),
        "changed_turn_p99_us": statistics.median(found["changed"]),
        "changes_per_s": statistics.median(rates),
    }  # fmt: skip


def _p99_us(counts: Any) -> float:
    """Of turns. Raises Internal without any."""
    if not counts.sum():
        raise Internal("the worker has counted no turn: is PYTHONPATH handed on to it?")
    return percentile_us(counts, 99.0)
