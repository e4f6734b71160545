"""What administrators do to positions: purge a topic, skip messages of a subscription; and how old is
the oldest message that a subscription has not acked.

A purge is one record: everything below an offset counts as gone, for all subscriptions. It is durable
before anybody is told, and after a restart it holds again, whatever the log still has of the messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from danube_fast.broker import records as r
from danube_fast.broker.consumer import Gap, Stored
from danube_fast.broker.ledger import runs_of
from danube_fast.broker.partition import Partition
from danube_fast.broker.sparse import existing
from danube_fast.broker.subscription import Subscription
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.frame.view import FrameView
from danube_fast.workers.mailbox import Request
from danube_fast.workers.places import first_run, lowest_position

if TYPE_CHECKING:
    from danube_fast.workers.shard import ShardWorker

__all__ = ["Positions", "purged_below"]

PURGED = "these messages were purged"
NS_PER_SECOND = 1_000_000_000


class Positions:
    """Mailbox handlers of one worker."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        worker.boot.mailbox.handlers.update({"purge": self._purge, "skip": self._skip})

    def _found(self, request: Request) -> list[Partition]:
        by_id = self._worker.catalog.by_id
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
            self._worker.journals[partition.log_slot].record(record, done)
        done(None)

    def _drop(self, partition: Partition, until: int) -> None:
        worker = self._worker
        moved = [(sub, sub.cursor) for sub in partition.subscriptions.values()]
        partition.purge(until)
        for sub, cursor in moved:
            if cursor < until:
                worker.gaps.tell(partition, sub, Gap(until, PURGED, start=cursor))
        worker.tails.empty(partition)
        if partition.keeps_memory:
            worker.retention.trim_memory(partition)
        worker.moved_cursors[partition.partition_id] = partition
        worker.dirty[partition.partition_id] = partition

    # ------------------------------------------------------------ skip

    def _skip(self, request: Request) -> None:
        """{"partition_ids", "subscription", "count"} -> {"skipped": [[partition id, messages, cursor],
        ...]} when durable; "count" is per partition, None: all that is there."""
        worker = self._worker
        name, count = request.arguments["subscription"], request.arguments["count"]
        skipped: list[list[int]] = []
        journals = {}
        for partition in self._found(request):
            sub = partition.subscriptions.get(name)
            if sub is None:
                continue
            number = self._pass_over(partition, sub, count)
            skipped.append([partition.partition_id, number, sub.cursor])
            worker.touch(sub)
            journals[partition.log_slot] = worker.journals[partition.log_slot]
        worker.write_cursors()
        left = len(journals) + 1

        def done(error: DanubeError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                request.fail(error)
            elif left == 0:
                request.reply({"skipped": skipped})

        for journal in journals.values():
            if journal.stuck is not None:
                done(journal.stuck)
            else:
                journal.when_durable(done)
        done(None)

    def _pass_over(self, partition: Partition, sub: Subscription, count: int | None) -> int:
        """Settle the next `count` messages behind the cursor; how many there were."""
        at, end = sub.cursor, partition.visible
        if not sub.tracks:
            at = sub.next_offset
            sub.start_over(end if count is None else min(end, at + count))
            return sub.next_offset - at
        if count is None:
            return sub.settle(at, end)
        left = count
        while left and at < end:
            found = partition.frame_at(self._worker.upkeep.read_some, at)
            if found is None:
                break
            if isinstance(found, Gap):  # nobody would have got these
                sub.settle(at, min(found.end, end))
                at = found.end
                continue
            stop = min(found.end_offset, end, at + left)
            if found.is_sparse:
                rows = np.arange(at - found.base_offset, stop - found.base_offset, dtype=np.int32)
                rows, gone = existing(found, rows)
                for low, high in runs_of(gone, found.base_offset):
                    sub.settle(low, high)
            left -= sub.settle(at, stop)
            at = stop
        return count - left

    # ------------------------------------------------------------ age

    def lag_seconds(self, partition: Partition, sub: Subscription) -> float:
        """Age of the oldest message that is not acked; 0 if all are."""
        worker = self._worker
        offset = sub.cursor if sub.tracks else sub.next_offset
        if offset >= partition.visible:
            return 0.0
        found = partition.frame_at(lambda _partition, _offset: None, offset)
        if isinstance(found, Gap):
            found = partition.frame_at(lambda _partition, _offset: None, found.end)
        time_ns = 0
        if isinstance(found, Stored):
            time_ns = FrameView(found.memory).append_time_ns
        elif partition.reliable:
            run = first_run(worker.logs[partition.log_slot], partition, offset)
            time_ns = run.append_time_ns if run is not None else 0
        if not time_ns:
            return 0.0
        return max(0.0, (worker.now_wall_ns - time_ns) / NS_PER_SECOND)


def purged_below(worker: ShardWorker, slot: int) -> int:
    """Position in a log below which purges have left nothing that anybody may read; 0: there were none."""
    mine = [part for part in worker.catalog.by_id.values() if part.log_slot == slot]
    if not any(partition.purged_until for partition in mine):
        return 0
    log = worker.logs[slot]
    position = log.written_position
    for partition in mine:
        lowest = lowest_position(log, partition, partition.first_offset)
        if lowest is not None:
            position = min(position, lowest)
    return position
