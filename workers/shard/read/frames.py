"""Frames that stand back to back in what was read from a log."""

from __future__ import annotations

from typing import Any

from danube_fast.broker.ledger.ledger import Rows
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.frame.codec import compress_frame
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import FLAG_DELAYED, FLAG_SPLIT, Codec
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import reseal
from danube_fast.frame.view import PLACE_FIELDS, FrameView

__all__ = ["frames_of", "part_of"]

_reseal = direct(reseal)


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


def part_of(view: FrameView, places: Rows) -> bytearray:
    """Some messages of a frame as a frame to be kept, compressed if it was. Raises DataLoss."""
    frame = split_frame(view, places)
    if view.codec != Codec.NONE:
        frame = compress_frame(frame, Codec(view.codec))
        _reseal(address_of(frame))
    return frame
