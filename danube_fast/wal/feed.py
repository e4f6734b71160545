"""Which runs a log has: the index on disk and the tail table in front of it, as one.

    append / replay --> tail table --(behind the sync, in slices)--> index (LMDB)
    lookup: index first, then tail table

Runs go to the index only below the synced position, so cutting a log back after a failed sync never
has to take anything out of it, and an index that is believed proves what the log must hold.

An index that turns out to be damaged is built anew from the segments, at once: it is only a cache. The
worker stands still meanwhile, about a second per 3 GB of log.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.errors import DataLoss
from danube_fast.wal.index import Index, Run, Runs
from danube_fast.wal.layout import INDEX_NAME
from danube_fast.wal.scan import describe_scan
from danube_fast.wal.segment import Chain
from danube_fast.wal.tail import TailTable
from danube_fast.wal.walk import Walk, rows_to_runs

__all__ = ["RunTable"]

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")

_SLICE = 1024  # runs put into the index at a time: about a millisecond
_UNINDEXED_BYTES_MAX = 64 * 1024 * 1024  # what a start may have to read again for the index
_SWEEP_ENTRIES_MAX = 512  # entries removed at a time: well below a millisecond


class RunTable:
    """Index and tail table of one log. Used by the worker's loop alone."""

    def __init__(
        self, directory: Path, log_id: int, settings: Settings, clock: Clock, chain: Chain
    ) -> None:
        self._log_id = log_id
        self._chain = chain
        self._flush_entries = settings.index_flush_entries
        self._tail = TailTable()
        self._index = Index(directory / INDEX_NAME, log_id, settings.index_map_bytes, clock)
        self._index.open()
        self._directory = directory
        self._rewritten: set[int] = set()
        self._lost: DataLoss | None = None

    # -- starting ----------------------------------------------------------------------------

    def catch_up(self, position: int) -> None:
        """Index what is below `position` and not indexed yet, from the segments' headers.

        Raises DataLoss at old damage: what stands behind it would not be found, without a word.
        """
        self._index.mark_open()
        at = max(self._index.indexed_position, self._chain.oldest_position)
        while at < position:
            walk = Walk(self._chain, self._log_id, at, 0, check_bodies=False)
            for block in walk.blocks(stop=position):
                self.replayed(block.rows)
            if walk.position < position:
                path = walk.segment.path if walk.segment else self._directory
                raise DataLoss(
                    f"{path} is damaged at position {walk.position}: {describe_scan(walk.code)}; see "
                    "what is lost with `danube-fast wal verify`, and go on without it with `wal "
                    "verify --accept-loss`"
                )
            at = position

    def replayed(self, rows: np.ndarray[Any, Any]) -> None:
        """Take frames that were found on disk, in order; those that are indexed are passed over."""
        rows = rows[rows["position"] >= self._index.indexed_position]
        if not len(rows):
            return
        self._tail.add(rows_to_runs(rows))
        if len(self._tail) >= self._flush_entries and self._index.is_ready:
            end = int(rows["position"][-1]) + int(rows["frame_bytes"][-1])
            self._flush_all(end)

    def finish_replay(self, cut: int) -> None:
        """Take note that the log ends at `cut`. Raises DataLoss if the index knows of more: that was durable."""
        known = self._index.indexed_position
        if known > cut:
            raise DataLoss(
                f"{self._directory} ends at position {cut}, but the log was durable up to position "
                f"{known}, says its index: segments or the end of one are missing; put them back, or "
                f"accept the loss by removing {self._index.directory}"
            )
        self._flush_all(cut)
        self._index.start_sweep(self._chain.oldest_position)

    def _flush_all(self, end_position: int) -> None:
        if self._index.add(self._tail.rows, end_position):
            self._tail.drop_first(len(self._tail))

    # -- running -----------------------------------------------------------------------------

    def appended(self, runs: Runs) -> None:
        """Take the runs of a group that was written."""
        self._tail.add(runs)

    def work(self, synced_position: int, *, idle: bool = False) -> int:
        """Do a slice of what is due: index writes behind the sync, removals behind the trim.

        Returns how many entries were moved. `idle`: do not wait for a full batch.
        """
        moved = self._index.sweep(_SWEEP_ENTRIES_MAX)
        due = idle or len(self._tail) >= self._flush_entries
        behind = synced_position - self._index.indexed_position
        if (due or behind >= _UNINDEXED_BYTES_MAX) and len(self._tail) and self._index.is_ready:
            moved += self._flush_slice(synced_position)
        return moved

    def _flush_slice(self, synced_position: int) -> int:
        durable = self._tail.count_below(synced_position)
        count = min(durable, _SLICE)
        if not count:
            return 0
        rows = self._tail.rows
        end = int(rows["position"][count]) if count < durable else synced_position
        if not self._index.add(rows[:count], end):
            return 0
        self._tail.drop_first(count)
        return count

    def cut(self, position: int, runs: Runs) -> None:
        """Forget runs at or above `position`; `runs` stand there now."""
        self._tail.drop_from(position)
        self._tail.add(runs)

    def note_rewritten(self, partition_id: int) -> None:
        """Runs of a partition may stand in the log, and in both tables, more than once: the newest
        counts. Its entries are not in the order of positions either."""
        self._rewritten.add(partition_id)
        self._index.note_rewritten(partition_id)

    def start_sweep(self, oldest_position: int) -> None:
        """Segments below were trimmed; their entries go in the background of `work`."""
        self._index.start_sweep(oldest_position)

    def drop_partition(self, partition_id: int) -> None:
        """Forget a partition."""
        self._rewritten.discard(partition_id)
        self._index.drop_partition(partition_id)
        self._tail.drop_partition(partition_id)

    def purge_partition(self, partition_id: int) -> bool:
        """Do a slice of forgetting what is left of a partition that comes back; True when it is done."""
        self._tail.drop_partition(partition_id)
        return self._index.purge(partition_id, _SWEEP_ENTRIES_MAX)

    def close(self, synced_position: int, *, clean: bool) -> None:
        """Put the rest into the index and close it."""
        if clean and self._index.is_ready:
            rows = self._tail.rows[: self._tail.count_below(synced_position)]
            clean = self._index.add(rows, synced_position)
        self._index.close(clean=clean)

    # -- looking up --------------------------------------------------------------------------

    def find(self, partition_id: int, offset: int) -> Run | None:
        """The first run of a partition that ends behind `offset`."""
        found = self.runs(partition_id, offset, 1)
        return found[0] if found else None

    def runs(self, partition_id: int, offset: int, byte_limit: int) -> list[Run]:
        """Runs from the one with `offset` on, in order, until `byte_limit` bytes are reached."""
        if partition_id in self._rewritten:
            return self._newest_runs(partition_id, offset, byte_limit)
        found: list[Run] = []
        total = 0
        oldest = self._chain.oldest_position
        for run in self._looked_up(lambda: self._indexed(partition_id, offset, byte_limit)):
            found.append(run)
            total += run.byte_count
            if total >= byte_limit:
                return found
        after = found[-1].end_offset if found else offset
        for row in self._tail.find(partition_id, after):
            if int(row["position"]) < oldest:
                continue
            run = _run(row)
            found.append(run)
            total += run.byte_count
            if total >= byte_limit:
                break
        return found

    def _newest_runs(self, partition_id: int, offset: int, byte_limit: int) -> list[Run]:
        """The same of a partition whose runs may stand in both tables: the tail table's are newer."""
        indexed = self._looked_up(lambda: self._indexed(partition_id, offset, byte_limit))
        cut_short = sum(run.byte_count for run in indexed) >= byte_limit
        merged = {run.base_offset: run for run in indexed}
        oldest = self._chain.oldest_position
        for row in self._tail.find_newest(partition_id, offset):
            if cut_short and int(row["base_offset"]) > indexed[-1].base_offset:
                break
            if int(row["position"]) >= oldest:
                merged[int(row["base_offset"])] = _run(row)
        found: list[Run] = []
        total = 0
        for base_offset in sorted(merged):
            if total >= byte_limit:
                break
            found.append(merged[base_offset])
            total += merged[base_offset].byte_count
        return found

    def _indexed(self, partition_id: int, offset: int, byte_limit: int) -> list[Run]:
        """Runs from the index alone, until `byte_limit` bytes are reached."""
        found: list[Run] = []
        left = byte_limit
        for run in self._index.runs(partition_id, offset, self._chain.oldest_position):
            found.append(run)
            left -= run.byte_count
            if left <= 0:
                break
        return found

    def _looked_up(self, look: Callable[[], _Found]) -> _Found:
        """Ask `look` for what is in the index, which is built anew if it is damaged."""
        if self._lost is not None:
            raise self._lost
        try:
            return look()
        except (lmdb.Error, struct.error) as fault:
            _log.error("index %s is damaged (%s); it is built anew", self._index.directory, fault)
            self._rebuild()
            return look()

    def _rebuild(self) -> None:
        """Throw the index away and read all headers again. Raises DataLoss, now and at every look."""
        waiting = self._tail.rows.copy()
        end = int(waiting["position"][0]) if len(waiting) else self._index.indexed_position
        self._tail.drop_from(0)
        self._index.clear()
        try:
            self.catch_up(end)
        except DataLoss as fault:
            self._lost = fault
            raise
        finally:
            self._tail.add(waiting)

    def find_time(self, partition_id: int, time_ns: int) -> int | None:
        """Base offset of the first run of a partition appended at `time_ns` or later."""
        oldest = self._chain.oldest_position
        offset = self._looked_up(lambda: self._index.find_time(partition_id, time_ns, oldest))
        if offset is not None and partition_id not in self._rewritten:
            return offset
        newer = self._tail.find_time(partition_id, time_ns, oldest)
        return min((found for found in (offset, newer) if found is not None), default=None)


def _run(row: Any) -> Run:
    return Run(
        int(row["partition_id"]),
        int(row["base_offset"]),
        int(row["offset_span"]),
        int(row["position"]),
        int(row["byte_count"]),
        int(row["append_time_ns"]),
    )
