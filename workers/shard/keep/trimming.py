"""Trimming: give back segments of a worker's logs, and refuse publishes when there is no room left."""

from __future__ import annotations

from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.partition import Partition
from danube_fast.clock import SECOND_NS
from danube_fast.ring.counters import Counter
from danube_fast.workers.reports.quota import WorkerQuota
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.rewrites import Rewrites
from danube_fast.workers.shard.keep.segments import Segments
from danube_fast.workers.shard.state import ShardState

__all__ = ["Trimming"]

TICK_NS = SECOND_NS
LEFT_NS = 60 * SECOND_NS
"""How long a log is trimmed as far as it goes after a partition was removed, purged or compacted, by
snapshots of its own."""


class Trimming(Job):
    """Trim the logs of one worker."""

    def __init__(
        self, state: ShardState, quota: WorkerQuota, segments: Segments, rewrites: Rewrites
    ) -> None:
        self._state, self._quota = state, quota
        self._segments, self._rewrites = segments, rewrites
        self._left_ns: dict[int, int] = {}
        """By slot of a log: when a partition was removed from it, or purged, the last time."""
        self._next_ns = self._count = 0
        state.removal_listeners.append(self.trim_soon)
        rewrites.compaction.after_pass = self.trim_soon

    def do_work(self, now_ns: int) -> None:
        """Report the room that logs take, and trim them, if it is time or there are new segments."""
        logs = self._state.logs
        count = sum(log.segment_count for log in logs.values())
        if now_ns < self._next_ns and count == self._count:
            return
        self._next_ns = now_ns + TICK_NS
        self._count = count  # a fast publisher fills several between two ticks
        used = sum(log.bytes_on_disk for log in logs.values())
        self._quota.report(used, logs.values(), now_ns)
        failing = sum(journal.is_failing for journal in self._state.journals.values())
        self._state.boot.counters.set(Counter.LOGS_FAILING, failing)
        over = used > self._quota.allowance_bytes
        for slot in logs:
            self._trim(slot, over=over)

    def trim_soon(self, partition: Partition) -> None:
        """Give the space of a partition back soon, even if nothing more is written to its log."""
        self._left_ns[partition.log_slot] = self._state.now_ns

    def _trim(self, slot: int, *, over: bool) -> None:
        """Give back the segments that no partition needs, and refuse a topic that pins the log above its limit."""
        log = self._state.logs[slot]
        if log.segment_count < 2 or (log.snapshot_position == 0 and not over):
            return
        limit, pin = self._segments.needed(slot, over=over)
        before = log.oldest_position
        pinned = self._state.pins.lowest(slot)
        limit = limit if pinned is None else min(limit, pinned)
        if limit > before:
            left_ns = self._left_ns.get(slot)
            left = left_ns is not None and self._state.now_ns - left_ns < LEFT_NS
            self._segments.give_back(slot, limit, urgent=over or left)
        is_stuck = over and pin is not None and log.oldest_position == before
        # otherwise only a snapshot is missing: it is due
        is_stuck = (
            is_stuck and limit < log.oldest_end and not self._rewrites.free_oldest_segment(slot)
        )
        self._limit(slot, pin if is_stuck else None)

    def _limit(self, slot: int, pin: tuple[Partition, str] | None) -> None:
        """At `wal_bytes_max`, refuse the topic whose subscription pins the oldest segment."""
        for partition in self._state.catalog.of_log(slot):
            if not partition.logged:
                continue
            text = ""
            if pin is not None and pin[0] is partition:
                remedy = "wait until it is compacted, delete keys, or raise wal_bytes_max"
                if not partition.policy.compaction:
                    remedy = (
                        "let it consume, or delete it (danube-fast subscriptions delete), or raise "
                        "wal_bytes_max"
                    )
                text = (
                    f"the log reached wal_bytes_max ({self._quota.allowance_bytes} bytes here) and "
                    f"{pin[1]} of {partition.topic} still needs its oldest segment; {remedy}"
                )
            self._state.gate.set(partition, Cause.LOG, text)
