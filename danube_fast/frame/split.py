"""Some messages of a frame as a frame of their own: what the broker sends when a consumer gets only
part of a frame, or gets messages again.

    frame      base_offset 100   m0 m1 m2 m3 m4 m5
    rows 1 4   base_offset 100      m1       m4      OFFSET_DELTA 1 4, SEQUENCE_DELTA 1 4

Every column is gathered; the header is copied, with flag SPLIT and both crcs made anew. Splitting a
split frame works: deltas are gathered like everything else. The result is never compressed.

One kernel measures (a table of sizes by buffer id, -1 for absent), one writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube_fast.errors import InvalidArgument
from danube_fast.frame.columns import array_address
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.layout import (
    BUFFER_DIRECTORY_BYTES,
    BUFFER_ENTRY_BYTES,
    BUFFER_ID_MAX,
    BUFFER_KINDS,
    DELTA_BYTES,
    FLAG_SPLIT,
    FRAME_ALIGNMENT,
    HEADER_BYTES,
    KIND_ATTRIBUTE_OFFSETS,
    KIND_DATA,
    KIND_OFFSETS,
    KIND_VALIDITY,
    KIND_WORDS,
    OFFSET_BYTES,
    TIME_BYTES,
    At,
    BufferId,
    Codec,
)
from danube_fast.frame.memory import (
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    memory_copy,
    memory_zero,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
)
from danube_fast.frame.pack_kernels import open_body, open_buffer
from danube_fast.frame.stamp import reseal
from danube_fast.frame.unpack_kernels import find_buffer
from danube_fast.frame.view import FrameView

__all__ = ["Cut", "split_frame"]

_WORD = 8
_ROW_BYTES = 4
_ABSENT = -1


@kernel("int64(int64,int64,int64)")
def _check_rows(rows: int, row_count: int, message_count: int) -> int:
    """1 if the int32 rows rise strictly from 0 or more to less than `message_count`."""
    previous = -1
    for index in range(row_count):
        row = load_i32(rows + _ROW_BYTES * index)
        if row <= previous or row >= message_count:
            return 0
        previous = row
    return 1


@kernel("int64(int64,int64,int64)")
def _sum_ranges(offsets: int, rows: int, row_count: int) -> int:
    """Sum of the lengths that an offsets buffer gives to the rows."""
    total = 0
    for index in range(row_count):
        place = offsets + OFFSET_BYTES * load_i32(rows + _ROW_BYTES * index)
        total += load_i32(place + OFFSET_BYTES) - load_i32(place)
    return total


@kernel("int64(int64,int64,int64,int64)")
def _sum_pair_ranges(pairs: int, offsets: int, rows: int, row_count: int) -> int:
    """Sum of the lengths of all attribute keys (or values) of the rows."""
    total = 0
    for index in range(row_count):
        place = pairs + OFFSET_BYTES * load_i32(rows + _ROW_BYTES * index)
        first = load_i32(offsets + OFFSET_BYTES * load_i32(place))
        total += load_i32(offsets + OFFSET_BYTES * load_i32(place + OFFSET_BYTES)) - first
    return total


@kernel("int64(int64,int64,int64)")
def _has_null(validity: int, rows: int, row_count: int) -> int:
    """1 if one of the rows is null."""
    for index in range(row_count):
        row = load_i32(rows + _ROW_BYTES * index)
        if (load_u8(validity + (row >> 3)) >> (row & 7)) & 1 == 0:
            return 1
    return 0


@kernel("int64(int64,int64,int64,int64,int64)")
def _measure(body: int, rows: int, row_count: int, sizes: int, with_counts: int) -> int:
    """Fill the table of sizes; returns frame_bytes."""
    pair_count, data_bytes = 0, 0
    pairs = body + find_buffer(body, BufferId.ATTRIBUTE_OFFSETS)
    total, buffers = 0, 0
    for buffer_id in range(1, BUFFER_ID_MAX + 1):
        kind = BUFFER_KINDS[buffer_id]
        place = find_buffer(body, buffer_id)
        size = DELTA_BYTES * row_count
        if buffer_id == BufferId.REDELIVERY_COUNT:
            size = size if place or with_counts else _ABSENT
        elif buffer_id != BufferId.OFFSET_DELTA and buffer_id != BufferId.SEQUENCE_DELTA:
            size = _ABSENT
        place += body
        if place != body and size == _ABSENT:
            if kind == KIND_VALIDITY:
                size = (row_count + 7) >> 3 if _has_null(place, rows, row_count) else _ABSENT
            elif kind == KIND_OFFSETS:
                size = OFFSET_BYTES * (row_count + 1)
                data_bytes = _sum_ranges(place, rows, row_count)
                pair_count = data_bytes
            elif kind == KIND_ATTRIBUTE_OFFSETS:
                size = OFFSET_BYTES * (pair_count + 1)
                data_bytes = _sum_pair_ranges(pairs, place, rows, row_count)
            else:
                size = data_bytes if kind == KIND_DATA else TIME_BYTES * row_count
        store_u64(sizes + _WORD * buffer_id, size)
        if size != _ABSENT:
            buffers += 1
            total += (size + FRAME_ALIGNMENT - 1) & -FRAME_ALIGNMENT
    store_u64(sizes, buffers)
    return HEADER_BYTES + BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * buffers + total


@kernel("void(int64,int64,int64,int64)")
def _gather_validity(target: int, source: int, rows: int, row_count: int) -> None:
    memory_zero(target, (row_count + 7) >> 3)
    for index in range(row_count):
        row = load_i32(rows + _ROW_BYTES * index)
        bit = (load_u8(source + (row >> 3)) >> (row & 7)) & 1
        byte = target + (index >> 3)
        store_u8(byte, load_u8(byte) | (bit << (index & 7)))


@kernel("void(int64,int64,int64,int64)")
def _gather_offsets(target: int, source: int, rows: int, row_count: int) -> None:
    position = 0
    store_u32(target, 0)
    for index in range(row_count):
        place = source + OFFSET_BYTES * load_i32(rows + _ROW_BYTES * index)
        position += load_i32(place + OFFSET_BYTES) - load_i32(place)
        store_u32(target + OFFSET_BYTES * (index + 1), position)


@kernel("void(int64,int64,int64,int64,int64)")
def _gather_data(target: int, data: int, offsets: int, rows: int, row_count: int) -> None:
    for index in range(row_count):
        place = offsets + OFFSET_BYTES * load_i32(rows + _ROW_BYTES * index)
        first = load_i32(place)
        size = load_i32(place + OFFSET_BYTES) - first
        memory_copy(target, data + first, size)
        target += size


@kernel("void(int64,int64,int64,int64,int64)")
def _gather_pair_offsets(target: int, source: int, pairs: int, rows: int, row_count: int) -> None:
    position = 0
    store_u32(target, 0)
    for index in range(row_count):
        place = pairs + OFFSET_BYTES * load_i32(rows + _ROW_BYTES * index)
        for pair in range(load_i32(place), load_i32(place + OFFSET_BYTES)):
            bounds = source + OFFSET_BYTES * pair
            position += load_i32(bounds + OFFSET_BYTES) - load_i32(bounds)
            target += OFFSET_BYTES
            store_u32(target, position)


@kernel("void(int64,int64,int64,int64,int64,int64)")
def _gather_pair_data(
    target: int, data: int, offsets: int, pairs: int, rows: int, row_count: int
) -> None:
    """A row's pairs lie side by side: one copy for each row."""
    for index in range(row_count):
        place = pairs + OFFSET_BYTES * load_i32(rows + _ROW_BYTES * index)
        first = load_i32(offsets + OFFSET_BYTES * load_i32(place))
        size = load_i32(offsets + OFFSET_BYTES * load_i32(place + OFFSET_BYTES)) - first
        memory_copy(target, data + first, size)
        target += size


