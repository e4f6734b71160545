"""Kernels that gather the messages of many frames, column by column, into the buffers of one Arrow table.

    memory     | frame | frame | frame | frame |
    entries    one row of words for each frame that has some of the wanted offsets: where its header and its
               body are, and which of its messages are wanted
    columns    each kernel walks the entries and writes one column, back to back

`list_frames` makes the entries and checks each frame; a compressed body has to be unpacked by the caller before
`measure` chooses the messages. Bodies were accepted by `check_body` then, so nothing here can leave them.
"""

from __future__ import annotations

import enum

from danube_fast.clock import MICROSECOND_NS
from danube_fast.frame.check import check_frame
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import (
    ALL_FLAGS,
    DELTA_BYTES,
    FLAG_CONTROL,
    FLAG_PAD,
    HEADER_BYTES,
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
    load_word,
    memory_copy,
    store_u8,
    store_u32,
    store_u64,
    store_word,
)
from danube_fast.frame.unpack_kernels import find_buffer

__all__ = [
    "ENTRY_BYTES",
    "Entry",
    "Listing",
    "Sum",
    "fill_attributes",
    "fill_bits",
    "fill_bytes",
    "fill_event_times",
    "fill_numbers",
    "fill_publish_times",
    "list_frames",
    "measure",
]


class Entry(enum.IntEnum):
    """Words of one entry."""

    HEADER = 0  # address
    BODY = 1  # address of the uncompressed body; 0: it is compressed
    START = 2  # first wanted message
    STOP = 3  # behind the last one


ENTRY_BYTES = 8 * len(Entry)


class Listing(enum.IntEnum):
    """Words that `list_frames` writes."""

    CONSUMED = 0  # bytes of frames that were passed
    COUNT = 1  # entries


class Sum(enum.IntEnum):
    """Words of what `measure` sums up over the wanted messages."""

    ROWS = 0
    PAYLOAD_BYTES = 1
    PAYLOAD_VALIDITIES = 2  # entries that have such a buffer
    KEY_BYTES = 3
    KEYS_PARTIAL = 4  # entries without keys, or with null ones
    PAIRS = 5
    ATTRIBUTE_KEY_BYTES = 6
    ATTRIBUTE_VALUE_BYTES = 7
    EVENT_TIMES_PARTIAL = 8  # entries without event times, or with null ones


@kernel("void(int64,int64)")
def _enter(entry: int, frame: int) -> None:
    """Set HEADER and BODY."""
    is_plain = load_u8(frame + At.CODEC) == Codec.NONE
    store_word(entry, Entry.HEADER, frame)
    store_word(entry, Entry.BODY, frame + HEADER_BYTES if is_plain else 0)


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64,int64)", nogil=True)
def list_frames(
    address: int,
    byte_count: int,
    low: int,
    high: int,
    entries: int,
    entries_max: int,
    rows_max: int,
    bytes_max: int,
    state: int,
) -> int:
    """Enter frames of `byte_count` bytes that may hold offsets from `low` to below `high`, until one of the limits is
    reached (one is always made). 0, or the fault of the frame at CONSUMED; `state`: words of Listing."""
    at, count, rows, total, code = 0, 0, 0, 0, 0
    while at < byte_count and count < entries_max:
        frame = address + at
        frame_bytes = check_frame(frame, byte_count - at, ALL_FLAGS, 0)
        if frame_bytes < 0:
            code = frame_bytes
            break
        base = load_i64(frame + At.BASE_OFFSET)
        is_wanted = base < high and base + load_u32(frame + At.OFFSET_SPAN) > low
        if is_wanted and load_u16(frame + At.FLAGS) & (FLAG_PAD | FLAG_CONTROL) == 0:
            messages = load_u32(frame + At.MESSAGE_COUNT)
            size = load_u32(frame + At.RAW_BODY_BYTES)
            if count > 0 and (rows + messages > rows_max or total + size > bytes_max):
                break
            _enter(entries + ENTRY_BYTES * count, frame)
            count += 1
            rows += messages
            total += size
        at += frame_bytes
    store_word(state, Listing.CONSUMED, at)
    store_word(state, Listing.COUNT, count)
    return code


