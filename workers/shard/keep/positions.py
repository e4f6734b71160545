"""Positions that administrators change: purge a topic, skip messages of a subscription.

A purge is one record: all messages below an offset count as gone, for all subscriptions. It is durable
before it is answered, and after a restart it counts again, even if the log still has the messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from danube_fast.broker import messages as m
from danube_fast.broker import records as r
from danube_fast.broker.ledger.ledger import runs_of
from danube_fast.broker.partition import Partition
from danube_fast.broker.sparse import existing
from danube_fast.broker.subscription.consumer import PENDING, Gap
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.countdown import Countdown
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.tails import Tails
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.keep.cursors import Cursors
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.keep.trimming import Trimming
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.state import ShardState

__all__ = ["Positions"]

PURGED = "these messages were purged"
SLICE_NS = 5_000_000
"""Time in each tick for messages that are skipped."""
SLICE_FRAMES = 256
"""The same under a clock that stands still."""


@dataclass(eq=False)
class Walk:
    """Progress of skipping messages of one partition."""

    partition: Partition
    sub: Subscription
    left: int | None
    """How many more; None: all."""
    at: int = 0
    """All below was looked at."""
    skipped: int = 0
    is_over: bool = False

    def skip(self, count: int, *, is_last: bool = False) -> None:
        """Count messages that were skipped."""
        self.skipped += count
        if self.left is not None:
            self.left -= count
        self.is_over = is_last or self.left == 0


class Positions(Job):
    """Purge and skip messages of one worker."""

    def __init__(
        self, state: ShardState, reader: LogReader, tails: Tails, consumers: Consumers,
        cursors: Cursors, gaps: Gaps, retention: Retention, trimming: Trimming,
    ) -> None:  # fmt: skip
        self._state, self._reader, self._tails, self._consumers = state, reader, tails, consumers
        self._cursors, self._gaps, self._retention = cursors, gaps, retention
        self._trimming = trimming
        self._skips: deque[tuple[Request[m.SkipMessages], list[Walk]]] = deque()
        state.boot.mailbox.serve(m.PurgePartitions, self._purge)
        state.boot.mailbox.serve(m.SkipMessages, self._skip)

    def _found(self, partition_ids: list[int]) -> list[Partition]:
        by_id = self._state.catalog.by_id
        found = []
        for number in partition_ids:
            partition = by_id.get(number)
            if partition is None or partition.moving:
                raise Unavailable(f"partition {number} is just being moved; try again")
            found.append(partition)
        return found

    # ------------------------------------------------------------ purge

    def _purge(self, request: Request[m.PurgePartitions]) -> None:
        found = self._found(request.message.partition_ids)
        purged: list[tuple[int, int, int]] = []
        with Countdown(request.when_done(purged)) as countdown:
            for partition in found:
                until = partition.visible
                count = until - partition.first_offset
                purged.append((partition.partition_id, count, until))
                record = r.Purged(partition.partition_id, until)
                self._drop(partition, until)
                self._cursors.write()  # cursors at the purge must not be recorded behind it
                self._state.record(partition, record, countdown.add())

    def _drop(self, partition: Partition, until: int) -> None:
        moved = [(sub, sub.cursor) for sub in partition.subscriptions.values()]
        partition.purge(until)
        for sub, cursor in moved:
            if cursor < until:
                self._gaps.tell(partition, sub, Gap(until, PURGED, lost=True, start=cursor))
        self._tails.empty(partition)
        if partition.keeps_memory:
            self._retention.trim_memory(partition)
        self._trimming.trim_soon(partition)
        self._state.mark_cursor(partition)
        self._state.mark_ready(partition)

    # ------------------------------------------------------------ skip

    def _skip(self, request: Request[m.SkipMessages]) -> None:
        asked = request.message
        walks = [
            Walk(partition, partition.subscriptions[asked.subscription], asked.count)
            for partition in self._found(asked.partition_ids)
            if asked.subscription in partition.subscriptions
        ]
        self._skips.append((request, walks))
        self.do_work(self._state.now_ns)

    @property
    def is_busy(self) -> bool:
        """Whether messages are being skipped."""
        return bool(self._skips)

    def do_work(self, now_ns: int) -> None:
        """Skip a slice of the messages: they are read, and that can be a whole log."""
        if not self._skips:
            return
        clock = self._state.clock
        until_ns, frames = clock.monotonic_ns() + SLICE_NS, SLICE_FRAMES
        while self._skips and frames and clock.monotonic_ns() < until_ns:
            frames -= 1
            request, walks = self._skips[0]
            walk = next((walk for walk in walks if not walk.is_over), None)
            if walk is None:
                self._skips.popleft()
                self._tell_skipped(request, walks)
            elif self._is_gone(walk):
                self._skips.popleft()
                done = sum(walk.skipped for walk in walks)
                text = f"{walk.partition.topic} was moved or deleted after {done} messages were skipped"
                request.fail(Unavailable(f"{text}; look the subscription up, and skip the others"))
            else:
                try:
                    self._pass_over(walk)
                except DanubeError as error:
                    self._skips.popleft()
                    request.fail(error)
                self._consumers.touch(walk.sub)
        self._cursors.write()

    def _is_gone(self, walk: Walk) -> bool:
        partition = self._state.partition(walk.partition.partition_id)
        if partition is not walk.partition or partition.moving:
            return True
        return partition.subscriptions.get(walk.sub.name) is not walk.sub

    def _tell_skipped(self, request: Request[m.SkipMessages], walks: list[Walk]) -> None:
        """Answer when all cursors are durable."""
        skipped = [(w.partition.partition_id, w.skipped, w.sub.cursor) for w in walks]
        slots = {walk.partition.log_slot for walk in walks}
        self._cursors.flush(slots, request.when_done(skipped))

    def _pass_over(self, walk: Walk) -> None:
        """Skip messages behind the cursor: of one frame, or all if they need not be read."""
        partition, sub, count = walk.partition, walk.sub, walk.left
        end = partition.visible
        if not sub.by_message:
            at = sub.next_offset
            sub.start_over(end if count is None else min(end, at + count))
            walk.skip(sub.next_offset - at, is_last=True)
            return
        at = max(walk.at, sub.cursor)
        if count is None:
            walk.skip(sub.settle(at, end), is_last=True)
            return
        found = partition.frame_at(self._reader.read_now, at) if at < end else PENDING
        if found is PENDING:
            walk.is_over = not self._reader.is_in_history(partition, at)
            return
        if isinstance(found, Gap):  # no consumer would get these
            walk.at = min(found.end, end)
            sub.settle(at, walk.at)
            return
        walk.at = stop = min(found.end_offset, end, at + count)
        if found.is_sparse:
            rows = np.arange(at - found.base_offset, stop - found.base_offset, dtype=np.int32)
            rows, gone = existing(found, rows)
            for low, high in runs_of(gone, found.base_offset):
                sub.settle(low, high)
        walk.skip(sub.settle(at, stop))