@kernel("void(int64,int64,int64,int64)")
def _gather_words(target: int, source: int, rows: int, row_count: int) -> None:
    for index in range(row_count):
        row = load_i32(rows + _ROW_BYTES * index)
        store_u64(target + TIME_BYTES * index, load_i64(source + TIME_BYTES * row))


@kernel("void(int64,int64,int64,int64,int64)")
def _gather_deltas(target: int, body: int, buffer_id: int, rows: int, row_count: int) -> None:
    """u32 deltas: those of the source, or the row itself where the source has none."""
    place = find_buffer(body, buffer_id)
    for index in range(row_count):
        delta = load_i32(rows + _ROW_BYTES * index)
        if place:
            delta = load_u32(body + place + DELTA_BYTES * delta)
        store_u32(target + DELTA_BYTES * index, delta)


@kernel("void(int64,int64,int64,int64,int64)")
def _gather(target: int, body: int, buffer_id: int, rows: int, row_count: int) -> None:
    """One buffer of the new frame from the source's."""
    source = body + find_buffer(body, buffer_id)
    before = body + find_buffer(body, buffer_id - 1)  # the offsets, where this is their data
    pairs = body + find_buffer(body, BufferId.ATTRIBUTE_OFFSETS)
    kind = BUFFER_KINDS[buffer_id]
    if kind == KIND_VALIDITY:
        _gather_validity(target, source, rows, row_count)
    elif kind == KIND_OFFSETS:
        _gather_offsets(target, source, rows, row_count)
    elif kind == KIND_ATTRIBUTE_OFFSETS:
        _gather_pair_offsets(target, source, pairs, rows, row_count)
    elif kind == KIND_DATA and buffer_id < BufferId.ATTRIBUTE_OFFSETS:
        _gather_data(target, source, before, rows, row_count)
    elif kind == KIND_DATA:
        _gather_pair_data(target, source, before, pairs, rows, row_count)
    elif kind == KIND_WORDS:
        _gather_words(target, source, rows, row_count)
    else:
        _gather_deltas(target, body, buffer_id, rows, row_count)


