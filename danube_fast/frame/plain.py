"""Packing and unpacking without walking Python objects in a kernel: slower, byte-identical.

Used where `cpython.OBJECTS_READABLE` is false. It is also the readable description of the body, and
what the tests compare the kernels with.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from danube_fast.frame.layout import (
    BUFFER_DIRECTORY_BYTES,
    BUFFER_ENTRY_BYTES,
    DELTA_BYTES,
    FLAG_DELAYED,
    FRAME_MAGIC,
    FRAME_VERSION,
    HASH_BYTES,
    HEADER_BYTES,
    OFFSET_BYTES,
    TIME_BYTES,
    BufferId,
    Codec,
    padded,
)

if TYPE_CHECKING:
    from danube_fast.frame.columns import Columns

__all__ = ["plain_pack", "plain_unpack"]

_HEADER = struct.Struct("<IBBHIIII")  # the fields that packing knows; the rest is zero
_DIRECTORY = struct.Struct("<II")
_ENTRY = struct.Struct("<HHI")
_Buffers = list[tuple[BufferId, bytes]]


def _validity(present: list[bool]) -> bytes:
    """An Arrow validity bitmap: bit i of byte i // 8, lowest first."""
    return np.packbits(np.array(present, dtype=np.uint8), bitorder="little").tobytes()


def _offsets(items: Sequence[bytes | None]) -> bytes:
    """int32 offsets of items laid end to end."""
    ends = np.zeros(len(items) + 1, dtype="<i4")
    np.cumsum([len(item or b"") for item in items], out=ends[1:])
    return ends.tobytes()


def _bytes_column(offsets_id: BufferId, items: Sequence[bytes | None]) -> _Buffers:
    """Validity (if there are nulls), offsets, data."""
    buffers: _Buffers = []
    if None in items:
        present = [item is not None for item in items]
        buffers.append((BufferId(offsets_id - 1), _validity(present)))
    buffers.append((offsets_id, _offsets(items)))
    buffers.append((BufferId(offsets_id + 1), b"".join(item or b"" for item in items)))
    return buffers


def _times_column(times_id: BufferId, times: Any, valid: Any) -> _Buffers:
    """Validity (if there are nulls), int64 nanoseconds."""
    buffers: _Buffers = []
    if valid is not None and not valid.all():
        buffers.append((BufferId(times_id - 1), _validity(list(valid))))
    buffers.append((times_id, times.astype("<i8").tobytes()))
    return buffers


def _key_hash(key: bytes | None) -> int:
    return 0 if key is None else xxhash.xxh64_intdigest(key, 0)


def _buffers(columns: Columns, start: int, stop: int) -> _Buffers:
    """Every buffer of messages start to stop, in order."""
    buffers = _bytes_column(BufferId.PAYLOAD_OFFSETS, columns.payloads[start:stop])
    if columns.keys is not None:
        keys = columns.keys[start:stop]
        buffers += _bytes_column(BufferId.KEY_OFFSETS, keys)
        hashes = np.array([_key_hash(key) for key in keys], dtype="<u8")
        buffers.append((BufferId.KEY_HASH, hashes.tobytes()))
    if columns.pair_totals is not None:
        totals = columns.pair_totals[start : stop + 1]
        first, last = int(totals[0]), int(totals[-1])
        offsets = (totals - first).astype("<i4").tobytes()
        buffers.append((BufferId.ATTRIBUTE_OFFSETS, offsets))
        for offsets_id, strings in (
            (BufferId.ATTRIBUTE_KEY_OFFSETS, columns.attribute_keys),
            (BufferId.ATTRIBUTE_VALUE_OFFSETS, columns.attribute_values),
        ):
            buffers += _bytes_column(offsets_id, strings[first:last])
    for times_id, times, valid in (
        (BufferId.EVENT_TIME, columns.event_times, columns.event_time_valid),
        (BufferId.DELIVER_AT, columns.deliver_at, columns.deliver_at_valid),
    ):
        if times is not None:
            part = None if valid is None else valid[start:stop]
            buffers += _times_column(times_id, times[start:stop], part)
    return buffers


def _message_bytes(columns: Columns, index: int) -> int:
    """Bound what message `index` adds to a frame, for the search in `plain_pack`."""
    size = OFFSET_BYTES + len(columns.payloads[index] or b"")
    if columns.keys is not None:
        size += OFFSET_BYTES + HASH_BYTES + len(columns.keys[index] or b"")
    if columns.pair_totals is not None:
        size += DELTA_BYTES
        for pair in range(int(columns.pair_totals[index]), int(columns.pair_totals[index + 1])):
            size += 2 * OFFSET_BYTES
            size += len(columns.attribute_keys[pair]) + len(columns.attribute_values[pair])
    for times in (columns.event_times, columns.deliver_at):
        size += 0 if times is None else TIME_BYTES
    return size


def _frame_bytes(buffers: _Buffers) -> int:
    directory = BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * len(buffers)
    return HEADER_BYTES + directory + sum(padded(len(data)) for _, data in buffers)


def plain_pack(columns: Columns, start: int, capacity_bytes: int) -> tuple[bytes, int, int]:
    """(the frame, its message count, frame_bytes).

    If not even one message fits: (b"", 0, what one needs).
    """
    stop, total = start, 0
    while stop < columns.count and total <= capacity_bytes:  # the frame is never smaller than this
        total += _message_bytes(columns, stop)
        stop += 1
    buffers = _buffers(columns, start, stop)
    needed = _frame_bytes(buffers)
    while needed > capacity_bytes and stop > start + 1:
        stop -= 1
        buffers = _buffers(columns, start, stop)
        needed = _frame_bytes(buffers)
    if needed > capacity_bytes:
        return b"", 0, needed
    flags = 0 if columns.deliver_at is None else FLAG_DELAYED
    header = _HEADER.pack(
        FRAME_MAGIC,
        FRAME_VERSION,
        Codec.NONE,
        flags,
        needed,
        stop - start,
        needed - HEADER_BYTES,
        0,
    ).ljust(HEADER_BYTES, b"\0")
    parts = [header, _DIRECTORY.pack(len(buffers), 0)]
    parts += [_ENTRY.pack(buffer_id, 0, len(data)) for buffer_id, data in buffers]
    parts += [data.ljust(padded(len(data)), b"\0") for _, data in buffers]
    return b"".join(parts), stop - start, needed


def plain_unpack(
    offsets: Any, data: memoryview, validity: memoryview | None, start: int, stop: int
) -> list[bytes | None]:
    """Items start to stop of one column of byte strings; None where the validity bit is 0."""
    ends = offsets[start : stop + 1].tolist()
    items: list[bytes | None] = [
        bytes(data[first:last]) for first, last in itertools.pairwise(ends)
    ]
    if validity is not None:
        for index in range(start, stop):
            if not validity[index >> 3] >> (index & 7) & 1:
                items[index - start] = None
    return items
