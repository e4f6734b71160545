"""Delayed messages: known before anybody asks for them, read before they are due.

    restart, arrival   backlog of a subscription --frames--> due times, before its consumers are back
    every 100 ms       due within 500 ms --log--> the system's page cache

A frame is read again for each of its messages that becomes due; if it has left the page cache
meanwhile, that takes as long as the disk needs.
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING

from danube_fast.broker.consumer import Gap, Stored
from danube_fast.broker.partition import Partition
from danube_fast.errors import DanubeError
from danube_fast.workers.places import first_run

if TYPE_CHECKING:
    from danube_fast.workers.shard import ShardWorker

__all__ = ["Foresight"]

_log = logging.getLogger(__name__)

MS = 1_000_000
AHEAD_NS = 500 * MS
"""Longer than a slow disk takes for a frame; what is read much earlier may be gone again."""
INTERVAL_NS = 100 * MS
FRAMES_PER_TURN = 8
READ_BYTES = 1024 * 1024


class Foresight:
    """The jobs of one worker; used by its loop only."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self._queue: collections.deque[Partition] = collections.deque()
        self._next_ns = 0
        self._done_until_ns = 0
        """Wall clock: what is due before is in the page cache, or was there."""

    @property
    def is_busy(self) -> bool:
        """There is more to look at."""
        return bool(self._queue)

    @staticmethod
    def wake_ms(due_ms: int) -> int:
        """When a worker wants to wake up that has something to do in `due_ms`."""
        lead_ms = AHEAD_NS // MS
        return due_ms - lead_ms if due_ms > lead_ms else due_ms

    def look_at(self, *partitions: Partition) -> None:
        """They were restored from a log, or came from another worker."""
        for partition in partitions:
            if any(sub.looks_ahead for sub in partition.subscriptions.values()):
                self._queue.append(partition)

    def do_work(self, now_ns: int) -> None:
        """Some frames of one partition; and what is due soon, now and then."""
        if self._queue:
            self._look()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + INTERVAL_NS
            self._read_soon()

    def _look(self) -> None:
        worker, partition = self._worker, self._queue[0]
        more = False
        if worker.catalog.by_id.get(partition.partition_id) is partition and not partition.moving:
            try:
                more = partition.look_ahead(self._read, FRAMES_PER_TURN)
            except DanubeError as error:
                _log.warning("%s cannot be looked at: %s", partition.topic, error)
        if not more:
            self._queue.popleft()

    def _read(self, partition: Partition, offset: int) -> list[Stored] | Gap | None:
        return self._worker.upkeep.read_log(partition, offset, READ_BYTES)

    def _read_soon(self) -> None:
        """Have read what becomes due within AHEAD_NS."""
        worker = self._worker
        low_ns, high_ns = self._done_until_ns, worker.now_wall_ns + AHEAD_NS
        for sub in worker.catalog.timers.soon(worker.now_ns + AHEAD_NS):
            partition = worker.catalog.by_id.get(sub.partition_id)
            if sub.delays and partition is not None and partition.logged:
                self._read_frames_soon(partition, sub.delays.due_between(low_ns, high_ns))
        self._done_until_ns = high_ns

    def _read_frames_soon(self, partition: Partition, offsets: list[int]) -> None:
        oldest = partition.oldest_in_tail()
        log = self._worker.logs[partition.log_slot]
        end = 0
        for offset in offsets:
            if offset < end or (oldest is not None and offset >= oldest.base_offset):
                continue
            run = first_run(log, partition, offset)
            if run is not None:
                log.read_soon(run)
                end = run.end_offset
