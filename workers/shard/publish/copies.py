"""Copies of frames that are written to a log again, at the same offsets: of a move, of a compaction."""

from __future__ import annotations

from danube_fast.wal.index import Runs
from danube_fast.wal.log import Log
from danube_fast.wal.rewrite import restamp_run
from danube_fast.workers.shard.publish.journal import Journal

__all__ = ["append_copies", "write_again"]


def write_again(journal: Journal, frames: bytearray, now_ns: int) -> Runs:
    """Write frames of one partition that came from a log, stamped anew, in a group of their own, and have
    it synced; their runs. Raises ResourceExhausted, Internal."""
    journal.write(now_ns)
    try:
        runs = append_copies(journal.log, frames)
    finally:
        journal.marked = False
        journal.refresh()
    journal.log.sync()
    return runs


def append_copies(log: Log, frames: bytearray) -> Runs:
    """Append frames of one partition as one group, stamped anew; their runs. The caller refreshes the
    journal. Raises ResourceExhausted, Internal."""
    position = log.reserve(len(frames))
    runs = restamp_run(
        frames, log_id=log.log_id, position=position, epoch=log.epoch,
        synced_position=log.synced_position,
    )  # fmt: skip
    log.append([frames], len(frames), runs)
    return runs
