"""The workloads `history-lapped` and `history-seam`: reads from a folder, beside the same reads from the log.

    history-lapped    the whole backlog is in the store and not in the log; then as `lapped`: a consumer takes it,
                      and what is published meanwhile, until it is at the tail
    history-seam      | half in the store, not in the log | half in the log only |   one consumer, from the beginning

Nothing of the store was read before, neither by the uploader nor by a worker. For `history-lapped` the kernel drops the
pages of its files, too: the reads are cold. The log is in the page cache, and so is all of `history-seam`. Brokers of both sides are set alike, and each
run has its own, there and back. A consumer compares every message.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from danube_fast.bench.load.processes import Broker
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads import lapped
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.history.stores import Store, local
from danube_fast.errors import Internal

__all__ = ["put_away", "run_history_lapped", "run_seam", "set_rate"]

FLUSH_SECONDS = 5
"""The uploader does not look in while the consumer catches up, or once."""
SEAM_PART = 0.55
"""Size of an object, as a part of the payloads: one is made, and what is left is too small for another."""
SEAM_SHARES = 0.3, 0.7
YEAR_SECONDS = 365 * 24 * 3600
ONE_WORKER = 1
"""All is in one log."""


def run_history_lapped(rig: Rig, plan: Plan) -> Figures:
    """The rate at which a consumer catches up from the store, as a part of that from the log."""

    def run(*, is_history: bool) -> Figures:
        with local(rig) as store:
            settings = topics.HISTORY | topics.SMALL_SEGMENTS | {"store": store.url}
            settings |= {"history_flush_seconds": FLUSH_SECONDS}
            with rig.own_broker(plan.workload, ONE_WORKER, settings) as broker:
                messages = lapped.backlog_messages(plan)

                def before(topic: str) -> None:
                    topics.create(broker, plan, topic, topics.FOREVER if is_history else None)

                def behind(topic: str) -> None:
                    if is_history:
                        put_away(rig, broker, store, topic, messages, 0)
                        drop_pages(store)
                    else:
                        topics.roll_log(rig, broker)

                return lapped.run_on(rig, plan, broker, before, behind)

    return _beside(plan, lambda: run(is_history=True), lambda: run(is_history=False))


def put_away(
    rig: Rig, broker: Broker, store: Store, topic: str, messages: int, left_bytes: int
) -> None:
    """Wait until the store has so many messages and the log no more than `left_bytes` of them."""
    topics.wait_until("the upload", lambda: topics.uploaded_messages(store, topic) >= messages)
    topics.roll_log(rig, broker)
    room = topics.SEGMENTS_LEFT * topics.SMALL_SEGMENTS["segment_bytes"]
    topics.wait_trimmed(broker, left_bytes + room)


def drop_pages(store: Store) -> None:
    """Let the kernel drop what it holds of the objects."""
    for path in store.folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _beside(plan: Plan, run: Callable[[], Figures], log_only: Callable[[], Figures]) -> Figures:
    """Figures of `run`, and its rate as a part of that of `log_only`."""
    found = topics.there_and_back({"log": log_only, "history": run})
    rates = {
        name: statistics.harmonic_mean([each.messages_per_s or 0.0 for each in both])
        for name, both in found.items()
    }
    figures = found["history"].pop()
    figures.messages_per_s = rates["history"]
    figures.mb_per_s = rates["history"] * plan.message_bytes / 1e6
    figures.extra["log_per_s"] = rates["log"]
    figures.extra["vs_log"] = rates["history"] / rates["log"] if rates["log"] else 0.0
    for both in found.values():
        for other in both:
            topics.add_faults(figures, {x: getattr(other, x) for x in topics.FAULTS})
    return figures


# ------------------------------------------------------------------ the seam


def run_seam(rig: Rig, plan: Plan) -> Figures:
    """The rate of a consumer that passes from the store to the log, as a part of that from the log alone."""
    return _beside(
        plan,
        partial(_read_over, rig, plan, topics.FOREVER),
        partial(_read_over, rig, plan, {}),
    )


def _read_over(rig: Rig, plan: Plan, policy: Mapping[str, Any]) -> Figures:
    size = plan.messages * plan.message_bytes
    with local(rig) as store:
        settings = topics.HISTORY | topics.SMALL_SEGMENTS | {
            "store": store.url, "history_object_bytes": int(size * SEAM_PART),
            "history_flush_seconds": YEAR_SECONDS, "retention_seconds_min": 0 if policy else 3600,
        }  # fmt: skip
        with (
            rig.own_broker(plan.workload, ONE_WORKER, settings) as broker,
            rig.crew() as crew,
        ):
            (topic,) = rig.topics(1)
            topics.create(broker, plan, topic, policy)
            options = topics.options_of(rig, plan, broker, topic)
            topics.publish(crew, options)
            share = 0.0
            if policy:
                put_away(rig, broker, store, topic, 1, int(size * SEAM_PART))
            else:
                topics.roll_log(rig, broker)
            report = topics.read_back(crew, options)
            if policy:
                share = topics.uploaded_messages(store, topic) / plan.messages
                if not SEAM_SHARES[0] <= share <= SEAM_SHARES[1]:
                    raise Internal(f"{share:.0%} of the messages were in the store, and not a half")
    figures = blank(plan)
    topics.add_faults(figures, report)
    figures.client_cpu_s = report["cpu"]
    set_rate(figures, report, lapped.credit_messages(plan.message_bytes))
    figures.extra["history_share"] = share
    return figures


def set_rate(figures: Figures, report: Mapping[str, Any], credit_messages: int) -> None:
    """The rate of what came behind the messages that a consumer had before it began: half of them at least."""
    arrivals: list[tuple[int, int]] = report["arrivals"]
    skipped = min(credit_messages, arrivals[-1][0] // 2)
    start = next(mark for mark in arrivals if mark[0] >= skipped)
    seconds = max(arrivals[-1][1] - start[1], 1) / 1e9
    figures.messages_per_s = (arrivals[-1][0] - start[0]) / seconds
    figures.mb_per_s = figures.messages_per_s * (figures.message_bytes or 0) / 1e6
