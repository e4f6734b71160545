"""Load reports of a worker to the coordinator, once a second while there is any load.

Load is the part of the time that the worker's loop was on a core or waited for one: on a host with too few
cores a busy worker would look idle otherwise. Each partition has a part of it in proportion to the bytes and
messages that went in and out.
"""

from __future__ import annotations

import heapq
import os
import threading

from danube_fast.broker import messages as m
from danube_fast.broker.partition import Partition
from danube_fast.clock import SECOND_NS
from danube_fast.roles import COORDINATOR
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.state import ShardState

__all__ = ["LoadReports"]

MESSAGE_WEIGHT_BYTES = 100
"""A message costs as much as so many bytes, about."""
REPORTED_MAX = 64
"""Partitions in one report, the busiest."""
COST_PART = 100
"""Reports take at most this part of a worker's time: with many partitions they come less often."""


def _busy_ns() -> int:
    """How long the calling thread has been on a core or waited for one."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb") as stat:
            on_core, waiting, _ = stat.read().split()
        return int(on_core) + int(waiting)
    except (OSError, ValueError):
        times = os.times()
        return int((times.user + times.system) * SECOND_NS)


class LoadReports(PeriodicJob):
    """Report the load of one worker. Used by its loop only."""

    interval_ns = SECOND_NS

    def __init__(self, state: ShardState, intake: Intake, delivery: Delivery) -> None:
        self._state, self._intake, self._delivery = state, intake, delivery
        self._is_on = state.settings.rebalance != "off" and state.boot.config.worker_count > 1
        self._at_ns = state.now_ns
        self._busy_ns = _busy_ns()
        self._traffic = 0
        self._was_idle = True
        self._counts: dict[int, tuple[int, int, int]] = {}

    def run(self, now_ns: int) -> None:
        """Report the load, unless there is none."""
        if not self._is_on:
            return
        state = self._state
        traffic = self._intake.messages_in + self._delivery.messages_out
        is_idle, self._traffic = traffic == self._traffic, traffic
        if is_idle and self._was_idle:
            return
        self._was_idle = is_idle
        busy_ns = _busy_ns()
        share = (busy_ns - self._busy_ns) / max(1, now_ns - self._at_ns)
        self._busy_ns, self._at_ns = busy_ns, now_ns
        began_ns = state.clock.monotonic_ns()
        weights = self._weights()
        total = sum(weight for weight, _ in weights)
        parts = [
            (partition.partition_id, share * weight / total, _to_copy(partition))
            for weight, partition in heapq.nlargest(REPORTED_MAX, weights, key=lambda each: each[0])
        ]
        report = m.LoadReport(share if total else 0.0, parts)
        state.boot.mailbox.notify(COORDINATOR, report)
        took_ns = state.clock.monotonic_ns() - began_ns
        self._next_ns = max(self._next_ns, now_ns + COST_PART * took_ns)

    def _weights(self) -> list[tuple[int, Partition]]:
        """Weigh the traffic of each partition since the last report; partitions without any are left out."""
        counts: dict[int, tuple[int, int, int]] = {}
        weights: list[tuple[int, Partition]] = []
        for partition_id, partition in self._state.catalog.by_id.items():
            read = sum(sub.next_offset for sub in partition.all_subscriptions() if sub.consumers)
            now = partition.message_count, partition.byte_count, read
            counts[partition_id] = now
            before = self._counts.get(partition_id)
            if before is None or before == now:
                continue
            messages, size, taken = (
                max(0, new - old) for new, old in zip(now, before, strict=True)
            )
            mean = partition.byte_count // max(1, partition.message_count) + MESSAGE_WEIGHT_BYTES
            weight = size + messages * MESSAGE_WEIGHT_BYTES + taken * mean
            if weight:
                weights.append((weight, partition))
        self._counts = counts
        return weights


def _to_copy(partition: Partition) -> int:
    """Estimate the bytes that a move would copy."""
    if not partition.logged:
        return partition.tail_bytes
    kept = partition.visible - partition.first_offset
    return kept * partition.byte_count // max(1, partition.message_count)
