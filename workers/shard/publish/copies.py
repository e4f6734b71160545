"""Frames that came from a log and are written to one again: of a move, of a compaction."""

from __future__ import annotations

from danube_fast.wal.index import Runs
from danube_fast.wal.rewrite import restamp_run
from danube_fast.workers.shard.publish.journal import Journal

__all__ = ["write_again"]


def write_again(journal: Journal, frames: bytearray, now_ns: int) -> Runs:
    """Write frames of one partition that came from a log, stamped anew, in a group of their own, and have
    it synced; their runs. Raises ResourceExhausted, Internal."""
    log = journal.log
    journal.write(now_ns)
    position = log.reserve(len(frames))
    runs = restamp_run(
        frames, log_id=log.log_id, position=position, epoch=log.epoch,
        synced_position=log.synced_position,
    )  # fmt: skip
    try:
        log.append([frames], len(frames), runs)
    finally:
        journal.marked = False
        journal.refresh()
    log.sync()
    return runs
