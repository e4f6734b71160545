"""Sets of offsets as flat lists of half-open ranges: [start, end, start, end, ...]. Where there may be
thousands, as in the acks of messages with keys, they are arrays of int64 (`Ranges`)."""

from __future__ import annotations

import itertools
import operator
from array import array

__all__ = ["Ranges", "Wire", "merged", "merged_ranges", "no_ranges", "subtracted", "to_wire"]

Ranges = array  # of type code "q"
Wire = list[int] | bytes
FEW = 32
"""Numbers that are dealt with one by one; more in an array."""


def no_ranges() -> Ranges[int]:
    """Return the empty set."""
    return array("q")


def to_wire(ranges: Ranges[int]) -> Wire:
    """Return ranges as ACK has them: many as the bytes that they are."""
    return ranges.tolist() if len(ranges) <= FEW else ranges.tobytes()


def merged_ranges(ranges: Ranges[int]) -> Ranges[int]:
    """Return the same offsets, sorted, overlapping and touching ranges joined."""
    if len(ranges) <= FEW:
        return ranges if len(ranges) == 2 else array("q", merged(ranges.tolist()))
    import numpy as np

    bounds = np.frombuffer(ranges, np.int64)
    if (bounds[1:] > bounds[:-1]).all():
        return ranges  # so they come
    pairs = bounds.reshape(-1, 2)
    pairs = pairs[pairs[:, 0].argsort(kind="stable")]
    ends = np.maximum.accumulate(pairs[:, 1])
    is_first = np.concatenate(([True], pairs[1:, 0] > ends[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    joined = np.stack((pairs[is_first, 0], ends[is_last]), axis=1)
    return array("q", joined.tobytes())


def merged(pairs: list[int]) -> list[int]:
    """Return the same offsets, sorted, overlapping and touching ranges joined."""
    if all(map(operator.lt, pairs, itertools.islice(pairs, 1, None))):
        return pairs  # so they come, and there may be thousands
    out: list[int] = []
    for start, end in sorted(zip(pairs[::2], pairs[1::2], strict=True)):
        if out and start <= out[-1]:
            out[-1] = max(out[-1], end)
        else:
            out += (start, end)
    return out


def subtracted(pairs: list[int], others: list[int]) -> list[int]:
    """Offsets of `pairs` that are not in `others`; both merged."""
    out: list[int] = []
    at = 0
    for start, end in zip(pairs[::2], pairs[1::2], strict=True):
        low = start
        while at < len(others) and others[at + 1] <= low:
            at += 2
        place = at
        while low < end and place < len(others) and others[place] < end:
            if others[place] > low:
                out += (low, others[place])
            low = max(low, others[place + 1])
            place += 2
        if low < end:
            out += (low, end)
    return out
