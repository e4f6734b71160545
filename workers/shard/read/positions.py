"""What administrators do to positions: purge a topic, skip messages of a subscription; and how old is
the oldest message that a subscription has not acked.

A purge is one record: everything below an offset counts as gone, for all subscriptions. It is durable
before anybody is told, and after a restart it holds again, whatever the log still has of the messages.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from danube_fast.broker import records as r
from danube_fast.broker.ledger.ledger import runs_of
from danube_fast.broker.partition import Partition
from danube_fast.broker.sparse import existing
from danube_fast.broker.subscription.consumer import Gap, Stored
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.frame.view import FrameView
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.shard.read.places import first_run, lowest_position

if TYPE_CHECKING:
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["Positions", "purged_below"]

PURGED = "these messages were purged"
NS_PER_SECOND = 1_000_000_000
SLICE_NS = 5_000_000
"""Of each tick, for messages that are skipped."""
SLICE_FRAMES = 256
"""The same under a clock that stands still."""


class Walk:
    """Messages of one partition that are to be skipped, as far as that has come."""

    __slots__ = ("at", "is_over", "left", "partition", "skipped", "sub")

    def __init__(self, partition: Partition, sub: Subscription, count: int | None) -> None:
        self.partition = partition
        self.sub = sub
        self.at = 0
        """What is below was looked at."""
        self.left = count
        """None: all that is there."""
        self.skipped = 0
        self.is_over = False

    def skip(self, count: int, *, is_last: bool = False) -> None:
        """So many messages were skipped."""
        self.skipped += count
        if self.left is not None:
            self.left -= count
        self.is_over = is_last or self.left == 0


class Positions:
    """Mailbox handlers of one worker."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self._skips: deque[tuple[Request, list[Walk]]] = deque()
        worker.state.boot.mailbox.handlers.update({"purge": self._purge, "skip": self._skip})

    def _found(self, request: Request) -> list[Partition]:
        by_id = self._worker.state.catalog.by_id
        found = []
        for number in request.arguments["partition_ids"]:
            partition = by_id.get(number)
            if partition is None or partition.moving:
                raise Unavailable(f"partition {number} is just being moved; try again")
            found.append(partition)
        return found

    # ------------------------------------------------------------ purge

    def _purge(self, request: Request) -> None:
        """{"partition_ids"} -> {"purged": [[partition id, messages, offset], ...]} when durable."""
        found = self._found(request)
        purged: list[list[int]] = []
        left = len(found) + 1

        def done(error: DanubeError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                request.fail(error)
            elif left == 0:
                request.reply({"purged": purged})

        for partition in found:
            until = partition.visible
            count = until - partition.first_offset
            purged.append([partition.partition_id, count, until])
            record = r.Purged(partition.partition_id, until)
            self._drop(partition, until)
            self._worker.write_cursors()  # what consumers are to be told must not come later
            self._worker.state.journals[partition.log_slot].record(record, done)
        done(None)

    def _drop(self, partition: Partition, until: int) -> None:
        worker = self._worker
        moved = [(sub, sub.cursor) for sub in partition.subscriptions.values()]
        partition.purge(until)
        for sub, cursor in moved:
            if cursor < until:
                worker.gaps.tell(partition, sub, Gap(until, PURGED, lost=True, start=cursor))
        worker.tails.empty(partition)
        if partition.keeps_memory:
            worker.retention.trim_memory(partition)
        worker.retention.hasten(partition)
        worker.state.mark_cursor(partition)
        worker.state.mark_ready(partition)

    # ------------------------------------------------------------ skip

    def _skip(self, request: Request) -> None:
        """{"partition_ids", "subscription", "count"} -> {"skipped": [[partition id, messages, cursor],
        ...]} when durable; "count" is per partition, None: all that is there."""
        name, count = request.arguments["subscription"], request.arguments["count"]
        walks = [
            Walk(partition, partition.subscriptions[name], count)
            for partition in self._found(request)
            if name in partition.subscriptions
        ]
        self._skips.append((request, walks))
        self.do_work()

    @property
    def is_busy(self) -> bool:
        """Messages are being skipped."""
        return bool(self._skips)

    def do_work(self) -> None:
        """A slice of what is to be skipped: it is read, and that can be a whole log."""
        if not self._skips:
            return
        clock = self._worker.state.clock
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
                request.fail(
                    Unavailable(
                        f"{walk.partition.topic} was moved or deleted after {done} messages were "
                        "skipped; look where the subscription is, and skip the others"
                    )
                )
            else:
                try:
                    self._pass_over(walk)
                except DanubeError as error:
                    self._skips.popleft()
                    request.fail(error)
                self._worker.touch(walk.sub)
        self._worker.write_cursors()

    def _is_gone(self, walk: Walk) -> bool:
        partition = self._worker.state.partition(walk.partition.partition_id)
        if partition is not walk.partition or partition.moving:
            return True
        return partition.subscriptions.get(walk.sub.name) is not walk.sub

    def _tell_skipped(self, request: Request, walks: list[Walk]) -> None:
        """Answer when all of it is durable."""
        worker = self._worker
        worker.write_cursors()
        skipped = [[w.partition.partition_id, w.skipped, w.sub.cursor] for w in walks]
        slots = {walk.partition.log_slot for walk in walks}
        left = len(slots) + 1

        def done(error: DanubeError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                request.fail(error)
            elif left == 0:
                request.reply({"skipped": skipped})

        for slot in slots:
            journal = worker.state.journals[slot]
            if journal.stuck is not None:
                done(journal.stuck)
            else:
                journal.when_durable(done)
        done(None)

    def _pass_over(self, walk: Walk) -> None:
        """Settle messages behind the cursor: of one frame, or all if that needs no look at them."""
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
        found = partition.frame_at(self._worker.reader.read_some, at) if at < end else None
        if found is None:
            walk.is_over = True
            return
        if isinstance(found, Gap):  # nobody would have got these
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

    # ------------------------------------------------------------ age

    def lag_seconds(self, partition: Partition, sub: Subscription) -> float:
        """Age of the oldest message that is not acked; 0 if all are."""
        worker = self._worker
        offset = sub.cursor if sub.by_message else sub.next_offset
        if offset >= partition.visible:
            return 0.0
        found = partition.frame_at(lambda _partition, _offset: None, offset)
        if isinstance(found, Gap):
            found = partition.frame_at(lambda _partition, _offset: None, found.end)
        time_ns = 0
        if isinstance(found, Stored):
            time_ns = FrameView(found.memory).append_time_ns
        elif partition.reliable:
            run = first_run(worker.state.logs[partition.log_slot], partition, offset)
            time_ns = run.append_time_ns if run is not None else 0
        if not time_ns:
            return 0.0
        return max(0.0, (worker.state.now_wall_ns - time_ns) / NS_PER_SECOND)


def purged_below(worker: ShardWorker, slot: int) -> int:
    """Position in a log below which purges have left nothing that anybody may read; 0: there were none."""
    mine = worker.state.catalog.of_log(slot)
    if not any(partition.purged_until for partition in mine):
        return 0
    log = worker.state.logs[slot]
    position = log.written_position
    for partition in mine:
        lowest = lowest_position(log, partition, partition.first_offset)
        if lowest is not None:
            position = min(position, lowest)
    return position
