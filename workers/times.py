"""From a time to an offset: where a subscription, a reader or a seek by time begins."""

from __future__ import annotations

from danube_fast.broker.consumer import Stored
from danube_fast.broker.partition import Partition
from danube_fast.frame.view import FrameView
from danube_fast.wal.log import Log
from danube_fast.workers.frames import frames_of
from danube_fast.workers.places import first_run

__all__ = ["offset_at"]


def _first_from(frames: list[Stored], time_ns: int) -> int | None:
    """Offset of the first frame that the broker got at that time or later."""
    for stored in frames:
        if FrameView(stored.memory).append_time_ns >= time_ns:
            return stored.base_offset
    return None


def offset_at(partition: Partition, log: Log, time_ns: int) -> int:
    """Offset of the first visible message that the broker got at `time_ns` (wall clock) or later; the end
    if there is none.

    The index knows the time of a run of frames by its first; the run before may have some as late.
    """
    found = _first_from(partition.tail_frames(), time_ns)
    oldest = partition.oldest_in_tail()
    if partition.logged and (found is None or oldest is None or found == oldest.base_offset):
        indexed = log.find_time(partition.partition_id, time_ns)
        if indexed is not None and (found is None or indexed < found):
            found = indexed
        before = partition.visible if found is None else found
        run = first_run(log, partition, before - 1) if before else None
        if run is not None:
            frames = frames_of(partition.partition_id, log.read_run(run))
            earlier = _first_from(frames, time_ns)
            found = earlier if earlier is not None else found
    end = partition.visible
    return max(partition.first_offset, min(end, end if found is None else found))
