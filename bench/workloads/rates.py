"""Workloads that measure rates: who starts which members, and what their reports add up to.

Each producer has a topic of its own unless there are more topics; each consumer is alone on a
subscription of its own and receives everything. The rate counts from the first send to the last
receive (of `publishers`: to the last ack).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, Crew, Member, hear_all
from danube_fast.bench.load.rig import Rig, blank, charge
from danube_fast.bench.plan import Figures, Plan
from danube_fast.client.values.limits import WINDOW_BYTES_DEFAULT

__all__ = [
    "run_batches",
    "run_each",
    "run_merge",
    "run_publishers",
    "run_topics",
    "set_percentiles",
]

_HERE = "danube_fast.bench.load.streams"
SLOWEST_PER_S = 100_000
"""A long run may take as long as it has messages at this rate."""


def run_batches(rig: Rig, plan: Plan) -> Figures:
    """send_many, receive_batch: throughput and fan-out."""
    topics = rig.topics(plan.producers)
    return _run_streams(rig, plan, topics, "produce_lists", "consume_batches")


def run_each(rig: Rig, plan: Plan) -> Figures:
    """send(), receive() and ack() of every message alone."""
    topics = rig.topics(plan.producers)
    return _run_streams(rig, plan, topics, "produce_each", "consume_each")


def run_topics(rig: Rig, plan: Plan) -> Figures:
    """One process with a producer for each topic, send() in turn; one list consumer."""
    return _run_streams(rig, plan, rig.topics(plan.topics), "produce_each", "consume_batches")


def _common(rig: Rig, plan: Plan, broker: Broker) -> dict[str, Any]:
    return {
        "url": broker.url,
        "transport": plan.transport,
        "spin_us": plan.spin_us,
        "topic_options": plan.topic_options,
        "message_bytes": plan.message_bytes,
        "messages": plan.messages,
        "is_reliable": plan.is_reliable,
        "rate": plan.rate / plan.producers,
        "fd": rig.payloads(plan.prepared or plan.messages, plan.message_bytes),
    }


def _producers(
    crew: Crew, plan: Plan, topics: Sequence[str], role: str, common: dict[str, Any]
) -> list[Member]:
    share = len(topics) // plan.producers
    return [
        crew.start(
            f"producer-{number}", f"{_HERE}:{role}",
            common | {
                "topics": topics[number * share : (number + 1) * share],
                "index": number * share, "step": len(topics) if share == 1 else plan.producers,
            },
            [common["fd"]],
        )
        for number in range(plan.producers)
    ]  # fmt: skip


def run_merge(rig: Rig, plan: Plan) -> Figures:
    """Several producers into one topic, beside one producer with as many messages."""
    alone = run_batches(rig, msgspec.structs.replace(plan, producers=1))
    topics = rig.topics(1) * plan.producers
    figures = _run_streams(rig, plan, topics, "produce_lists", "consume_batches")
    if alone.messages_per_s and figures.messages_per_s:
        figures.extra["vs_one_producer"] = figures.messages_per_s / alone.messages_per_s
    return figures


def _run_streams(rig: Rig, plan: Plan, topics: list[str], producer: str, consumer: str) -> Figures:
    broker = rig.broker(plan)
    if plan.warm and not broker.is_warm:
        broker.is_warm = True
        _run_streams(rig, plan, rig.topics(len(topics)), producer, consumer)
        broker.rest()
    common = _common(rig, plan, broker)
    with rig.crew() as crew:
        producers = _producers(crew, plan, topics, producer, common)
        consumers = [
            crew.start(
                f"consumer-{number}", f"{_HERE}:{consumer}",
                common | {
                    "topics": list(dict.fromkeys(topics)), "streams": len(topics),
                    "subscription": f"bench-{number}"
                },
                [common["fd"]],
            )
            for number in range(plan.consumers)
        ]  # fmt: skip
        hear_all(crew.members)
        before = broker.usage()
        for member in (*consumers, *producers):
            member.tell("go")
        reports = hear_all(crew.members, HEAR_SECONDS + plan.messages / SLOWEST_PER_S)
        sent, received = reports[: len(producers)], reports[len(producers) :]
        figures = _stream_figures(plan, sent, received)
        charge(figures, broker, before)
        for member in crew.members:
            member.tell("bye")
    return figures


def _stream_figures(plan: Plan, sent: list[Any], received: list[Any]) -> Figures:
    figures = blank(plan)
    began_ns = min(report["began_ns"] for report in sent)
    ended_ns = max(report["ended_ns"] for report in received)
    seconds = max(ended_ns - began_ns, 1) / 1e9
    count = sum(report["received"] for report in received)
    figures.messages_per_s = count / seconds
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
    for name in ("lost", "duplicated", "corrupted"):
        setattr(figures, name, sum(report[name] for report in received))
    figures.client_cpu_s = sum(report["cpu"] for report in (*sent, *received))
    figures.window = None if plan.rate else WINDOW_BYTES_DEFAULT
    acked_ns = max(report["acked_ns"] for report in sent)
    figures.extra["acked_per_s"] = plan.messages / max(acked_ns - began_ns, 1) * 1e9
    arrivals = received[0]["arrivals"]
    if plan.rate and plan.producers == 1 and arrivals and not figures.lost:
        _open_loop_latency(figures, plan, began_ns, arrivals)
    return figures


def _open_loop_latency(
    figures: Figures, plan: Plan, began_ns: int, arrivals: list[tuple[int, int]]
) -> None:
    """From when each message was due to when its batch was in the consumer's hands."""
    ends = np.array([end for end, _ in arrivals])
    times = np.array([time_ns for _, time_ns in arrivals])
    arrived = np.repeat(times, np.diff(ends, prepend=0))[: plan.messages]
    due = began_ns + np.arange(len(arrived)) * (1e9 / plan.rate)
    set_percentiles(figures, arrived - due)


def set_percentiles(figures: Figures, latencies_ns: Any) -> None:
    """p50, p99 and p99.9 of latencies in nanoseconds."""
    p50, p99, p999 = np.percentile(latencies_ns, [50, 99, 99.9]) / 1e3
    figures.p50_us, figures.p99_us, figures.p999_us = float(p50), float(p99), float(p999)


def run_publishers(rig: Rig, plan: Plan) -> Figures:
    """`clients` clients in `producers` processes, publish() one by one, each to its own topic."""
    broker = rig.broker(plan)
    topics = rig.topics(plan.clients)
    common = _common(rig, plan, broker)
    figures = blank(plan)
    with rig.crew() as crew:
        share = -(-plan.clients // plan.producers)
        for start in range(0, plan.clients, share):
            some = {"topics": topics[start : start + share], "index": start, "step": plan.clients}
            crew.start(f"clients-{start}", f"{_HERE}:publish_each", common | some, [common["fd"]])
        hear_all(crew.members)
        before = broker.quiet_usage()
        for member in crew.members:
            member.tell("go")
        sent = hear_all(crew.members)
        charge(figures, broker, before)
        for member in crew.members:
            member.tell("bye")
    began_ns = min(report["began_ns"] for report in sent)
    seconds = (max(report["acked_ns"] for report in sent) - began_ns) / 1e9
    figures.messages_per_s = plan.messages / seconds
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
    figures.client_cpu_s = sum(report["cpu"] for report in sent)
    figures.window = plan.message_bytes
    written_bytes = (figures.bytes_per_sync or 0.0) * (figures.syncs or 0)
    figures.extra["disk_bytes_per_message"] = written_bytes / plan.messages
    return figures
