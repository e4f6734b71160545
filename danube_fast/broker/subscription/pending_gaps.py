"""The gaps that a subscription met while it had no consumer, for the first one that comes back. IO-free."""

from __future__ import annotations

from danube_fast.broker.records import PendingGapsSet as Record
from danube_fast.broker.subscription.consumer import Gap

__all__ = ["PendingGaps"]

GAPS_MAX = 64
"""So many are kept apart; then the oldest become one."""


class PendingGaps:
    """Gaps of one subscription, in the order in which they were met."""

    __slots__ = ("_gaps", "is_dirty")

    def __init__(self) -> None:
        self._gaps: list[Gap] = []
        self.is_dirty = False
        """It is not what the last record says."""

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def add(self, gap: Gap) -> None:
        """Add a gap that was met. One that goes on where the last one ends, for the same reason, makes that longer."""
        self.is_dirty = True
        gaps = self._gaps
        if gaps and gaps[-1].start <= gap.start <= gaps[-1].end:
            last = gaps[-1]
            if (last.reason, last.lost) == (gap.reason, gap.lost):
                gaps[-1] = last._replace(end=max(last.end, gap.end))
                return
        gaps.append(gap)
        if len(gaps) > GAPS_MAX:
            first, second = gaps[:2]
            low, high = min(first.start, second.start), max(first.end, second.end)
            is_lost = first.lost or second.lost
            gaps[:2] = [second._replace(start=low, end=high, lost=is_lost)]

    def take(self) -> list[Gap]:
        """Take all gaps out, to tell them to a consumer."""
        gaps, self._gaps = self._gaps, []
        self.is_dirty = self.is_dirty or bool(gaps)
        return gaps

    def record(self, partition_id: int, name: str) -> Record:
        """Make the record of the gaps as they are now."""
        return Record(
            partition_id, name, [(gap.start, gap.end, gap.reason, gap.lost) for gap in self._gaps]
        )

    def restore(self, record: Record) -> None:
        """Set what a record says."""
        self._gaps = [Gap(end, reason, lost, start) for start, end, reason, lost in record.gaps]
