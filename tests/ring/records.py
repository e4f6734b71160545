"""Records of a ring, many at a time."""

from __future__ import annotations

from danube_fast.ring.spsc import SpscRing

__all__ = ["pop_all"]


def pop_all(ring: SpscRing, limit: int = 512) -> list[bytes]:
    """Pop up to `limit` records, oldest first."""
    records: list[bytes] = []
    while len(records) < limit and (record := ring.pop()) is not None:
        records.append(record)
    return records
