"""Frames that have gaps: what compaction left of a frame, under the offsets that it had.

    frame      base_offset 100, span 6      m0 m1 m2 m3 m4 m5       row = offset - base_offset
    sparse     base_offset 100, span 6         m1       m4          columns have 2 entries, not 6

Dispatch speaks of rows; only here rows become places in a frame's columns. IO-free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.ledger.ledger import Rows
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.frame.view import FrameView

__all__ = ["by_row", "existing", "place_of", "places_of"]


def existing(stored: Stored, rows: Rows) -> tuple[Rows, Rows]:
    """Rows (rising) of messages that a frame has, and rows of those that it has not."""
    if not stored.is_sparse:
        return rows, rows[:0]
    there = np.isin(rows, FrameView(stored.memory).offset_deltas())
    return np.ascontiguousarray(rows[there]), np.ascontiguousarray(rows[~there])


def places_of(stored: Stored, view: FrameView, rows: Rows) -> Rows:
    """Where the columns of a frame have messages that it has."""
    if not stored.is_sparse:
        return rows
    return np.searchsorted(view.offset_deltas(), rows).astype(np.int32)


def place_of(stored: Stored, offset: int) -> int:
    """Where the columns of a frame have a message of its span; -1 if the frame has it no more."""
    row = np.array([offset - stored.base_offset], np.int32)
    if not len(existing(stored, row)[0]):
        return -1
    return int(places_of(stored, FrameView(stored.memory), row)[0])


def by_row(stored: Stored, view: FrameView, column: NDArray[Any]) -> NDArray[Any]:
    """A column with an entry for every row; 0 where there is no message."""
    if not stored.is_sparse:
        return column
    spread = np.zeros(stored.end_offset - stored.base_offset, column.dtype)
    spread[view.offset_deltas()] = column
    return spread
