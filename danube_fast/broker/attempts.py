"""How often messages were redelivered: counts over ranges of offsets, only where they are above zero."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from danube_fast.broker.intervals import IntervalSet

__all__ = ["Attempts"]


class Attempts:
    """A step function offset -> redelivery count, zero almost everywhere. IO-free."""

    __slots__ = ("_counts", "_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._counts: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._starts)

    def bump(self, start: int, end: int) -> None:
        """Add one to every offset of [start, end)."""
        pieces = [(low, high, count + 1) for low, high, count in self.segments(start, end)]
        self._replace(start, end, pieces)

    def bump_all(self, ranges: IntervalSet) -> None:
        """`bump` of many ranges, in one sweep."""
        bumped = [
            (low, high, count + 1)
            for start, end in ranges
            for low, high, count in self.segments(start, end)
        ]
        self._set(sorted([*self._outside(ranges), *bumped]))

    def discard_all(self, ranges: IntervalSet) -> None:
        """`discard` of many ranges, in one sweep."""
        if self._starts:
            self._set(self._outside(ranges))

    def _outside(self, ranges: IntervalSet) -> list[tuple[int, int, int]]:
        """What is counted outside of `ranges`, in order."""
        return [
            (low, high, count)
            for start, end, count in zip(self._starts, self._ends, self._counts, strict=True)
            for low, high in ranges.missing(start, end)
        ]

    def _set(self, pieces: list[tuple[int, int, int]]) -> None:
        """Replace everything; neighbours of one count become one."""
        starts: list[int] = []
        ends: list[int] = []
        counts: list[int] = []
        for start, end, count in pieces:
            if ends and ends[-1] == start and counts[-1] == count:
                ends[-1] = end
                continue
            starts.append(start)
            ends.append(end)
            counts.append(count)
        self._starts, self._ends, self._counts = starts, ends, counts

    def segments(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """[start, end) cut into ranges of one count each, zeros included, in order."""
        pieces = []
        at = start
        i = bisect_right(self._ends, start)
        while i < len(self._starts) and self._starts[i] < end:
            low, high = max(start, self._starts[i]), min(end, self._ends[i])
            if at < low:
                pieces.append((at, low, 0))
            pieces.append((low, high, self._counts[i]))
            at = high
            i += 1
        if at < end:
            pieces.append((at, end, 0))
        return pieces

    def discard(self, start: int, end: int) -> None:
        """Forget the counts of [start, end)."""
        if self._starts and start < self._ends[-1] and end > self._starts[0]:
            self._replace(start, end, [])

    def _replace(self, start: int, end: int, pieces: list[tuple[int, int, int]]) -> None:
        left = bisect_right(self._ends, start)
        right = bisect_left(self._starts, end)
        before: list[tuple[int, int, int]] = []
        after: list[tuple[int, int, int]] = []
        if left < right:
            if self._starts[left] < start:
                before.append((self._starts[left], start, self._counts[left]))
            if self._ends[right - 1] > end:
                after.append((end, self._ends[right - 1], self._counts[right - 1]))
        new = [piece for piece in (*before, *pieces, *after) if piece[2]]
        self._starts[left:right] = [piece[0] for piece in new]
        self._ends[left:right] = [piece[1] for piece in new]
        self._counts[left:right] = [piece[2] for piece in new]
