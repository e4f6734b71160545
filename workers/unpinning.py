"""A full log whose oldest segment cannot go, because a few messages in it are still needed.

    | oldest segment, nearly all of it acked | ... | tail |      needed frames: written again at the tail,
      x       x x                                  | x x x |     then the segment goes

That is done as long as it is a bargain: at most half of a segment is written for the one that goes.
Otherwise whoever needs it is refused, see retention.py.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from danube_fast.broker.ledger_layout import State
from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription import Subscription
from danube_fast.broker.topic_policy import RetentionPolicy
from danube_fast.wal.index import Run
from danube_fast.workers.places import live_runs

if TYPE_CHECKING:
    from danube_fast.workers.retention import Retention
    from danube_fast.workers.rewrites import Job

__all__ = ["unpin"]

RUNS_BYTES = 1 << 18
"""Looked up at a time."""


def unpin(job: Job, retention: Retention) -> Generator[bool, None, bool]:
    """Move what is needed away from the oldest segment of the job's log, and give that back. False if
    it is too much. Raises Unavailable, ResourceExhausted, Internal."""
    log = job.log
    start, end = log.oldest_position, log.oldest_end
    held = job.worker.moves.needed_position(job.slot)
    if log.segment_count < 2 or (held is not None and held < end):
        return False
    yield from job.settle()
    job.held_position = start
    needed: list[tuple[Partition, list[Run]]] = []
    room = (end - start) // 2
    for partition in list(job.worker.catalog.by_id.values()):
        if partition.log_slot != job.slot or not partition.reliable:
            continue
        runs: list[Run] = []
        for run in _runs_below(job, retention, partition, end):
            if run is not None:
                runs.append(run)
                room -= run.byte_count
            if room < 0 or (runs and not partition.logged):
                return False
            yield True
        if runs:
            job.check(partition)
            needed.append((partition, runs))
    for partition, runs in needed:
        yield from _move(job, partition, runs)
    yield from job.settle()
    job.check_log()
    held = job.worker.moves.needed_position(job.slot)
    if held is None or held >= end:
        retention.give_back(job.slot, end, urgent=True)
    return True


def _runs_below(
    job: Job, retention: Retention, partition: Partition, end: int
) -> Iterator[Run | None]:
    """Runs of a partition that somebody needs and that stand below `end`; None now and then."""
    claims = retention.claims(partition, over=True)
    if not claims:
        return
    subs = [sub for sub in partition.subscriptions.values() if sub.tracks]
    keeps_all = partition.policy.retention_policy is RetentionPolicy.FOREVER
    keeps_all = keeps_all or partition.policy.compaction
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
                if keeps_all or any(_needs(sub, run) for sub in subs):
                    yield run
            yield None


def _needs(sub: Subscription, run: Run) -> bool:
    """Whether a subscription has not acked all of a run."""
    low, ledger = max(run.base_offset, sub.cursor), sub.ledger
    if low >= run.end_offset or not ledger.settled_ahead:
        return low < run.end_offset
    settled = sum(
        len(ledger.select(low, low, run.end_offset, state))
        for state in (State.SETTLED, State.SETTLED_NEW)
    )
    return settled < run.end_offset - low


def _move(job: Job, partition: Partition, runs: list[Run]) -> Generator[bool, None, None]:
    piece = bytearray()
    for run in runs:
        job.check(partition)
        piece += job.log.read_run(run)
        if len(piece) >= job.piece_bytes or run is runs[-1]:
            job.write(partition, piece)
            piece = bytearray()
            yield from job.breathe()
        yield True
