"""Which messages of a partition newer ones have replaced. IO-free.

offsets      0    1    2    3    4    5          the key's newest message stays, and what has no key
keys         a    b    -    a    c    b
stay                   x    x    x    x          a tombstone (null payload) stays as any other,
                                                 until no consumer can be behind it any more
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from danube_fast.broker.ledger.ledger import Rows
from danube_fast.frame.layout import BufferId
from danube_fast.frame.view import FrameView

__all__ = ["NewestOffsets", "tombstones"]


def tombstones(view: FrameView) -> NDArray[np.bool_] | None:
    """Which messages of a frame have a key and no payload; None: none has. Raises DataLoss."""
    count = view.message_count
    validity = view.array(BufferId.PAYLOAD_VALIDITY, "u1", (count + 7) >> 3)
    keys = view.keys()
    if validity is None or keys is None:
        return None
    there = np.unpackbits(validity, bitorder="little")[:count].astype(bool)
    keyed = np.array([key is not None for key in keys])
    gone: NDArray[Any] = ~there & keyed
    return gone if gone.any() else None


class NewestOffsets:
    """Key -> offset of its newest message, of the part of a partition that one pass looks at."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._newest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def is_full(self) -> bool:
        """No further frame should be noted: the pass ends before it."""
        return len(self._newest) >= self._keys_max

    def note(self, view: FrameView) -> None:
        """Take in the next frame, in the order of offsets. Raises DataLoss."""
        keys = view.keys()
        if keys is None:
            return
        newest = self._newest
        for key, offset in zip(keys, view.offsets().tolist(), strict=True):
            if key is not None:
                newest[key] = offset

    def survivors(self, view: FrameView, tombstones_below: int) -> Rows | None:
        """Which messages of a frame stay, as places in its columns; None: all of them. Tombstones at
        offsets below `tombstones_below` go. Raises DataLoss."""
        keys = view.keys()
        if keys is None:
            return None
        newest = self._newest
        offsets = view.offsets().tolist()
        stay = [
            place
            for place, (key, offset) in enumerate(zip(keys, offsets, strict=True))
            if key is None or newest.get(key, offset) <= offset
        ]
        gone = tombstones(view) if tombstones_below > offsets[0] else None
        if gone is not None:
            stay = [
                place for place in stay if not gone[place] or offsets[place] >= tombstones_below
            ]
        return None if len(stay) == len(keys) else np.array(stay, np.int32)
