"""Where the messages of a partition stand in its log, when some were written again behind the rest.

    log      | S1: 0-9 10-19 20-29 | S2: 30-39 40-49 | S3: 0-9* 20-29* |        * what a pass left
    offsets    0-9* (S3), 10-19 gone, 20-29* (S3), 30-39 (S2), 40-49 (S2)       break at 30

Offsets never change, places do. Copies that a pass has replaced are not read any more, though they
may stand in the log for as long as another topic keeps their segment.
"""

from __future__ import annotations

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Gap
from danube_fast.wal.index import Run
from danube_fast.wal.log import Log

__all__ = [
    "NEVER_USED",
    "TRIMMED",
    "breaks_left",
    "first_run",
    "gap_in_log",
    "live_runs",
    "lowest_position",
]

NEVER_USED = "these offsets were never used"
TRIMMED = "these messages were trimmed"
_STALE_BYTES = 1 << 20
"""Looked through at a time."""


def live_runs(log: Log, partition: Partition, offset: int, byte_limit: int) -> list[Run]:
    """Runs from `offset` on, in order, at least one if there is any, up to `byte_limit` bytes."""
    runs = log.runs(partition.partition_id, offset, byte_limit)
    compacted = partition.compacted
    while runs and runs[0].base_offset < compacted.until:
        living = [
            run
            for run in runs
            if run.base_offset >= compacted.until or run.position >= compacted.stale_position
        ]
        if living:
            return living
        runs = log.runs(partition.partition_id, runs[-1].end_offset, max(byte_limit, _STALE_BYTES))
    return runs


def gap_in_log(partition: Partition, offset: int, end: int) -> Gap:
    """Why there is nothing in [offset, end) of a partition's log."""
    first = partition.first_offset
    if offset < partition.compacted.until and (offset >= first or partition.policy.compaction):
        return Gap(end, "newer messages have the keys of these", is_silent=True)
    unpinned = any(offset < at for at in partition.breaks)
    lost = (offset < first or unpinned) and end > partition.unsure_until
    return Gap(end, TRIMMED if lost else NEVER_USED, lost)


def first_run(log: Log, partition: Partition, offset: int) -> Run | None:
    """The run that contains `offset`, or the first one behind it; None if there is none."""
    found = live_runs(log, partition, offset, 1)
    return found[0] if found else None


def lowest_position(log: Log, partition: Partition, offset: int) -> int | None:
    """The lowest position of anything from `offset` on; None if there is nothing."""
    runs = [first_run(log, partition, at) for at in partition.places_from(offset)]
    return min((run.position for run in runs if run is not None), default=None)


def breaks_left(log: Log, partition: Partition) -> list[int]:
    """Breaks of a partition that still count, after segments were given back: what stood between two
    places may be gone, and then the second may lie higher."""
    left = []
    for at in partition.places_from(partition.first_offset)[1:]:
        before, behind = first_run(log, partition, at - 1), first_run(log, partition, at)
        if before is None or behind is None:
            continue
        if before.base_offset >= at or behind.position < before.position:
            left.append(at)
    return left
