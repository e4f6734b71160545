"""Frames that are written again behind a cut: same offsets, new place, next epoch.

They fill the front of the new segment before that has its name, so a kill at any moment finds them
either in the segment that failed or in the one that takes its place.

    cut                                                      end_position
     | frame | frame | ... PAD | frame | frame | ... PAD |    marker, then whatever comes
     +---------- group --------+
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE
from danube_fast.frame.stamp import stamp
from danube_fast.wal.layout import RUN_DTYPE, pad_bytes
from danube_fast.wal.writer import PadStamper, signed

__all__ = ["Rewrite", "WrittenGroup", "restamp"]

_GROUP_BYTES_MAX = 4 * 1024 * 1024
"""A group is closed at this size; one frame may be larger."""

_stamp = direct(stamp)


class WrittenGroup(NamedTuple):
    """What one gathering write puts into the file."""

    position: int
    buffers: list[Any]
    byte_count: int


class Rewrite(NamedTuple):
    """Restamped frames as groups, and where they stand."""

    groups: list[WrittenGroup]
    runs: np.ndarray[Any, Any]
    end_position: int


def restamp(
    frames: Iterable[memoryview], pads: PadStamper, *, log_id: int, position: int, epoch: int
) -> Rewrite:
    """Stamp `frames`, in place, for `position` and on; all below `position` is durable."""
    groups: list[WrittenGroup] = []
    rows: list[tuple[int, ...]] = []
    at, start = position, position
    buffers: list[Any] = []

    def close_group() -> None:
        nonlocal at, start, buffers
        pad = pad_bytes(at - start)
        if pad:
            buffers.append(bytes(pads.make(pad, at, epoch, position)))
        size = at - start + (HEADER_BYTES if pad else 0)
        groups.append(WrittenGroup(start, buffers, size))
        start = at = at + pad
        buffers = []

    for frame in frames:
        header = np.frombuffer(frame, HEADER_DTYPE, 1)[0]
        base, span = int(header["base_offset"]), int(header["offset_span"])
        time_ns, partition_id = int(header["append_time_ns"]), int(header["partition_id"])
        if buffers and at - start + len(frame) > _GROUP_BYTES_MAX:
            close_group()
        _stamp(
            address_of(frame),
            signed(log_id),
            at,
            base,
            time_ns,
            position,
            partition_id,
            epoch,
            span,
        )
        rows.append((base, at, time_ns, partition_id, span, len(frame), 0))
        buffers.append(frame)
        at += len(frame)
    if buffers:
        close_group()
    return Rewrite(groups, np.array(rows, RUN_DTYPE), at)
