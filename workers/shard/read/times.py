"""From a time to an offset: where a subscription, a reader or a seek by time begins; and back."""

from __future__ import annotations

from bisect import bisect_left

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import PENDING, Gap, Stored
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.clock import SECOND_NS
from danube_fast.frame.view import FrameView
from danube_fast.wal.log import Log
from danube_fast.workers.shard.read.places import first_run
from danube_fast.workers.shard.state import ShardState

__all__ = ["lag_seconds", "offset_at"]


def _append_time_ns(stored: Stored) -> int:
    return FrameView(stored.memory).append_time_ns


def _first_from(frames: list[Stored], time_ns: int) -> int | None:
    """Offset of the first frame that the broker got at that time or later; times rise."""
    place = bisect_left(frames, time_ns, key=_append_time_ns)
    return frames[place].base_offset if place < len(frames) else None


def offset_at(partition: Partition, log: Log, time_ns: int) -> int:
    """Offset of the first visible message that the broker got at `time_ns` (wall clock) or later; the end
    if there is none. Reads nothing but the index."""
    found = _first_from(partition.tail_frames(), time_ns)
    oldest = partition.oldest_in_tail()
    if partition.logged and (found is None or oldest is None or found == oldest.base_offset):
        # the index forgets an instant with the first of its runs: others may be left, before all else
        first = first_run(log, partition, partition.first_offset)
        if first is not None and first.append_time_ns >= time_ns:
            return min(partition.visible, max(partition.first_offset, first.base_offset))
        indexed = log.find_time(partition.partition_id, time_ns)
        if indexed is not None and (found is None or indexed < found):
            found = indexed
    end = partition.visible
    return max(partition.first_offset, min(end, end if found is None else found))


def lag_seconds(state: ShardState, partition: Partition, sub: Subscription) -> float:
    """Age of the oldest message that a subscription has not acked; 0 if all are."""
    offset = sub.cursor if sub.by_message else sub.next_offset
    if offset >= partition.visible:
        return 0.0
    found = partition.frame_at(lambda _partition, _offset: PENDING, offset)
    if isinstance(found, Gap):
        found = partition.frame_at(lambda _partition, _offset: PENDING, found.end)
    time_ns = 0
    if isinstance(found, Stored):
        time_ns = _append_time_ns(found)
    elif partition.reliable:
        run = first_run(state.logs[partition.log_slot], partition, offset)
        time_ns = run.append_time_ns if run is not None else 0
    if not time_ns:
        return 0.0
    return max(0.0, (state.now_wall_ns - time_ns) / SECOND_NS)
