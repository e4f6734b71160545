"""How many bytes lie between two offsets of a partition, about. IO-free.

Marks of (offset, bytes so far) are noted from time to time; between two of them bytes are taken as
spread evenly. Quotas and retention by size need no more than that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["Sizes"]

MARKS_MAX = 4096
"""Above, every other mark is forgotten."""


class Sizes:
    """Marks of one partition, in order."""

    def __init__(self, offset: int, byte_count: int = 0) -> None:
        """Everything below `offset` took `byte_count` bytes."""
        self._offsets = [offset]
        self._bytes = [byte_count]
        self.coarse_until = offset
        """Marks below are far from each other: there nothing is given up for its size but up to a mark."""
        self.is_guess = False
        """Whether nothing but the sum is known of what lies below `coarse_until`."""

    @property
    def end(self) -> int:
        """The last offset that is known of."""
        return self._offsets[-1]

    def note(self, offset: int, byte_count: int) -> None:
        """Note that everything below `offset` took `byte_count` bytes; both only grow."""
        if offset <= self._offsets[-1]:
            return
        self._offsets.append(offset)
        self._bytes.append(max(byte_count, self._bytes[-1]))
        if len(self._offsets) > MARKS_MAX:
            del self._offsets[1:-1:2], self._bytes[1:-1:2]

    def put_before(self, before: Sizes, *, is_guess: bool) -> None:
        """Count what lies before the first mark, too, up to which `before` goes; it knows less of where its bytes lie."""
        total = before._bytes[-1]
        rest = bisect_right(self._offsets, before.end)
        self._offsets[:rest] = before._offsets
        self._bytes = before._bytes + [total + each for each in self._bytes[rest:]]
        self.coarse_until, self.is_guess = before.end, is_guess

    def forget_below(self, offset: int) -> None:
        """Marks from before the one below `offset` are not needed any more."""
        keep = max(0, bisect_right(self._offsets, offset) - 1)
        del self._offsets[:keep], self._bytes[:keep]

    def below(self, offset: int) -> int:
        """Bytes of all below an offset."""
        offsets, sums = self._offsets, self._bytes
        place = bisect_right(offsets, offset) - 1
        if place < 0:
            return sums[0]
        if place + 1 == len(offsets):
            return sums[-1]
        part = (offset - offsets[place]) / (offsets[place + 1] - offsets[place])
        return sums[place] + int(part * (sums[place + 1] - sums[place]))

    def between(self, start: int, end: int) -> int:
        """Bytes of [start, end)."""
        return max(0, self.below(end) - self.below(start))

    def start_of_last(self, byte_count: int) -> int:
        """The offset from which on the last `byte_count` bytes lie; never less than what is known."""
        offsets, sums = self._offsets, self._bytes
        wanted = sums[-1] - byte_count
        if wanted <= sums[0]:
            return offsets[0]
        place = bisect_left(sums, wanted)
        before, after = sums[place - 1], sums[place]
        if offsets[place - 1] < self.coarse_until and wanted < after:
            return offsets[place - 1]
        part = (wanted - before) / (after - before) if after > before else 1.0
        return offsets[place - 1] + int(part * (offsets[place] - offsets[place - 1]))