@kernel("int64(int64,int64,int64)")
def _first_at(deltas: int, count: int, delta: int) -> int:
    """Index of the first of `count` rising u32 deltas that is `delta` or more."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if load_u32(deltas + DELTA_BYTES * middle) < delta:
            low = middle + 1
        else:
            high = middle
    return low


@kernel("void(int64,int64,int64)")
def _choose(entry: int, low: int, high: int) -> None:
    """Set START and STOP: the messages with offsets from `low` to below `high`."""
    header, body = load_word(entry, Entry.HEADER), load_word(entry, Entry.BODY)
    count = load_u32(header + At.MESSAGE_COUNT)
    base = load_i64(header + At.BASE_OFFSET)
    start, stop = max(low - base, 0), max(high - base, 0)
    deltas = find_buffer(body, BufferId.OFFSET_DELTA)
    if deltas != 0:
        start, stop = _first_at(body + deltas, count, start), _first_at(body + deltas, count, stop)
    start = min(start, count)
    store_word(entry, Entry.START, start)
    store_word(entry, Entry.STOP, max(start, min(stop, count)))


@kernel("int64(int64,int64,int64,int64)")
def _data_bytes(body: int, offsets_id: int, start: int, stop: int) -> int:
    """Bytes of items start to stop of a column of byte strings; 0 if it is absent."""
    place = find_buffer(body, offsets_id)
    if place == 0:
        return 0
    offsets = body + place
    return load_i32(offsets + OFFSET_BYTES * stop) - load_i32(offsets + OFFSET_BYTES * start)


@kernel("void(int64,int64,int64)")
def _add(sums: int, word: int, value: int) -> None:
    store_word(sums, word, load_word(sums, word) + value)


@kernel("void(int64,int64,int64,int64,int64)", nogil=True)
def measure(entries: int, count: int, low: int, high: int, sums: int) -> None:
    """Choose the messages of each entry, and add up what their columns take; `sums`: words of Sum, zeros before."""
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        _choose(entry, low, high)
        body = load_word(entry, Entry.BODY)
        start, stop = load_word(entry, Entry.START), load_word(entry, Entry.STOP)
        _add(sums, Sum.ROWS, stop - start)
        _add(sums, Sum.PAYLOAD_BYTES, _data_bytes(body, BufferId.PAYLOAD_OFFSETS, start, stop))
        if find_buffer(body, BufferId.PAYLOAD_VALIDITY) != 0:
            _add(sums, Sum.PAYLOAD_VALIDITIES, 1)
        _add(sums, Sum.KEY_BYTES, _data_bytes(body, BufferId.KEY_OFFSETS, start, stop))
        has_keys = find_buffer(body, BufferId.KEY_OFFSETS) != 0
        if not has_keys or find_buffer(body, BufferId.KEY_VALIDITY) != 0:
            _add(sums, Sum.KEYS_PARTIAL, 1)
        has_times = find_buffer(body, BufferId.EVENT_TIME) != 0
        if not has_times or find_buffer(body, BufferId.EVENT_TIME_VALIDITY) != 0:
            _add(sums, Sum.EVENT_TIMES_PARTIAL, 1)
        place = find_buffer(body, BufferId.ATTRIBUTE_OFFSETS)
        if place != 0:
            first = load_i32(body + place + OFFSET_BYTES * start)
            last = load_i32(body + place + OFFSET_BYTES * stop)
            keys = _data_bytes(body, BufferId.ATTRIBUTE_KEY_OFFSETS, first, last)
            values = _data_bytes(body, BufferId.ATTRIBUTE_VALUE_OFFSETS, first, last)
            _add(sums, Sum.PAIRS, last - first)
            _add(sums, Sum.ATTRIBUTE_KEY_BYTES, keys)
            _add(sums, Sum.ATTRIBUTE_VALUE_BYTES, values)


@kernel("int64(int64,int64,int64,int64,int64)")
def _fill_numbers(target: int, base: int, deltas: int, start: int, stop: int) -> int:
    """Write `base` and each delta, or its index where `deltas` is 0; the address behind them."""
    if deltas == 0:
        for index in range(start, stop):
            store_u64(target + 8 * (index - start), base + index)
    else:
        for index in range(start, stop):
            delta = load_u32(deltas + DELTA_BYTES * index)
            store_u64(target + 8 * (index - start), base + delta)
    return target + 8 * (stop - start)


@kernel("int64(int64,int64)")
def _place(body: int, buffer_id: int) -> int:
    """Address of a buffer; 0 if it is absent."""
    place = find_buffer(body, buffer_id)
    return body + place if place != 0 else 0


@kernel("void(int64,int64,int64,int64,int64)", nogil=True)
def fill_numbers(entries: int, count: int, base_at: int, deltas_id: int, target: int) -> None:
    """Write int64 offsets or sequences: the header has the first one at `base_at`, the buffer `deltas_id` what is added
    for each message, if the frame has gaps."""
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        base = load_i64(load_word(entry, Entry.HEADER) + base_at)
        deltas = _place(load_word(entry, Entry.BODY), deltas_id)
        start, stop = load_word(entry, Entry.START), load_word(entry, Entry.STOP)
        target = _fill_numbers(target, base, deltas, start, stop)


@kernel("void(int64,int64,int64)", nogil=True)
def fill_publish_times(entries: int, count: int, target: int) -> None:
    """Write int64 publish times, microseconds."""
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        time_us = load_i64(load_word(entry, Entry.HEADER) + At.PUBLISH_TIME_NS) // MICROSECOND_NS
        for _ in range(load_word(entry, Entry.START), load_word(entry, Entry.STOP)):
            store_u64(target, time_us)
            target += TIME_BYTES


@kernel("void(int64,int64,int64)", nogil=True)
def fill_event_times(entries: int, count: int, target: int) -> None:
    """Write int64 event times, microseconds; 0 where there is none."""
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        times = _place(load_word(entry, Entry.BODY), BufferId.EVENT_TIME)
        for message in range(load_word(entry, Entry.START), load_word(entry, Entry.STOP)):
            time_us = 0
            if times != 0:
                time_us = load_i64(times + TIME_BYTES * message) // MICROSECOND_NS
            store_u64(target, time_us)
            target += TIME_BYTES


@kernel("void(int64,int64,int64,int64,int64)", nogil=True)
def fill_bits(entries: int, count: int, values_id: int, validity_id: int, target: int) -> None:
    """Write which messages have a value, as a bitmap over zeros: none of a frame without the buffer `values_id`, all of
    one without `validity_id`."""
    row = 0
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        body = load_word(entry, Entry.BODY)
        start, stop = load_word(entry, Entry.START), load_word(entry, Entry.STOP)
        bits = _place(body, validity_id)
        if find_buffer(body, values_id) == 0:
            row += stop - start
            continue
        for message in range(start, stop):
            bit = 1
            if bits != 0:
                bit = (load_u8(bits + (message >> 3)) >> (message & 7)) & 1
            byte = target + (row >> 3)
            store_u8(byte, load_u8(byte) | (bit << (row & 7)))
            row += 1


@kernel("int64(int64,int64,int64,int64,int64)")
def _shift_offsets(offsets: int, first: int, last: int, target: int, position: int) -> int:
    """Write where items first to last end if their data begin at `position`; where they end."""
    shift = position - load_i32(offsets + OFFSET_BYTES * first)
    for item in range(first, last):
        end = load_i32(offsets + OFFSET_BYTES * (item + 1)) + shift
        store_u32(target + OFFSET_BYTES * (item - first), end)
    return load_i32(offsets + OFFSET_BYTES * last) + shift


@kernel("void(int64,int64,int64,int64,int64)", nogil=True)
def fill_bytes(entries: int, count: int, offsets_id: int, target: int, data: int) -> None:
    """Write a column of byte strings: its int32 offsets, and the data unless that is 0. Empty where a frame has none."""
    position = 0
    store_u32(target, 0)
    target += OFFSET_BYTES
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        body = load_word(entry, Entry.BODY)
        start, stop = load_word(entry, Entry.START), load_word(entry, Entry.STOP)
        offsets = _place(body, offsets_id)
        if offsets == 0:
            for row in range(stop - start):
                store_u32(target + OFFSET_BYTES * row, position)
        else:
            end = _shift_offsets(offsets, start, stop, target, position)
            source = _place(body, offsets_id + 1) + load_i32(offsets + OFFSET_BYTES * start)
            memory_copy(data + position, source, end - position)
            position = end
        target += OFFSET_BYTES * (stop - start)


@kernel("void(int64,int64,int64,int64)", nogil=True)
def fill_attributes(entries: int, count: int, rows: int, strings: int) -> None:
    """Write int32 offsets of pairs for each message to `rows`; `strings` is the address of four addresses: offsets and
    data of the attributes' keys, then of their values."""
    pairs = 0
    key_offsets, key_data = load_word(strings, 0), load_word(strings, 1)
    value_offsets, value_data = load_word(strings, 2), load_word(strings, 3)
    key_at, value_at = 0, 0
    store_u32(rows, 0)
    store_u32(key_offsets, 0)
    store_u32(value_offsets, 0)
    rows += OFFSET_BYTES
    for index in range(count):
        entry = entries + ENTRY_BYTES * index
        body = load_word(entry, Entry.BODY)
        start, stop = load_word(entry, Entry.START), load_word(entry, Entry.STOP)
        offsets = _place(body, BufferId.ATTRIBUTE_OFFSETS)
        if offsets == 0:
            for row in range(stop - start):
                store_u32(rows + OFFSET_BYTES * row, pairs)
        else:
            first = load_i32(offsets + OFFSET_BYTES * start)
            last = load_i32(offsets + OFFSET_BYTES * stop)
            _shift_offsets(offsets, start, stop, rows, pairs)
            place = OFFSET_BYTES * (pairs + 1)
            keys = _place(body, BufferId.ATTRIBUTE_KEY_OFFSETS)
            end = _shift_offsets(keys, first, last, key_offsets + place, key_at)
            source = _place(body, BufferId.ATTRIBUTE_KEY_DATA) + load_i32(
                keys + OFFSET_BYTES * first
            )
            memory_copy(key_data + key_at, source, end - key_at)
            key_at = end
            values = _place(body, BufferId.ATTRIBUTE_VALUE_OFFSETS)
            end = _shift_offsets(values, first, last, value_offsets + place, value_at)
            source = _place(body, BufferId.ATTRIBUTE_VALUE_DATA) + load_i32(
                values + OFFSET_BYTES * first
            )
            memory_copy(value_data + value_at, source, end - value_at)
            value_at = end
            pairs += last - first
        rows += OFFSET_BYTES * (stop - start)
