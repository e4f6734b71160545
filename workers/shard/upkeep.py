"""What a worker does by the clock: cursors, heartbeats, markers, snapshots, expiry of producers.

Each job has its own interval; one comparison a turn when nothing is due.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import INT64_MAX, ProducerWord
from danube_fast.broker.subscription.consumer import Parting
from danube_fast.errors import DanubeError
from danube_fast.ring.counters import HISTOGRAM_BUCKETS, Counter, Histogram
from danube_fast.workers.reports.load import LoadReports
from danube_fast.workers.reports.reply_topics import ReplyTopics
from danube_fast.workers.reports.storage import StorageReports
from danube_fast.workers.reports.topic_metrics import TopicMetrics
from danube_fast.workers.shard.deliver.foresight import Foresight

if TYPE_CHECKING:
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["Upkeep"]

_log = logging.getLogger(__name__)

MS = 1_000_000
IDLE_POLL_MS = 250
REST_POLL_MS = 1000
TIMER_POLL_MS = 10
CURSOR_INTERVAL_NS = 10 * MS
CURSOR_EACH_NS = 100_000
CURSOR_INTERVAL_NS_MAX = 60 * MS
"""An ack is durable after 100 ms at the latest: 10 in the client, these, and a sync."""
"""Cursors are written at most this often."""
TICK_NS = 10 * MS
SLOW_TICK_NS = 250 * MS
TRIM_TICK_NS = 1000 * MS
EXPIRY_TICK_NS = 60_000 * MS
BACKLOG_NS_MAX = 5000 * MS
"""For so long a worker that cannot keep up takes silent sessions for living ones."""


class Upkeep:
    """Timers of one worker."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self._next_tick_ns = 0
        self._next_silent_ns = 0
        self._next_slow_ns = 0
        self._segments = 0
        self._rests = False
        """No session holds anything that must be given back soon if its client dies."""
        self._next_trim_ns = 0
        self._next_expiry_ns = 0
        self._cursors_at_ns = 0
        self._synced_before = sum(log.synced_position for log in worker.state.logs)
        self.foresight = Foresight(worker.state, worker.reader)
        self._loads = LoadReports(worker.state, worker.intake, worker.delivery)
        self._storage = StorageReports(worker.state, worker.retention)
        self._reply_topics = ReplyTopics(worker.state)
        self._topic_metrics = TopicMetrics(worker.state, worker.operations.positions.lag_seconds)

    @property
    def idle_poll_ms(self) -> int:
        """How long the worker may sleep when nobody needs it."""
        worker = self._worker
        busy = worker.state.moved_cursors or worker.dead_letters.is_waiting
        busy = busy or worker.moves.arrivals.is_busy or worker.retention.rewrites.is_busy
        busy = busy or worker.operations.positions.is_busy or worker.moves.departures.is_busy
        if busy or any(not journal.marked or journal.snapshot for journal in worker.state.journals):
            return TIMER_POLL_MS
        rest_ms = REST_POLL_MS if self._rests else IDLE_POLL_MS
        due_ms = (worker.state.catalog.timers.next_ns - worker.state.now_ns) // MS + 1
        return max(TIMER_POLL_MS, min(rest_ms, self.foresight.wake_ms(due_ms)))

    # ------------------------------------------------------------ timers

    def do_work(self, now_ns: int) -> int:
        """Run what is due; returns the number of jobs that did something."""
        self.foresight.do_work(now_ns)
        if now_ns < self._next_tick_ns:
            return 0
        self._next_tick_ns = now_ns + TICK_NS
        worker = self._worker
        worker.state.boot.heartbeat()
        if worker.state.catalog.timers.next_ns <= now_ns:
            self._run_timers(now_ns)
        worker.dead_letters.do_work(now_ns)
        worker.retention.do_work(now_ns)
        self._storage.do_work(now_ns)
        self._reply_topics.do_work(now_ns)
        self._topic_metrics.do_work(now_ns)
        worker.moves.arrivals.do_work()
        worker.moves.departures.do_work(now_ns)
        worker.retention.rewrites.do_work()
        worker.operations.positions.do_work()
        self._loads.do_work(now_ns)
        for slot in range(len(worker.state.journals)):
            self._mark(slot, now_ns)
            self._snapshot(slot)
        if now_ns >= self._next_slow_ns:
            self._next_slow_ns = now_ns + SLOW_TICK_NS
            self._slow(now_ns)
        segments = sum(log.segment_count for log in worker.state.logs)
        if now_ns >= self._next_trim_ns or segments != self._segments:
            self._next_trim_ns = now_ns + TRIM_TICK_NS
            self._segments = segments  # a fast publisher fills several between two ticks
            used = sum(log.bytes_on_disk for log in worker.state.logs)
            worker.quota.report(used, worker.state.logs, now_ns)
            worker.state.boot.counters.set(Counter.PRODUCERS, self._open_producers())
            failing = sum(journal.is_failing for journal in worker.state.journals)
            worker.state.boot.counters.set(Counter.LOGS_FAILING, failing)
            over = used > worker.quota.allowance_bytes
            for slot in range(len(worker.state.journals)):
                worker.retention.trim(slot, over=over)
        if now_ns >= self._next_expiry_ns:
            self._next_expiry_ns = now_ns + EXPIRY_TICK_NS
            self._expire_producers()
        return 0

    def _slow(self, now_ns: int) -> None:
        worker = self._worker
        # after a standstill of our own, what clients sent meanwhile is read before they are judged
        heard_until_ns = max(worker.state.drained_ns, now_ns - BACKLOG_NS_MAX)
        for session in worker.state.sessions.silent(heard_until_ns):
            worker.close_session(session, Parting.DIED)
        silent = now_ns >= self._next_silent_ns
        if silent:
            self._next_silent_ns = now_ns + worker.state.settings.handshake_timeout_ms * MS
        worker.doors.look_after(silent=silent)
        if worker.operations.assignments_missing:
            worker.operations.ask_assignments()
        self._rests = not worker.operations.assignments_missing and not any(
            session.holds for session in worker.state.sessions
        )
        touched, worker.intake.touched = worker.intake.touched, {}
        for partition in touched.values():
            if worker.intake.needs_reservation(partition):
                worker.intake.reserve_offsets(partition)
            if partition.keeps_memory:
                worker.retention.trim_memory(partition)
                if partition.tail_count:
                    worker.intake.touched[partition.partition_id] = partition
        self._publish_counters()

    def _publish_counters(self) -> None:
        """Refresh this worker's counters in shared memory."""
        worker = self._worker
        counters = worker.state.boot.counters
        intake, delivery = worker.intake, worker.delivery
        values = {
            Counter.MESSAGES_IN: intake.messages_in,
            Counter.BYTES_IN: intake.bytes_in,
            Counter.FRAMES_IN: intake.frames_in,
            Counter.MESSAGES_OUT: delivery.messages_out,
            Counter.BYTES_OUT: delivery.bytes_out,
            Counter.DUPLICATES: intake.duplicates,
            Counter.REFUSED: intake.refused,
            Counter.REDELIVERED: delivery.redelivered,
            Counter.SESSIONS: len(worker.state.sessions),
            Counter.PARTITIONS: len(worker.state.catalog.by_id),
            Counter.LOG_BYTES: sum(log.bytes_on_disk for log in worker.state.logs),
            Counter.LOG_POSITION: sum(log.written_position for log in worker.state.logs),
            Counter.GROUPS: sum(journal.group_count for journal in worker.state.journals),
            Counter.BUNDLES_IN: intake.bundles_in,
            Counter.SYNC_BYTES: sum(log.synced_position for log in worker.state.logs)
            - self._synced_before,
            Counter.ACKS_OUT: max(0, intake.frames_answered - intake.refused),
            Counter.LOST_NON_RELIABLE: delivery.lost,
            Counter.CONSUMERS: sum(session.holds for session in worker.state.sessions),
        }
        times = {
            Histogram.ACK: [intake.ack_times],
            Histogram.SYNC: [log.sync_times for log in worker.state.logs],
        }
        values[Counter.SYNCS] = sum(sum(row[:HISTOGRAM_BUCKETS]) for row in times[Histogram.SYNC])
        for histogram, rows in times.items():
            for place, value in enumerate(map(sum, zip(*rows, strict=True))):
                if value:
                    counters.set(histogram + place, value)
        for counter, value in values.items():
            counters.set(counter, value)

    def _open_producers(self) -> int:
        tables = self._worker.state.tables
        openers = tables.producers[: tables.producer_count, ProducerWord.SESSION]
        living = [session.number for session in self._worker.state.sessions]
        return int(np.count_nonzero(np.isin(openers, living)))

    def _expire_producers(self) -> None:
        """Forget producers that were not used for long, and the longest unused above the limit."""
        worker = self._worker
        tables, settings = worker.state.tables, worker.state.settings
        producers = tables.producers[: tables.producer_count]
        used = producers[:, ProducerWord.LAST_USED_NS]
        live = producers[:, ProducerWord.PARTITION_ID] != 0
        oldest_ns = worker.state.steady_wall_ns - settings.producer_expiry_seconds * 1000 * MS
        gone = set(np.flatnonzero(live & (used < oldest_ns)).tolist())
        excess = int(np.count_nonzero(live)) - len(gone) - settings.producers_max
        if excess > 0:
            order = np.argsort(np.where(live, used, INT64_MAX), kind="stable").tolist()
            gone.update([slot for slot in order if slot not in gone][:excess])
        for slot in gone:
            partition = worker.state.partition(int(producers[slot, ProducerWord.PARTITION_ID]))
            if partition is not None:
                producer_id = int(producers[slot, ProducerWord.PRODUCER_ID])
                partition.producer_names.pop(producer_id, None)
                record = r.ProducerExpired(partition.partition_id, producer_id)
                worker.state.journals[partition.log_slot].record(record)
        tables.remove_producers(list(gone))

    def _run_timers(self, now_ns: int) -> None:
        """Redeliveries whose time has come, and acks that are overdue."""
        worker = self._worker
        for sub in worker.state.catalog.timers.due(now_ns):
            sub.on_time(now_ns)
            worker.touch(sub)

    # ------------------------------------------------------------ cursors

    def cursors_due(self, now_ns: int) -> bool:
        """Cursors that moved should ride with the next group; later, the more there are of them."""
        count = len(self._worker.state.moved_cursors)
        wait_ns = min(CURSOR_INTERVAL_NS + count * CURSOR_EACH_NS, CURSOR_INTERVAL_NS_MAX)
        return now_ns - self._cursors_at_ns >= wait_ns

    def cursors_written(self, now_ns: int) -> None:
        """They were written."""
        self._cursors_at_ns = now_ns

    # ------------------------------------------------------------ log

    def _mark(self, slot: int, now_ns: int) -> None:
        """After a while of idleness, sync what is written and leave a marker that says so: then
        damage to the last group can be told from a torn one."""
        worker = self._worker
        journal = worker.state.journals[slot]
        idle_ns = worker.state.settings.idle_marker_ms * MS
        if journal.marked or journal.busy or now_ns - journal.last_write_ns < idle_ns:
            return
        log = worker.state.logs[slot]
        if log.synced_position < log.written_position:
            journal.sync_now()
            return
        self.write_marker(slot)

    def write_marker(self, slot: int, *, again: bool = False) -> None:
        """Say in the log how far it is durable."""
        journal, log = self._worker.state.journals[slot], self._worker.state.logs[slot]
        try:
            log.write_marker(again=again)
        except DanubeError as error:
            _log.warning("no marker in log %d: %s", log.log_id, error)
        journal.marked = True
        journal.refresh()
        log.sync()

    def _snapshot(self, slot: int) -> None:
        """Take a snapshot after a segment is full; hand it over once all it rests on is durable."""
        worker = self._worker
        journal, log = worker.state.journals[slot], worker.state.logs[slot]
        if journal.snapshot is not None:
            position, state = journal.snapshot
            if log.synced_position >= position:
                journal.snapshot = None
                log.save_snapshot(position, state)
            else:
                journal.sync_now()
        elif (
            log.snapshot_due
            and log.written_position > log.snapshot_position
            and not journal.has_open_group
            and not journal.changing
        ):
            journal.snapshot = (log.written_position, worker.snapshot_state(slot, clean=False))
