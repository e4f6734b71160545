"""Messages and bytes published to each namespace, counted for `/metrics` by one worker.

Counts are what grew since the last look, added up: they go on when topics are deleted, or leave for another worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from danube_fast.workers.reports.topic_reports import add_rows

if TYPE_CHECKING:
    from danube_fast.broker.partition import Partition

__all__ = ["OTHERS", "NamespaceTotals", "name_first"]

OTHERS = ""
"""In the place of the name: all that have no row of their own."""


class NamespaceTotals:
    """Add up messages and bytes of the namespaces of one worker."""

    def __init__(self, most: int) -> None:
        """`most` namespaces have a row of their own: those that are seen first, so that no count ever falls."""
        self._most = most
        self._totals: dict[str, list[int]] = {}
        self._before: dict[int, tuple[int, int]] = {}
        """By partition: what was counted by the last look."""
        self._seen: dict[int, tuple[int, int]] = {}

    def add(self, partition: Partition) -> None:
        """Count what a partition took since the last look."""
        number, now = partition.partition_id, (partition.message_count, partition.byte_count)
        # what came with it from another worker was counted there
        before = self._before.get(number, now if partition.moving_epoch else (0, 0))
        self._seen[number] = now
        grown = [max(0, new - old) for new, old in zip(now, before, strict=True)]
        namespace = partition.topic.split("/")[1]
        key = name_first(self._totals, namespace, self._most)
        self._totals[key] = add_rows(self._totals.get(key, [0, 0]), grown)

    def finish(self) -> list[tuple[str, list[int]]]:
        """End a look: messages and bytes by namespace."""
        self._before, self._seen = self._seen, {}
        return list(self._totals.items())


def name_first(rows: Mapping[str, object], name: str, most: int) -> str:
    """Return the row of a namespace: its own while there are fewer than `most`, or that of the others."""
    named = len(rows) - (OTHERS in rows)
    return name if name in rows or named < most else OTHERS
