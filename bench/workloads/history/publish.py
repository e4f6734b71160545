"""The workload `history-publish`: lists of durable messages while the uploader is busy, beside the same without.

    no upload     neither topic has history
    full speed    a topic that was filled before has history now, and so has the one that is published to
    throttled     the same with history_throttle_bytes_per_s

Objects go into a sink (sink.py), so that the disk of the log has nothing to do but the log. Each runs on a
broker of its own, there and back. Then a consumer compares what was published, and manifests must name it all.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from danube_fast.bench.load.processes import Broker
from danube_fast.bench.load.rig import Rig, blank, charge
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.history.stores import Store, sink
from danube_fast.client.values.limits import WINDOW_BYTES_DEFAULT

__all__ = ["run_publish"]

THROTTLE_BYTES_PER_S = 100_000_000
OBJECT_BYTES = 64 << 20
"""The first object is done long before the last message is published."""
OBJECT_SHARE = 8
"""A small run has smaller objects: so many in what was filled before."""
OBJECT_BYTES_MIN = 1 << 20


def run_publish(rig: Rig, plan: Plan) -> Figures:
    """The rate beside an upload at full speed, as a part of that without one; and beside a throttled one."""
    throttled = {"history_throttle_bytes_per_s": THROTTLE_BYTES_PER_S}
    found = topics.there_and_back(
        {
            "no_upload": partial(_run, rig, plan, None),
            "full": partial(_run, rig, plan, {}),
            "throttled": partial(_run, rig, plan, throttled),
        }
    )
    rates = {
        name: statistics.harmonic_mean([each.messages_per_s or 0.0 for each in both])
        for name, both in found.items()
    }
    figures = found["full"].pop()
    figures.messages_per_s = rates["full"]
    figures.mb_per_s = rates["full"] * plan.message_bytes / 1e6
    figures.window = WINDOW_BYTES_DEFAULT
    for name in ("no_upload", "throttled"):
        figures.extra[f"{name}_per_s"] = rates[name]
    figures.extra["throttled_upload_mb_per_s"] = found["throttled"][0].extra["upload_mb_per_s"]
    figures.extra["vs_no_upload"] = rates["full"] / rates["no_upload"]
    figures.extra["throttled_vs_no_upload"] = rates["throttled"] / rates["no_upload"]
    for both in found.values():
        for other in both:
            topics.add_faults(figures, {x: getattr(other, x) for x in topics.FAULTS})
    return figures


def _run(rig: Rig, plan: Plan, upload: Mapping[str, Any] | None) -> Figures:
    """One run; `upload`: what the broker is told of it, None: there is none."""
    filled_bytes = plan.messages * plan.message_bytes
    object_bytes = min(OBJECT_BYTES, max(OBJECT_BYTES_MIN, filled_bytes // OBJECT_SHARE))
    with sink(rig) as store:
        settings = topics.HISTORY | {"store": store.url, "history_object_bytes": object_bytes}
        with (
            rig.own_broker(plan.workload, settings=settings | dict(upload or {})) as broker,
            rig.crew() as crew,
        ):
            filled, timed = rig.topics(2)
            for topic in (filled, timed):
                topics.create(broker, plan, topic)
            topics.publish(crew, topics.options_of(rig, plan, broker, filled))
            options = topics.options_of(rig, plan, broker, timed)
            producer = topics.start_producer(crew, options)
            broker.rest()
            before = broker.quiet_usage()
            if upload is not None:
                for topic in (filled, timed):
                    topics.keep_forever(broker, topic)
                topics.wait_until("an object", lambda: _history_bytes(broker) > 0)
            figures = _publish(broker, producer, plan)
            figures = charge(figures, broker, before)
            if upload is not None:
                _count_uploaded(figures, store, plan, (filled, timed))
            topics.add_faults(figures, topics.read_back(crew, options))
    return figures


def _history_bytes(broker: Broker) -> int:
    return topics.counters(broker)["history_bytes"]


def _publish(broker: Broker, producer: Any, plan: Plan) -> Figures:
    """Publish all; the rate up to the last ack, and what was uploaded meanwhile."""
    figures = blank(plan)
    uploaded = _history_bytes(broker)
    report = topics.run_producer(producer, plan.messages)
    uploaded = _history_bytes(broker) - uploaded
    seconds = (report["acked_ns"] - report["began_ns"]) / 1e9
    figures.messages_per_s = plan.messages / seconds
    figures.client_cpu_s = report["cpu"]
    figures.extra["upload_mb_per_s"] = uploaded / seconds / 1e6
    return figures


def _count_uploaded(figures: Figures, store: Store, plan: Plan, names: tuple[str, ...]) -> None:
    """Wait until manifests name all messages of both topics; more than all count as duplicated."""
    for topic in names:
        topics.wait_until(
            "the upload",
            lambda topic=topic: topics.uploaded_messages(store, topic) >= plan.messages,  # type: ignore[misc]
        )
        surplus = topics.uploaded_messages(store, topic) - plan.messages
        topics.add_faults(figures, {"lost": 0, "duplicated": surplus, "corrupted": 0})
