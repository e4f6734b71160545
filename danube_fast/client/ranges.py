"""Sets of offsets as flat lists of half-open ranges: [start, end, start, end, ...]."""

from __future__ import annotations

import itertools
import operator

__all__ = ["merged", "subtracted"]


def merged(pairs: list[int]) -> list[int]:
    """The same offsets, sorted, overlapping and touching ranges joined."""
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
