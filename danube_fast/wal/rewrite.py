"""Frames that are written again behind a cut: same offsets, new place, next epoch.

They fill the front of the new segment before that has its name, so a kill at any moment finds them
either in the segment that failed or in the one that takes its place.

    cut                                                      end_position
     | frame | frame | ... PAD | frame | frame | ... PAD |    marker, then whatever comes
     +---------- group --------+

Frames that come from another log, when a partition moves, are stamped here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from danube_fast.errors import Internal
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE, At
from danube_fast.frame.memory import load_i64, load_u32, store_u32, store_u64
from danube_fast.frame.stamp import stamp
from danube_fast.wal.layout import RUN_DTYPE, pad_bytes
from danube_fast.wal.writer import PadStamper, signed

__all__ = ["Rewrite", "WrittenGroup", "restamp", "restamp_run"]

_GROUP_BYTES_MAX = 4 * 1024 * 1024
"""A group is closed at this size; one frame may be larger."""

_stamp = direct(stamp)
_RUN_AT = {name: place[1] for name, place in (RUN_DTYPE.fields or {}).items()}
_RUN_BYTES = RUN_DTYPE.itemsize
_RUN_OFFSET, _RUN_POSITION = _RUN_AT["base_offset"], _RUN_AT["position"]
_RUN_TIME, _RUN_PARTITION = _RUN_AT["append_time_ns"], _RUN_AT["partition_id"]
_RUN_SPAN, _RUN_SIZE = _RUN_AT["offset_span"], _RUN_AT["byte_count"]


class WrittenGroup(NamedTuple):
    """The bytes that one gathering write puts into the file."""

    position: int
    buffers: list[Any]
    byte_count: int


class Rewrite(NamedTuple):
    """Restamped frames as groups, and where they stand."""

    groups: list[WrittenGroup]
    runs: np.ndarray[Any, Any]
    end_position: int


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def _restamp_run(
    address: int, byte_count: int, log_id: int, position: int, epoch: int, synced: int, rows: int
) -> int:
    """Stamp frames that stand back to back, and describe each at `rows`; their count, or -1 if they
    are not whole."""
    at = count = 0
    while at < byte_count:
        frame = address + at
        size = load_u32(frame + At.FRAME_BYTES) if byte_count - at >= HEADER_BYTES else 0
        if size < HEADER_BYTES or size > byte_count - at:
            return -1
        base, time_ns = load_i64(frame + At.BASE_OFFSET), load_i64(frame + At.APPEND_TIME_NS)
        partition_id, span = load_u32(frame + At.PARTITION_ID), load_u32(frame + At.OFFSET_SPAN)
        stamp(frame, log_id, position + at, base, time_ns, synced, partition_id, epoch, span)
        row = rows + count * _RUN_BYTES
        store_u64(row + _RUN_OFFSET, base)
        store_u64(row + _RUN_POSITION, position + at)
        store_u64(row + _RUN_TIME, time_ns)
        store_u32(row + _RUN_PARTITION, partition_id)
        store_u32(row + _RUN_SPAN, span)
        store_u32(row + _RUN_SIZE, size)
        at += size
        count += 1
    return count


_call_restamp_run = direct(_restamp_run)


def restamp_run(
    frames: bytearray, *, log_id: int, position: int, epoch: int, synced_position: int
) -> np.ndarray[Any, Any]:
    """Stamp frames that stand back to back for `position` and on, in place; their RUN_DTYPE rows.

    Offsets and times stay. Raises Internal if they are not whole.
    """
    runs = np.zeros(len(frames) // HEADER_BYTES, RUN_DTYPE)
    count = _call_restamp_run(
        address_of(frames), len(frames), signed(log_id), position, epoch, synced_position,
        address_of(runs),
    )  # fmt: skip
    if count < 0:
        raise Internal("frames of another log did not arrive whole; report this")
    return runs[:count]


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
