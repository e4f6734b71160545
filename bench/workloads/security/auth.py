"""The workload `auth`: what it costs that clients prove who they are and roles decide what they may do.

    broker without auth    lists, then publish() at a pace  |  in turns, one idle while the other is measured
    broker with auth       lists, then publish() at a pace  |

Rights are asked for when a handle opens, never for a message, so over shared memory and ipc nothing may be lost. With
the transport tcp the ratio says what CURVE costs, beside plain tcp.
"""

from __future__ import annotations

import statistics

from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.security.secured import WORKERS, secured
from danube_fast.bench.workloads.security.turns import Pair, add_faults

__all__ = ["run_auth"]

PAIRS = 7
PACED_MESSAGES = 1000
PACED_PER_S = 1000.0
WARM_SECONDS = 5.0


def run_auth(rig: Rig, plan: Plan) -> Figures:
    """Rates and the median of publish() with auth, as a part of those without: medians of the ratios of pairs."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with (
        rig.own_broker(plan.workload, WORKERS, plan.settings) as plain,
        secured(rig, plan) as locked,
        rig.crew() as crew,
    ):
        brokers = {"off": plain, "on": locked.broker}
        pairs = {name: Pair(crew, rig, plan, each) for name, each in brokers.items()}
        figures = [pair.lists(plan.messages) for pair in pairs.values()]  # in new segments
        for broker in brokers.values():
            broker.rest(WARM_SECONDS)
        for _ in range(PAIRS):
            for name, pair in pairs.items():
                lists = pair.lists(plan.messages)
                paced, acked = pair.one_by_one(min(PACED_MESSAGES, plan.messages), PACED_PER_S)
                figures += [paced, lists]
                found[name].append(
                    {
                        "per_s": lists.messages_per_s or 0.0,
                        "publish_p50_us": acked.p50_us or 0.0,
                        "publish_p99_us": acked.p99_us or 0.0,
                    }
                )
        for pair in pairs.values():
            pair.end()
        last = figures.pop()
        last.broker_rss_mb = locked.broker.resident_mb()
    for other in figures:
        add_faults(last, other)
    last.extra |= _compared(found)
    return last


def _compared(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Medians of both, and of the ratios; of a time the ratio is that without to that with, so that less is worse."""
    extra = {
        f"{side}_{name}": statistics.median(each[name] for each in values)
        for side, values in found.items()
        for name in values[0]
    }
    for ratio, name, is_time in (
        ("rate_ratio", "per_s", False),
        ("latency_ratio", "publish_p50_us", True),
        ("latency_p99_ratio", "publish_p99_us", True),
    ):
        pairs = zip(found["off"], found["on"], strict=True)
        extra[ratio] = statistics.median(
            off[name] / on[name] if is_time else on[name] / off[name] for off, on in pairs
        )
    return extra
