"""A worker's counters and histograms, as /metrics and `danube-fast stats` read them in shared memory."""

from __future__ import annotations

from danube_fast.ring.counters import HISTOGRAM_BUCKETS, Counter, Histogram
from danube_fast.workers.process.access import Access
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.state import ShardState
from danube_fast.workers.shard.transports import Transports

__all__ = ["CounterReports"]


class CounterReports(PeriodicJob):
    """Publish the counters of one worker."""

    interval_ns = 250_000_000

    def __init__(
        self, state: ShardState, intake: Intake, delivery: Delivery, transports: Transports,
        access: Access | None,
    ) -> None:  # fmt: skip
        self._state, self._intake, self._delivery = state, intake, delivery
        self._transports, self._access = transports, access
        self._synced = {log.log_id: log.synced_position for log in state.logs.values()}
        self._sync_bytes = 0

    def run(self, now_ns: int) -> None:
        """Refresh the counters."""
        state, counters = self._state, self._state.boot.counters
        intake, delivery = self._intake, self._delivery
        server, rings = self._transports.server, self._transports.rings
        logs = state.logs.values()
        for log in logs:
            self._sync_bytes += log.synced_position - self._synced.get(
                log.log_id, log.synced_position
            )
        self._synced = {log.log_id: log.synced_position for log in logs}
        values = {
            Counter.MESSAGES_IN: intake.messages_in,
            Counter.BYTES_IN: intake.bytes_in,
            Counter.FRAMES_IN: intake.frames_in,
            Counter.MESSAGES_OUT: delivery.messages_out,
            Counter.BYTES_OUT: delivery.bytes_out,
            Counter.DUPLICATES: intake.duplicates,
            Counter.REFUSED: intake.refused,
            Counter.REDELIVERED: delivery.redelivered,
            Counter.SESSIONS: len(state.sessions),
            Counter.PARTITIONS: len(state.catalog.by_id),
            Counter.LOG_BYTES: sum(log.bytes_on_disk for log in logs),
            Counter.LOG_POSITION: sum(log.written_position for log in logs),
            Counter.GROUPS: sum(journal.group_count for journal in state.journals.values()),
            Counter.BUNDLES_IN: intake.bundles_in,
            Counter.SYNC_BYTES: self._sync_bytes,
            Counter.ACKS_OUT: max(0, intake.frames_answered - intake.refused),
            Counter.LOST_NON_RELIABLE: delivery.lost,
            Counter.CONSUMERS: sum(len(session.consumers) for session in state.sessions),
            Counter.IPC_TAKEN: server.ipc_is_taken,
            Counter.RINGS_TAKEN: rings is not None and rings.is_taken,
            Counter.THREADS_LOST: 0 if self._access is None else self._access.threads_lost,
        }
        times = {
            Histogram.ACK: [intake.ack_times],
            Histogram.SYNC: [log.syncs.times for log in logs],
        }
        values[Counter.SYNCS] = sum(sum(row[:HISTOGRAM_BUCKETS]) for row in times[Histogram.SYNC])
        for histogram, rows in times.items():
            for place, value in enumerate(map(sum, zip(*rows, strict=True))):
                if value:
                    counters.set(histogram + place, value)
        for counter, value in values.items():
            counters.set(counter, value)
