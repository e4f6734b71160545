"""Frames that stand back to back in what was read from a log."""

from __future__ import annotations

from typing import Any

from danube_fast.broker.consumer import Stored
from danube_fast.frame.layout import FLAG_DELAYED, FLAG_SPLIT
from danube_fast.frame.view import PLACE_FIELDS

__all__ = ["frames_of"]


def frames_of(partition_id: int, data: Any) -> list[Stored]:
    """The frames of a partition that `data` holds, oldest first."""
    frames = []
    at = 0
    while at < len(data):
        flags, size, count, producer_id, base, span = PLACE_FIELDS.unpack_from(data, at)
        delayed = flags & FLAG_DELAYED != 0
        frames.append(
            Stored(
                partition_id, base, base + span, count, size, producer_id, data, at,
                is_delayed=delayed, is_sparse=flags & FLAG_SPLIT != 0,
            )
        )  # fmt: skip
        at += size
    return frames
