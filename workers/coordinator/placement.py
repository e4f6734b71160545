"""Assigns partitions to the workers that own their logs, and remembers which of them have confirmed.

    when_placed(ids) --> queue of the worker --Assign, one call at a time--> worker's log
    callback(None)   <-- confirmed at the worker's epoch <-- reply

A worker confirms when the assignment is durable in its log. A confirmation counts for one epoch of
the worker: after a restart partitions are assigned again when a client asks for them, which
costs the worker nothing if it knows them. While one call is under way the next ones pile up and go
together, so a thousand new topics take a few calls.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from danube_fast.broker import messages as m
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord
from danube_fast.clock import NEVER_NS
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError, TopicDeleted, Unavailable
from danube_fast.roles import Processes
from danube_fast.workers.process.mailbox import Mailbox, Reply, Request

__all__ = ["Placement", "Workers", "assignment"]

_log = logging.getLogger(__name__)

ASSIGN_PARTITIONS_MAX = 1000
"""Partitions in one call."""
ASSIGN_TIMEOUT_MS = 10_000
RETRY_NS = 50_000_000
"""Pause after a call that failed because the worker went away."""


class Workers(Protocol):
    """The coordinator's view of workers (by process index)."""

    def ready_epoch(self, worker: int) -> int:
        """Epoch of the worker if it is ready, else 0."""

    def process_of(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""

    @property
    def processes(self) -> Processes:
        """The processes of this host."""


class _Waiter:
    """A caller of `when_placed`."""

    __slots__ = ("done", "left")

    def __init__(self, left: set[int], done: Done) -> None:
        self.left = left
        self.done: Done | None = done

    def end(self, error: DanubeError | None) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(error)


class _WorkerQueue:
    """Partitions that are to be assigned to one worker."""

    def __init__(self) -> None:
        self.ids: dict[int, None] = {}
        self.is_calling = False
        self.retry_ns = 0


def assignment(topics: TopicDirectory, partition: PartitionRecord) -> m.Assignment | None:
    """Describe a partition for its worker; None if its topic is gone."""
    topic = topics.topic(partition.topic)
    if topic is None:
        return None
    return m.Assignment(
        partition_id=partition.partition_id,
        topic=partition.topic,
        index=partition.index,
        dispatch=topic.dispatch,
        durability=topic.durability,
        log_id=partition.log_id,
        incarnation=topic.incarnation,
        first_offset=partition.extents[-1].first_offset,
        owner_epoch=partition.owner_epoch,
        policy=topics.policy_of(topic),
        quota=topics.quota_of(topic),
        subscriptions=topics.inherited.get(partition.partition_id, []),
        is_old=partition.partition_id in topics.loaded,
        owner=topic.owner,
    )


class Placement:
    """Assign partitions to all workers. Used by the coordinator's loop only."""

    def __init__(self, mailbox: Mailbox, topics: TopicDirectory, workers: Workers) -> None:
        self._mailbox, self._topics, self._workers = mailbox, topics, workers
        self._confirmed: dict[int, tuple[int, int]] = {}
        """Worker and its epoch."""
        self.asked: list[Callable[[int, m.FindAssignments], None]] = []
        """Called when a worker asks for its partitions, before it is told."""
        self.revision: Callable[[], int] = lambda: 0
        """Revision of the metadata that workers may remember."""
        self._waiters: dict[int, list[_Waiter]] = {}
        self._queues: dict[int, _WorkerQueue] = {}
        self._deadlines: list[tuple[int, int, _Waiter]] = []
        self._order = itertools.count()
        self._now_ns = 0
        mailbox.serve(m.FindAssignments, self._assignments)
        mailbox.serve(m.FindOwner, self._owner)
        mailbox.serve(m.PartitionsDropped, self._dropped)

    def _owner(self, request: Request[m.FindOwner]) -> None:
        record = self._topics.partition(request.message.partition_id)
        process = None if record is None else self._workers.process_of(record.log_id)
        request.reply(m.Owner(process))

    # ---------------------------------------------------------------- asking

    def when_placed(
        self, partitions: Iterable[PartitionRecord], deadline_ns: int, done: Done
    ) -> None:
        """Call `done` once all are confirmed by workers that are ready: maybe at once, and with
        Unavailable when the deadline (monotonic ns) comes first."""
        left = {record.partition_id for record in partitions if not self._is_placed(record)}
        if not left:
            done(None)
            return
        waiter = _Waiter(left, done)
        for partition_id in left:
            record = self._topics.partition(partition_id)
            if record is None:
                continue
            self._waiters.setdefault(partition_id, []).append(waiter)
            self._queue_of(record).ids[partition_id] = None
        heapq.heappush(self._deadlines, (deadline_ns, next(self._order), waiter))

    def _queue_of(self, record: PartitionRecord) -> _WorkerQueue:
        return self._queues.setdefault(self._workers.process_of(record.log_id), _WorkerQueue())

    def invalidate(self, partitions: Iterable[PartitionRecord]) -> None:
        """Forget the confirmations of partitions whose settings changed."""
        for record in partitions:
            self._confirmed.pop(record.partition_id, None)

    def moved(self, before: PartitionRecord) -> None:
        """Assign a partition anew: it has another log than `before`."""
        self._confirmed.pop(before.partition_id, None)
        self._queue_of(before).ids.pop(before.partition_id, None)
        self._queue_again(before.partition_id)

    def forget(
        self, partitions: Iterable[PartitionRecord], error: DanubeError | None = None
    ) -> None:
        """Assign these partitions no more: they are gone. Callers that wait hear `error`, or TopicDeleted."""
        for record in partitions:
            self._confirmed.pop(record.partition_id, None)
            self._queue_of(record).ids.pop(record.partition_id, None)
            for waiter in self._waiters.pop(record.partition_id, []):
                waiter.end(error or TopicDeleted(f"topic {record.topic} was deleted just now"))

    def _is_placed(self, record: PartitionRecord) -> bool:
        worker = self._workers.process_of(record.log_id)
        epoch = self._workers.ready_epoch(worker)
        return epoch > 0 and self._confirmed.get(record.partition_id) == (worker, epoch)

    # ---------------------------------------------------------------- the turn

    def do_work(self, now_ns: int) -> int:
        """Assign queued partitions, end callers that waited too long; the number of things done."""
        self._now_ns = now_ns
        done = 0
        for worker, queue in self._queues.items():
            if queue.ids and not queue.is_calling and now_ns >= queue.retry_ns:
                done += self._assign(worker, queue)
        while self._deadlines and (
            self._deadlines[0][0] <= now_ns or self._deadlines[0][2].done is None
        ):
            waiter = heapq.heappop(self._deadlines)[2]
            if waiter.done is not None:
                done += 1
                waiter.end(self._too_late(waiter))
        return done

    def next_deadline_ns(self) -> int:
        """When `do_work` must run again at the latest."""
        deadline_ns = self._deadlines[0][0] if self._deadlines else NEVER_NS
        for queue in self._queues.values():
            if queue.ids and not queue.is_calling:
                deadline_ns = min(deadline_ns, max(queue.retry_ns, self._now_ns + RETRY_NS))
        return deadline_ns

    def _assign(self, worker: int, queue: _WorkerQueue) -> int:
        epoch = self._workers.ready_epoch(worker)
        if not epoch:
            return 0
        batch: dict[int, m.Assignment] = {}
        for partition_id in list(itertools.islice(queue.ids, ASSIGN_PARTITIONS_MAX)):
            del queue.ids[partition_id]
            record = self._topics.partition(partition_id)
            entry = assignment(self._topics, record) if record is not None else None
            if entry is not None:
                batch[partition_id] = entry

        def on_reply(reply: Reply) -> None:
            queue.is_calling = False
            self._confirm(worker, batch, epoch, reply)

        queue.is_calling = True
        message = m.Assign(list(batch.values()), self.revision())
        self._mailbox.call(worker, message, on_reply=on_reply, timeout_ms=ASSIGN_TIMEOUT_MS)
        return 1

    def _confirm(
        self, worker: int, batch: dict[int, m.Assignment], epoch: int, reply: Reply
    ) -> None:
        if isinstance(reply.error, Unavailable):
            self._queues[worker].retry_ns = self._now_ns + RETRY_NS
            for partition_id in batch:
                self._queue_again(partition_id)
            return
        if reply.error is not None:
            _log.error("%d partitions could not be assigned: %s", len(batch), reply.error)
        for partition_id, entry in batch.items():
            record = self._topics.partition(partition_id)
            if reply.error is None and record is not None:
                if assignment(self._topics, record) != entry:
                    self._queue_again(partition_id)  # it changed meanwhile
                    continue
                self._confirmed[partition_id] = worker, epoch
            for waiter in self._waiters.pop(partition_id, []):
                waiter.left.discard(partition_id)
                if reply.error is not None or not waiter.left:
                    waiter.end(reply.error)

    def _queue_again(self, partition_id: int) -> None:
        """Assign a partition once more, to its worker of now, if a caller waits for that."""
        record = self._topics.partition(partition_id)
        if record is not None and partition_id in self._waiters:
            self._queue_of(record).ids[partition_id] = None

    def _too_late(self, waiter: _Waiter) -> Unavailable:
        partition_id = min(waiter.left)
        for left in waiter.left:
            waiters = self._waiters.get(left, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(left, None)
        record = self._topics.partition(partition_id)
        if record is None:
            return Unavailable(f"partition {partition_id} is gone; look the topic up again")
        worker = self._workers.process_of(record.log_id)
        number = self._workers.processes.number(worker)
        return Unavailable(
            f"topic {record.topic} is on worker {number}, which is down or busy just now; try again"
        )

    # ---------------------------------------------------------------- asked by workers

    def _assignments(self, request: Request[m.FindAssignments]) -> None:
        for listener in self.asked:
            listener(request.peer, request.message)
        topics, log_ids = self._topics, request.message.log_ids
        entries = [assignment(topics, record) for record in topics.partitions_in_logs(log_ids)]
        known = [entry for entry in entries if entry is not None]
        undecided = request.message.undecided
        elsewhere = [number for number in undecided if topics.is_elsewhere(number, log_ids)]
        deleted = topics.deleted_in_logs(log_ids)
        request.reply(m.Assignments(known, self.revision(), deleted, elsewhere))

    def _dropped(self, request: Request[m.PartitionsDropped]) -> None:
        self._topics.dropped(request.message.partition_ids)
