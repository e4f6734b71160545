"""Sets of offsets as sorted, disjoint, half-open intervals.

Acks and holds come in runs, so a set of millions of offsets is usually a handful of intervals, and
the common changes (grow at the end, shrink at the front) touch one of them. IO-free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

__all__ = ["IntervalSet", "sorted_set"]


def sorted_set(pairs: list[int]) -> IntervalSet:
    """The set of flat [start, end) pairs in any order, quickly also when there are many."""
    ranges = IntervalSet()
    for start, end in sorted(zip(pairs[::2], pairs[1::2], strict=False)):
        ranges.add(start, end)
    return ranges


class IntervalSet:
    """A set of non-negative integers; all ranges are [start, end)."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, pairs: list[int] | None = None) -> None:
        """`pairs` is a flat list [start, end, start, end, ...]."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        if pairs:
            for i in range(0, len(pairs) - 1, 2):
                self.add(pairs[i], pairs[i + 1])

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        """Number of intervals."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value) - 1
        return i >= 0 and value < self._ends[i]

    @property
    def count(self) -> int:
        """Number of integers in the set."""
        return sum(self._ends) - sum(self._starts)

    @property
    def first(self) -> int:
        """Smallest member. Raises IndexError on an empty set."""
        return self._starts[0]

    @property
    def first_end(self) -> int:
        """End of the first interval. Raises IndexError on an empty set."""
        return self._ends[0]

    @property
    def last_end(self) -> int:
        """End of the last interval. Raises IndexError on an empty set."""
        return self._ends[-1]

    def add(self, start: int, end: int) -> None:
        """Add [start, end)."""
        if start >= end:
            return
        starts, ends = self._starts, self._ends
        if not ends or start > ends[-1]:
            starts.append(start)
            ends.append(end)
            return
        if start == ends[-1]:
            ends[-1] = end
            return
        left = bisect_left(ends, start)
        right = bisect_right(starts, end)
        if left < right:
            start = min(start, starts[left])
            end = max(end, ends[right - 1])
        starts[left:right] = [start]
        ends[left:right] = [end]

    def remove(self, start: int, end: int) -> None:
        """Remove [start, end)."""
        starts, ends = self._starts, self._ends
        if start >= end or not starts:
            return
        left = bisect_right(ends, start)
        right = bisect_left(starts, end)
        if left >= right:
            return
        keep_starts: list[int] = []
        keep_ends: list[int] = []
        if starts[left] < start:
            keep_starts.append(starts[left])
            keep_ends.append(start)
        if ends[right - 1] > end:
            keep_starts.append(end)
            keep_ends.append(ends[right - 1])
        starts[left:right] = keep_starts
        ends[left:right] = keep_ends

    def overlap(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are in the set, in order; none when end is not above start."""
        starts, ends = self._starts, self._ends
        found: list[tuple[int, int]] = []
        if start >= end:
            return found
        i = bisect_right(ends, start)
        while i < len(starts) and starts[i] < end:
            found.append((max(starts[i], start), min(ends[i], end)))
            i += 1
        return found

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not in the set, in order."""
        found = []
        at = start
        for low, high in self.overlap(start, end):
            if at < low:
                found.append((at, low))
            at = high
        if at < end:
            found.append((at, end))
        return found

    def split_off(self, other: IntervalSet) -> IntervalSet:
        """Remove everything that is in `other`, too; returns what was removed. In one sweep."""
        kept, removed = IntervalSet(), IntervalSet()
        theirs = list(other)
        i = 0
        for start, end in self:
            while i < len(theirs) and theirs[i][1] <= start:
                i += 1
            at = start
            k = i
            while k < len(theirs) and theirs[k][0] < end:
                low, high = max(start, theirs[k][0]), min(end, theirs[k][1])
                kept.add(at, low)
                removed.add(low, high)
                at = high
                k += 1
            kept.add(at, end)
        self._starts, self._ends = kept._starts, kept._ends
        return removed

    def add_all(self, other: IntervalSet) -> None:
        """Add everything that is in `other`. In one sweep."""
        merged = IntervalSet()
        for start, end in sorted([*self, *other]):
            merged.add(start, end)
        self._starts, self._ends = merged._starts, merged._ends

    def pop_first(self) -> tuple[int, int]:
        """Remove and return the first interval. Raises IndexError on an empty set."""
        return self._starts.pop(0), self._ends.pop(0)

    def clear(self) -> None:
        """Empty the set."""
        self._starts.clear()
        self._ends.clear()

    def flat(self, intervals_max: int | None = None) -> list[int]:
        """[start, end, start, end, ...] of the first `intervals_max` intervals, or all."""
        starts, ends = self._starts[:intervals_max], self._ends[:intervals_max]
        return [edge for pair in zip(starts, ends, strict=True) for edge in pair]
