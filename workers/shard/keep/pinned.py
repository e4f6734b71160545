"""A full log whose oldest segment cannot go, because a few messages in it are still needed.

    | oldest segment, nearly all of it acked | ... | tail |      needed frames: written again at the tail,
      x       x x                                  | x x x |     then the segment goes

That is done if at most half of a segment is written for the one that goes. Otherwise the topic that needs
it is refused, see trimming.py. While topics with history wait for their store, and are refused, as much as a
segment is written: the others go on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.ledger.layout import State
from danube_fast.broker.ledger.ledger import Rows
from danube_fast.broker.partition import Partition
from danube_fast.broker.sparse import existing, places_of
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.broker.topics.policy import RetentionPolicy
from danube_fast.errors import DataLoss
from danube_fast.frame.view import FrameView
from danube_fast.wal.index import Run
from danube_fast.workers.shard.keep.rewrite import Rewrite
from danube_fast.workers.shard.keep.segments import Segments
from danube_fast.workers.shard.read.frames import frames_of, part_of
from danube_fast.workers.shard.read.places import live_runs

__all__ = ["free_oldest_segment"]

REWRITES = "rewrites"
"""The name of the jobs themselves among the pins of a log."""
RUNS_BYTES = 1 << 18
"""Looked up at a time."""


def free_oldest_segment(job: Rewrite, segments: Segments) -> Generator[bool, None, bool]:
    """Move needed frames away from the oldest segment of the job's log, and give that back. False if they are
    too many. Raises Unavailable, ResourceExhausted, Internal."""
    log = job.log
    start, end = log.oldest_position, log.oldest_end
    pinned = job.state.pins.lowest(job.slot, but=REWRITES)
    if log.segment_count < 2 or (pinned is not None and pinned < end):
        return True  # nothing to give back just now
    yield from job.wait_durable()
    job.needed_from = start
    asking = _asking(job)
    needed: list[tuple[Partition, list[tuple[Run, Rows | None]]]] = []
    partitions = job.state.catalog.of_log(job.slot)
    waits_for_store = any(Cause.HISTORY in each.refusals for each in partitions)
    room = end - start if waits_for_store else (end - start) // 2
    for partition in partitions:
        if not partition.reliable:
            continue
        runs: list[tuple[Run, Rows | None]] = []
        for found in _runs_below(job, segments, partition, end):
            if found is not None:
                runs.append(found)
                run, rows = found
                share = run.offset_span if rows is None else len(rows)
                room -= run.byte_count * share // run.offset_span
            if room < 0 or (runs and not partition.logged):
                return False
            yield True
        if runs:
            job.check(partition)
            needed.append((partition, runs))
    for partition, runs in needed:
        yield from _move(job, partition, runs)
    yield from job.wait_durable()
    job.check_log()
    pinned = job.state.pins.lowest(job.slot, but=REWRITES)
    # a subscription that is new, or has sought, may need more: the next request looks anew
    if (pinned is None or pinned >= end) and _asking(job) <= asking:
        segments.give_back(job.slot, end, urgent=True)
    return True


def _asking(job: Rewrite) -> set[tuple[object, int]]:
    """List partitions and subscriptions that need messages of the job's log, and their starts."""
    found: set[tuple[object, int]] = set()
    for partition in job.state.catalog.of_log(job.slot):
        if partition.reliable:
            if _keeps_all(job, partition):
                found.add((partition, 0))
            found |= {(sub, sub.start_count) for sub in partition.subscriptions.values()}
    return found


def _keeps_all(job: Rewrite, partition: Partition) -> bool:
    policy = partition.policy
    forever = policy.retention_policy is RetentionPolicy.FOREVER
    return policy.compaction or forever or job.state.keeps_history(partition)


def _runs_below(
    job: Rewrite, segments: Segments, partition: Partition, end: int
) -> Iterator[tuple[Run, Rows | None] | None]:
    """Find needed runs of a partition below `end`, and which rows of them (None: all). Yields None now and
    then, to be interrupted."""
    claims = segments.claims(partition, over=True)
    if not claims:
        return
    subs = [sub for sub in partition.subscriptions.values() if sub.tracks]
    keeps_all = _keeps_all(job, partition)
    places = partition.places_from(min(at for at, _ in claims))
    for place, following in zip(places, [*places[1:], partition.visible], strict=True):
        at: int | None = place
        while at is not None and at < following:
            runs = live_runs(job.log, partition, at, RUNS_BYTES)
            at = runs[-1].end_offset if runs else None
            for run in runs:
                if run.base_offset >= following or run.position >= end:
                    at = None
                    break
                rows = None if keeps_all else _needed_rows(subs, run)
                if rows is None or len(rows):
                    yield run, rows
            yield None


def _needed_rows(subs: list[Subscription], run: Run) -> Rows:
    """Find the rows of a run that some subscription has not acked."""
    base, end = run.base_offset, run.end_offset
    needed = np.zeros(run.offset_span, bool)
    for sub in subs:
        low = max(base, sub.cursor)
        if low >= end:
            continue
        mine = np.ones(run.offset_span, bool)
        mine[: low - base] = False
        if sub.ledger.settled_ahead:
            for state in (State.SETTLED, State.SETTLED_NEW):
                mine[sub.ledger.select(base, low, end, state)] = False
        needed |= mine
    return np.flatnonzero(needed).astype(np.int32)


def _move(
    job: Rewrite, partition: Partition, needed: list[tuple[Run, Rows | None]]
) -> Generator[bool, None, None]:
    piece = bytearray()
    for run, rows in needed:
        job.check(partition)
        data = job.log.read_run(run)
        if rows is None:
            piece += data
        else:
            for stored in frames_of(partition.partition_id, data):
                piece += _part(stored, rows)
        if len(piece) >= job.piece_bytes or (piece and run is needed[-1][0]):
            job.write(partition, piece)
            piece = bytearray()
            yield from job.wait_for_disk()
        yield True
    if piece:
        job.write(partition, piece)


def _part(stored: Stored, rows: Rows) -> bytearray | memoryview:
    """Cut the messages at `rows` out of a frame, as far as it has them."""
    there, _ = existing(stored, rows)
    if len(there) == stored.message_count:
        return stored.memory
    view = FrameView(stored.memory)
    try:
        return part_of(view, places_of(stored, view, there)) if len(there) else bytearray()
    except DataLoss:  # compressed garbage: its consumer will report it
        return stored.memory
