"""Open payloads of many lanes, packed and sealed into one bundle by two kernel calls.

    lane: list of payloads ──┐                 ┌ bundle | entries | frame | frame | frame ...
    lane: list of payloads ──┼─ rows, kernels ─┤
    lane: list of payloads ──┘                 └ a `Sending` for each frame, in the bundle's buffer

A row has what a kernel must know of one lane, and room for what the kernel finds. The first kernel says how many
messages of each lane make a frame, and how many frames a bundle takes; the second one writes them. Both read the
lists where they lie, under the GIL: between the calls a list may grow, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from danube_fast.client.link.buffers import FRAME_AT, Sender, Sending
from danube_fast.frame.cpython import (
    AT_ITEM_COUNT,
    AT_LIST_ITEMS,
    BYTES_TYPE,
    NONE,
    OBJECTS_READABLE,
)
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import (
    AT_BUNDLE_ENTRY_FRAME_BYTES,
    AT_BUNDLE_FRAME_COUNT,
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    BUNDLE_MAGIC,
    HEADER_BYTES,
    BufferId,
)
from danube_fast.frame.memory import load_i64, store_u32, store_u64
from danube_fast.frame.pack_kernels import (
    COUNT_SHIFT,
    _measure,
    _write_items,
    open_body,
    write_header,
)
from danube_fast.frame.stamp import seal
from danube_fast.ring.duplex_kernel import word_of
from danube_fast.ring.layout import WORD_BYTES

__all__ = ["CAN_JOIN", "join"]

CAN_JOIN = OBJECTS_READABLE
"""Whether kernels may walk lists of payloads in this process."""
LIST, PARTITION, PRODUCER, EPOCH, SEQUENCE, ROOM, COUNT, DATA_BYTES, FRAME_BYTES, AT = range(10)
_ROW_WORDS = 10
_ROW_BYTES = _ROW_WORDS * WORD_BYTES
_FOUND = (0,) * (_ROW_WORDS - COUNT)
_BYTES_MASK = (1 << COUNT_SHIFT) - 1


@kernel("int64(int64,int64,int64,int64,int64)")
def measure_rows(rows: int, row_count: int, room: int, bytes_type: int, none: int) -> int:
    """Note what each frame takes, as long as they fit into a bundle of `room` bytes: its size and, from bit COUNT_SHIFT
    on, how many frames. Ends before a row that cannot be packed this way."""
    size = BUNDLE_HEADER_BYTES
    for number in range(row_count):
        row = rows + number * _ROW_BYTES
        payloads = word_of(row, LIST)
        count, data_bytes, nulls, frame_bytes = _measure(
            load_i64(payloads + AT_LIST_ITEMS), load_i64(payloads + AT_ITEM_COUNT),
            word_of(row, ROOM), bytes_type, none,
        )  # fmt: skip
        more = BUNDLE_ENTRY_BYTES + frame_bytes
        if count == 0 or frame_bytes <= 0 or nulls or size + more > room:
            return size | (number << COUNT_SHIFT)
        size += more
        store_u64(row + COUNT * WORD_BYTES, count)
        store_u64(row + DATA_BYTES * WORD_BYTES, data_bytes)
        store_u64(row + FRAME_BYTES * WORD_BYTES, frame_bytes)
    return size | (row_count << COUNT_SHIFT)


@kernel("void(int64,int64,int64,int64)")
def _pack_row(row: int, frame: int, time_ns: int, none: int) -> None:
    """Pack and seal the frame of one row."""
    count, frame_bytes = word_of(row, COUNT), word_of(row, FRAME_BYTES)
    items = load_i64(word_of(row, LIST) + AT_LIST_ITEMS)
    # the header's own bytes serve as the cursor until the header is written
    open_body(frame, frame + HEADER_BYTES, 2)
    _write_items(frame, BufferId.PAYLOAD_OFFSETS, items, count, word_of(row, DATA_BYTES), 0, none)
    write_header(frame, frame_bytes, count)
    seal(frame, word_of(row, PRODUCER), word_of(row, SEQUENCE), time_ns, word_of(row, EPOCH), 0, 0)


@kernel("int64(int64,int64,int64,int64,int64)")
def pack_rows(rows: int, row_count: int, bundle: int, time_ns: int, none: int) -> int:
    """Write the bundle that was measured, and note where its frames are; its size."""
    store_u32(bundle, BUNDLE_MAGIC)
    store_u32(bundle + AT_BUNDLE_FRAME_COUNT, row_count)
    entry = bundle + BUNDLE_HEADER_BYTES
    frame = entry + BUNDLE_ENTRY_BYTES * row_count
    for number in range(row_count):
        row = rows + number * _ROW_BYTES
        frame_bytes = word_of(row, FRAME_BYTES)
        store_u32(entry, word_of(row, PARTITION))
        store_u32(entry + AT_BUNDLE_ENTRY_FRAME_BYTES, frame_bytes)
        store_u64(row + AT * WORD_BYTES, frame - bundle)
        _pack_row(row, frame, time_ns, none)
        entry += BUNDLE_ENTRY_BYTES
        frame += frame_bytes
    return frame - bundle


_measure_rows, _pack_rows = direct(measure_rows), direct(pack_rows)


def join(lanes: Sequence[Sender], room: int, time_ns: int) -> list[Sending]:
    """Pack what is open in lanes into one bundle of at most `room` bytes, from the beginning of its buffer on: frames of
    as many lanes as fit, from the first on. None of them if the first has to go another way."""
    words: list[int] = []
    for lane in lanes:
        words += lane.row()
        words += _FOUND
    rows = array("q", words)
    address, _ = rows.buffer_info()
    measured = _measure_rows(address, len(lanes), room, BYTES_TYPE, NONE)
    row_count = measured >> COUNT_SHIFT
    if not row_count:
        return []
    buffer = lanes[0].take_buffer(measured & _BYTES_MASK)
    buffer.frames_left = row_count
    _pack_rows(address, row_count, buffer.address - FRAME_AT, time_ns, NONE)
    sendings = []
    counts, sizes, places = (rows[word::_ROW_WORDS] for word in (COUNT, FRAME_BYTES, AT))
    for lane, count, frame_bytes, at in zip(lanes[:row_count], counts, sizes, places, strict=False):
        sendings.append(
            Sending(
                lane,
                buffer,
                frame_bytes,
                lane.next_sequence,
                count,
                publish_time_ns=time_ns,
                frame_at=at,
            )
        )
    return sendings