@kernel("void(int64,int64,int64,int64,int64,int64,int64,int64)")
def _write(
    destination: int,
    frame_bytes: int,
    header: int,
    body: int,
    rows: int,
    row_count: int,
    sizes: int,
    counts: int,
) -> None:
    """Write the new frame; `counts` is the address of u32 redelivery counts, or 0."""
    # The header's own bytes serve as the cursor until the header is written.
    open_body(destination, destination + HEADER_BYTES, load_i64(sizes))
    for buffer_id in range(1, BUFFER_ID_MAX + 1):
        size = load_i64(sizes + _WORD * buffer_id)
        if size == _ABSENT:
            continue
        target = open_buffer(destination, buffer_id, size)
        if buffer_id == BufferId.REDELIVERY_COUNT and counts:
            memory_copy(target, counts, size)
        else:
            _gather(target, body, buffer_id, rows, row_count)
    memory_copy(destination, header, HEADER_BYTES)
    store_u8(destination + At.CODEC, Codec.NONE)
    store_u8(destination + At.BODY_PADDING, 0)
    store_u16(destination + At.FLAGS, load_u16(header + At.FLAGS) | FLAG_SPLIT)
    store_u32(destination + At.FRAME_BYTES, frame_bytes)
    store_u32(destination + At.MESSAGE_COUNT, row_count)
    store_u32(destination + At.RAW_BODY_BYTES, frame_bytes - HEADER_BYTES)
    reseal(destination)


_call_check_rows = direct(_check_rows)
_call_measure = direct(_measure)
_call_write = direct(_write)


class Cut:
    """Messages of a frame that are to be written as a SPLIT frame, which has `len()` bytes.

    The view's buffer must stay as it is until then.
    """

    __slots__ = ("_bytes", "_counts", "_rows", "_sizes", "_view")

    def __init__(
        self,
        view: FrameView,
        rows: np.ndarray[Any, Any],
        redelivery_counts: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """The messages at `rows` (int32, strictly rising indices into `view`).

        `redelivery_counts` (uint32, one for each row) replaces those of the source, if any. The frame
        must have been stamped. Raises InvalidArgument for rows or counts that do not fit, DataLoss
        if the frame is unsound.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int32)
        body = view.body()
        place = array_address(rows)
        if not rows.size or not _call_check_rows(place, rows.size, view.message_count):
            raise InvalidArgument(
                f"rows must rise strictly and be below {view.message_count}, at least one of them"
            )
        if view.offset_span < view.message_count:
            raise InvalidArgument("only a stamped frame can be split; stamp it first")
        if redelivery_counts is not None:
            redelivery_counts = np.ascontiguousarray(redelivery_counts, dtype=np.uint32)
            if redelivery_counts.size != rows.size:
                raise InvalidArgument(
                    f"{redelivery_counts.size} redelivery counts for {rows.size} rows; give one each"
                )
        self._view, self._rows, self._counts = view, rows, redelivery_counts
        self._sizes = np.empty(BUFFER_ID_MAX + 1, dtype=np.int64)
        self._bytes: int = _call_measure(
            body, place, rows.size, array_address(self._sizes), redelivery_counts is not None
        )

    def __len__(self) -> int:
        return self._bytes

    @property
    def row_count(self) -> int:
        """Messages in it."""
        return self._rows.size

    def write(self, address: int) -> None:
        """Write the frame where `len()` bytes of memory are, whatever they are."""
        _call_write(
            address,
            self._bytes,
            self._view.address,
            self._view.body(),
            array_address(self._rows),
            self._rows.size,
            array_address(self._sizes),
            0 if self._counts is None else array_address(self._counts),
        )


def split_frame(
    view: FrameView,
    rows: np.ndarray[Any, Any],
    redelivery_counts: np.ndarray[Any, Any] | None = None,
) -> bytearray:
    """A SPLIT frame of some messages. Arguments and errors are those of `Cut`."""
    cut = Cut(view, rows, redelivery_counts)
    frame = bytearray(len(cut))
    cut.write(address_of(frame))
    return frame
