"""Delayed messages of one subscription that become due soon, each taken out of its frame already.

    frame of a mebibyte --cut--> offset: a frame of that one message, until it is due

Handing one of them out costs no read of the log then. The ledger knows nothing of it: what is not
here is read like anything else. IO-free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.ledger.layout import State
from danube_fast.broker.ledger.ledger import Ledger, Rows
from danube_fast.broker.sparse import by_row, existing, places_of
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.broker.subscription.cuts import view_of
from danube_fast.errors import DataLoss
from danube_fast.frame.split import split_frame
from danube_fast.frame.view import FrameView

__all__ = ["CUTS_MAX", "Prefetched", "due_times"]

CUTS_MAX = 64
"""Messages taken out of a frame at once, at most. If more of them become due within a moment, they are
better taken out together, when they are due."""


def due_times(stored: Stored) -> NDArray[np.int64] | None:
    """When each message of a frame is due, by row, ns since 1970; 0: at once. None: it does not say."""
    try:
        view = view_of(stored)
        times = view.deliver_at_ns()
    except DataLoss:  # compressed garbage: its consumer will say so
        return None
    return None if times is None else by_row(stored, view, times)


class Prefetched:
    """Frames of one message each, by offset."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._frames: dict[int, Stored] = {}
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, offset: int) -> bool:
        return offset in self._frames

    def take(self, offset: int) -> Stored | None:
        """Take the message at an offset out; None if it is not here."""
        frame = self._frames.pop(offset, None)
        if frame is not None:
            self.byte_count -= frame.frame_bytes
        return frame

    def clear(self) -> None:
        """Forget all: the ledger starts over."""
        self._frames.clear()
        self.byte_count = 0

    def prefetch(self, stored: Stored, soon_ns: int, until_ns: int) -> int:
        """Take out the delayed messages that are due before `until_ns` (since 1970), the first CUTS_MAX of
        them; none if so many are due before `soon_ns`. Before which time all of them are taken care of."""
        times = due_times(stored)
        if times is None:
            return until_ns
        base = stored.base_offset
        rows = self._ledger.select(base, base, stored.end_offset, State.DELAYED)
        rows, _ = existing(stored, rows)
        due = times[rows]
        if np.count_nonzero(due < soon_ns) > CUTS_MAX:
            return soon_ns
        rows, due = rows[due < until_ns], due[due < until_ns]
        if len(rows) > CUTS_MAX:
            first = np.argsort(due, kind="stable")[: CUTS_MAX + 1]
            until_ns = int(due[first[-1]])
            rows = np.sort(rows[first[:-1]])
        for row in rows.tolist():
            self._cut(stored, row)
        return until_ns

    def _cut(self, stored: Stored, row: int) -> None:
        base = stored.base_offset
        if base + row in self._frames:
            return
        view = FrameView(stored.memory)
        rows: Rows = np.array([row], np.int32)
        frame = split_frame(view, places_of(stored, view, rows))
        self._frames[base + row] = Stored(
            stored.partition_id, base, base + row + 1, 1, len(frame), stored.producer_id, frame, 0,
            is_sparse=True,
        )  # fmt: skip
        self.byte_count += len(frame)

    def prune(self) -> None:
        """Let go of frames whose messages are not waited for any more."""
        for offset in list(self._frames):
            if self._ledger.state_of(offset)[0] not in (State.DELAYED, State.WAITING):
                self.take(offset)
