"""The tail table: runs that were appended but are not in the LMDB index yet.

A plain array in the order of the log, filled by `append` (one copy, no Python per run) and emptied
from the front when the index has taken the runs over. Lookups are rare here (consumers at the tail
are fed from memory), so they may look through the few thousand rows that there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube_fast.wal.layout import RUN_DTYPE

__all__ = ["TailTable"]

_ROWS_AT_FIRST = 1024


class TailTable:
    """Runs in order of position. Written and read by the worker's loop alone."""

    def __init__(self) -> None:
        self._rows = np.zeros(_ROWS_AT_FIRST, dtype=RUN_DTYPE)
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """A view of what is in the table, RUN_DTYPE; valid until the next change."""
        return self._rows[self._start : self._end]

    def add(self, runs: np.ndarray[Any, Any]) -> None:
        """Append runs; their positions must not be below those that are there."""
        count = len(runs)
        if self._end + count > len(self._rows):
            self._make_room(count)
        self._rows[self._end : self._end + count] = runs
        self._end += count

    def _make_room(self, count: int) -> None:
        live = self.rows
        size = len(self._rows)
        while size < 2 * (len(live) + count):
            size *= 2
        rows = np.zeros(size, dtype=RUN_DTYPE)
        rows[: len(live)] = live
        self._rows, self._start, self._end = rows, 0, len(live)

    def count_below(self, position: int) -> int:
        """How many runs start below `position`."""
        return int(np.searchsorted(self.rows["position"], position, side="left"))

    def drop_first(self, count: int) -> None:
        """Forget the oldest `count` runs."""
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def drop_from(self, position: int) -> None:
        """Forget every run at or above `position`."""
        self._end = self._start + self.count_below(position)

    def drop_partition(self, partition_id: int) -> None:
        """Forget the runs of one partition."""
        kept = self.rows[self.rows["partition_id"] != partition_id]
        self._rows[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def find(self, partition_id: int, offset: int) -> np.ndarray[Any, Any]:
        """Runs of a partition that end behind `offset`, in order; a copy."""
        rows = self.rows
        hits = (rows["partition_id"] == partition_id) & (
            rows["base_offset"] + rows["offset_span"] > offset
        )
        found: np.ndarray[Any, Any] = rows[hits]
        return found

    def find_newest(self, partition_id: int, offset: int) -> np.ndarray[Any, Any]:
        """The same of a partition whose runs may stand here twice: in the order of offsets, each where
        it was written last."""
        rows = self.find(partition_id, offset)[::-1]
        _, first = np.unique(rows["base_offset"], return_index=True)
        newest: np.ndarray[Any, Any] = rows[first]
        return newest

    def find_time(self, partition_id: int, time_ns: int, oldest_position: int = 0) -> int | None:
        """Lowest base offset of a run of a partition that stands at `oldest_position` or above and was
        appended at `time_ns` or later."""
        rows = self.rows
        hits = (rows["partition_id"] == partition_id) & (rows["append_time_ns"] >= time_ns)
        bases = rows["base_offset"][hits & (rows["position"] >= oldest_position)]
        return int(bases.min()) if len(bases) else None
