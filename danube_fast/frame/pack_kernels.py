"""Kernels that turn CPython lists into a frame, in place and in one call.

Two of them: `pack_payloads` for the common case (payloads and nothing else), and `pack_columns` for
everything. Both first measure how many messages fit (touching each object once), then write.

    list -> items -> bytes objects      measure: count, sums of lengths, number of nulls
                                        write:   directory entry, buffer, next buffer ...

They run under the GIL, read the list's own size and items address at that moment, and call nothing
that could give the GIL up: no other thread can change the lists meanwhile.

`pack_columns` takes its arguments and keeps its sums in a table of int64 words (the job), whose
places are named below; `columns.py` fills the first part of it.
"""

from __future__ import annotations

from danube_fast.frame.cpython import (
    AT_BYTES_DATA,
    AT_ITEM_COUNT,
    AT_LIST_ITEMS,
    AT_TYPE,
    POINTER_BYTES,
)
from danube_fast.frame.hash import xxh64
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import (
    BUFFER_DIRECTORY_BYTES,
    BUFFER_ENTRY_BYTES,
    FLAG_DELAYED,
    FRAME_ALIGNMENT,
    FRAME_MAGIC,
    FRAME_VERSION,
    HASH_BYTES,
    HEADER_BYTES,
    OFFSET_BYTES,
    TIME_BYTES,
    At,
    BufferId,
)
from danube_fast.frame.memory import (
    load_i64,
    load_u8,
    memory_copy,
    memory_zero,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
)

__all__ = ["JOB_WORDS", "pack_columns", "pack_payloads"]

_WORD = 8

# The job: addresses in, each 0 if the column is absent. Lists are addresses of list objects.
# Arrays are int64 per message (times), u8 per message (1 = there), int64 running totals (pairs).
# The addresses of `bytes` and `None` are arguments too: as globals they would be frozen into the
# compiled code, and the next process that loads it has them elsewhere.
JOB_BYTES_TYPE = 0 * _WORD
JOB_NONE = 1 * _WORD
JOB_COUNT = 2 * _WORD  # messages in every array
JOB_PAYLOADS = 3 * _WORD
JOB_KEYS = 4 * _WORD
JOB_PAIR_TOTALS = 5 * _WORD
JOB_ATTRIBUTE_KEYS = 6 * _WORD
JOB_ATTRIBUTE_VALUES = 7 * _WORD
JOB_EVENT_TIMES = 8 * _WORD
JOB_EVENT_TIME_VALID = 9 * _WORD
JOB_DELIVER_AT = 10 * _WORD
JOB_DELIVER_AT_VALID = 11 * _WORD
# The job: sums over the messages taken so far, and where to write next.
_PAYLOAD_BYTES = 12 * _WORD
_PAYLOAD_NULLS = 13 * _WORD
_KEY_BYTES = 14 * _WORD
_KEY_NULLS = 15 * _WORD
_PAIRS = 16 * _WORD
_ATTRIBUTE_KEY_BYTES = 17 * _WORD
_ATTRIBUTE_VALUE_BYTES = 18 * _WORD
_EVENT_TIME_NULLS = 19 * _WORD
_DELIVER_AT_NULLS = 20 * _WORD
_CURSOR = 21 * _WORD
JOB_WORDS = 23

_CURSOR_ENTRY = _WORD  # cursor: where the next buffer goes | where its directory entry goes
_SUM_BYTES = _CURSOR - _PAYLOAD_BYTES

_ITEM_NULL = -1
_ITEM_WRONG = -2
_OFFSET_AND_BIT = OFFSET_BYTES + 1  # at least what an offset and a validity bit take
COUNT_SHIFT = 32
_BYTES_MASK = (1 << COUNT_SHIFT) - 1
_BLOCK = 32  # messages measured between two looks at the capacity
_ENTRY_SIZE_SHIFT = 32  # a directory entry as one word: u16 id | u16 zero | u32 size


@kernel("int64(int64)")
def _padded(byte_count: int) -> int:
    return (byte_count + FRAME_ALIGNMENT - 1) & -FRAME_ALIGNMENT


@kernel("int64(int64,int64,int64)")
def _item_bytes(item: int, bytes_type: int, none: int) -> int:
    """Length of a bytes object; _ITEM_NULL for None, _ITEM_WRONG for anything else."""
    if load_i64(item + AT_TYPE) == bytes_type:
        return load_i64(item + AT_ITEM_COUNT)
    return _ITEM_NULL if item == none else _ITEM_WRONG


@kernel("int64(int64,int64,int64)")
def _bytes_column_size(count: int, data_bytes: int, nulls: int) -> int:
    """Directory entries and buffers of one column of byte strings."""
    size = 2 * BUFFER_ENTRY_BYTES + _padded(OFFSET_BYTES * (count + 1)) + _padded(data_bytes)
    return size + BUFFER_ENTRY_BYTES + _padded((count + 7) >> 3) if nulls else size


@kernel("int64(int64,int64)")
def _times_size(count: int, nulls: int) -> int:
    """Directory entries and buffers of one column of times."""
    size = BUFFER_ENTRY_BYTES + TIME_BYTES * count
    return size + BUFFER_ENTRY_BYTES + _padded((count + 7) >> 3) if nulls else size


# ---------------------------------------------------------------- writing


@kernel("void(int64,int64,int64)")
def write_header(address: int, frame_bytes: int, count: int) -> None:
    """Write a fresh header: everything zero but what packing knows."""
    memory_zero(address, HEADER_BYTES)
    store_u32(address + At.MAGIC, FRAME_MAGIC)
    store_u8(address + At.VERSION, FRAME_VERSION)
    store_u32(address + At.FRAME_BYTES, frame_bytes)
    store_u32(address + At.MESSAGE_COUNT, count)
    store_u32(address + At.RAW_BODY_BYTES, frame_bytes - HEADER_BYTES)


@kernel("void(int64,int64,int64)")
def open_body(cursor: int, body: int, buffer_count: int) -> None:
    """Begin a body of `buffer_count` buffers at `body`; `cursor` is two words of scratch."""
    store_u64(body, buffer_count)
    store_u64(cursor + _CURSOR_ENTRY, body + BUFFER_DIRECTORY_BYTES)
    store_u64(cursor, body + BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * buffer_count)


@kernel("int64(int64,int64,int64)")
def open_buffer(cursor: int, buffer_id: int, byte_count: int) -> int:
    """Enter the next buffer in the directory, zero its padding, and return where it goes."""
    place = load_i64(cursor)
    entry = load_i64(cursor + _CURSOR_ENTRY)
    store_u64(entry, buffer_id | (byte_count << _ENTRY_SIZE_SHIFT))
    size = _padded(byte_count)
    if size:
        store_u64(place + size - FRAME_ALIGNMENT, 0)
    store_u64(cursor, place + size)
    store_u64(cursor + _CURSOR_ENTRY, entry + BUFFER_ENTRY_BYTES)
    return place


@kernel("void(int64,int64,int64,int64)")
def _write_validity(place: int, items: int, count: int, none: int) -> None:
    """A bit per item that is not None."""
    memory_zero(place, (count + 7) >> 3)
    for index in range(count):
        if load_i64(items + POINTER_BYTES * index) != none:
            byte = place + (index >> 3)
            store_u8(byte, load_u8(byte) | (1 << (index & 7)))


@kernel("void(int64,int64,int64,int64,int64,int64,int64)")
def _write_items(
    cursor: int, offsets_id: int, items: int, count: int, data_bytes: int, nulls: int, none: int
) -> None:
    """One column of byte strings: validity if there are nulls, offsets, data."""
    if nulls:
        _write_validity(open_buffer(cursor, offsets_id - 1, (count + 7) >> 3), items, count, none)
    offsets = open_buffer(cursor, offsets_id, OFFSET_BYTES * (count + 1))
    data = open_buffer(cursor, offsets_id + 1, data_bytes)
    position = 0
    store_u32(offsets, 0)
    for index in range(count):
        item = load_i64(items + POINTER_BYTES * index)
        if item != none:
            size = load_i64(item + AT_ITEM_COUNT)
            memory_copy(data + position, item + AT_BYTES_DATA, size)
            position += size
        store_u32(offsets + OFFSET_BYTES * (index + 1), position)


# ---------------------------------------------------------------- payloads only


@kernel("UniTuple(int64,4)(int64,int64,int64,int64,int64)")
def _measure(
    items: int, count: int, capacity: int, bytes_type: int, none: int
) -> tuple[int, int, int, int]:
    """(how many fit, sum of their bytes, nulls, frame_bytes needed or -1)."""
    fixed = HEADER_BYTES + BUFFER_DIRECTORY_BYTES
    roomy = capacity - fixed - _bytes_column_size(0, 0, 1) - 3 * FRAME_ALIGNMENT
    data_bytes, nulls = 0, 0
    for index in range(count):
        size = _item_bytes(load_i64(items + POINTER_BYTES * index), bytes_type, none)
        null = 0
        if size < 0:
            if size == _ITEM_WRONG:
                return (index, data_bytes, nulls, -1)
            size, null = 0, 1
        # The exact size only near the end: the loop is the hottest of all.
        if data_bytes + size + _OFFSET_AND_BIT * index > roomy:
            larger = fixed + _bytes_column_size(index + 1, data_bytes + size, nulls + null)
            if larger > capacity:
                needed = fixed + _bytes_column_size(index, data_bytes, nulls)
                return (index, data_bytes, nulls, needed if index else larger)
        data_bytes += size
        nulls += null
    return (count, data_bytes, nulls, fixed + _bytes_column_size(count, data_bytes, nulls))


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def pack_payloads(
    destination: int, capacity: int, payloads: int, start: int, bytes_type: int, none: int
) -> int:
    """Pack payloads[start:] while they fit; `payloads` is the address of a list.

    Returns frame_bytes and, from bit COUNT_SHIFT on, the count. If not even one fits, the count is
    0, frame_bytes is what one needs, and nothing is written. -1 if an item is neither bytes nor
    None. With `destination` 0 nothing is written.
    """
    items = load_i64(payloads + AT_LIST_ITEMS) + POINTER_BYTES * start
    available = load_i64(payloads + AT_ITEM_COUNT) - start
    count, data_bytes, nulls, needed = _measure(items, available, capacity, bytes_type, none)
    if needed <= 0:
        return -1
    if count == 0:
        return min(needed, _BYTES_MASK)
    if destination == 0:
        return needed | (count << COUNT_SHIFT)
    # The header's own bytes serve as the cursor until the header is written.
    open_body(destination, destination + HEADER_BYTES, 3 if nulls else 2)
    _write_items(destination, BufferId.PAYLOAD_OFFSETS, items, count, data_bytes, nulls, none)
    write_header(destination, needed, count)
    return needed | (count << COUNT_SHIFT)


# ---------------------------------------------------------------- every column


@kernel("void(int64,int64,int64)")
def _add(job: int, word: int, value: int) -> None:
    store_u64(job + word, load_i64(job + word) + value)


@kernel("int64(int64,int64,int64)")
def _list_items(list_address: int, first: int, count: int) -> int:
    """Address of item `first`; 0 if the list has not `count` items from there on."""
    if first + count > load_i64(list_address + AT_ITEM_COUNT):
        return 0
    return load_i64(list_address + AT_LIST_ITEMS) + POINTER_BYTES * first


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _add_items(job: int, column: int, sums: int, first: int, count: int, sign: int) -> int:
    """Add (sign 1) or take back (-1) byte strings: 0, or -1 if one is missing or no bytes."""
    items = _list_items(load_i64(job + column), first, count)
    if items == 0:
        return -1
    bytes_type, none = load_i64(job + JOB_BYTES_TYPE), load_i64(job + JOB_NONE)
    data_bytes, nulls = 0, 0
    for index in range(count):
        size = _item_bytes(load_i64(items + POINTER_BYTES * index), bytes_type, none)
        if size == _ITEM_WRONG:
            return -1
        if size == _ITEM_NULL:
            nulls += 1
        else:
            data_bytes += size
    _add(job, sums, sign * data_bytes)
    _add(job, sums + _WORD, sign * nulls)
    return 0


@kernel("int64(int64,int64)")
def _sum_sizes(items: int, count: int) -> int:
    """Sum of the lengths of bytes objects."""
    data_bytes = 0
    for index in range(count):
        data_bytes += load_i64(load_i64(items + POINTER_BYTES * index) + AT_ITEM_COUNT)
    return data_bytes


@kernel("int64(int64,int64,int64,int64)")
def _add_pairs(job: int, first: int, count: int, sign: int) -> int:
    """Add or take back the attributes of messages: 0, or -1 if a list is too short."""
    totals = load_i64(job + JOB_PAIR_TOTALS) + _WORD * first
    pair = load_i64(totals)
    pairs = load_i64(totals + _WORD * count) - pair
    keys = _list_items(load_i64(job + JOB_ATTRIBUTE_KEYS), pair, pairs)
    values = _list_items(load_i64(job + JOB_ATTRIBUTE_VALUES), pair, pairs)
    if pairs and (keys == 0 or values == 0):
        return -1
    _add(job, _ATTRIBUTE_KEY_BYTES, sign * _sum_sizes(keys, pairs))
    _add(job, _ATTRIBUTE_VALUE_BYTES, sign * _sum_sizes(values, pairs))
    _add(job, _PAIRS, sign * pairs)
    return 0


@kernel("void(int64,int64,int64,int64,int64,int64)")
def _add_times(
    job: int, valid_word: int, nulls_word: int, first: int, count: int, sign: int
) -> None:
    """Count null times in or out."""
    valid = load_i64(job + valid_word)
    if valid:
        there = 0
        for index in range(first, first + count):
            there += load_u8(valid + index)
        _add(job, nulls_word, sign * (count - there))


@kernel("int64(int64,int64,int64,int64)")
def _add_messages(job: int, first: int, count: int, sign: int) -> int:
    """Add or take back messages: 0, or less if something of them cannot be packed."""
    code = _add_items(job, JOB_PAYLOADS, _PAYLOAD_BYTES, first, count, sign)
    if load_i64(job + JOB_KEYS):
        code += _add_items(job, JOB_KEYS, _KEY_BYTES, first, count, sign)
    if load_i64(job + JOB_PAIR_TOTALS):
        code += _add_pairs(job, first, count, sign)
    _add_times(job, JOB_EVENT_TIME_VALID, _EVENT_TIME_NULLS, first, count, sign)
    _add_times(job, JOB_DELIVER_AT_VALID, _DELIVER_AT_NULLS, first, count, sign)
    return code


@kernel("int64(int64,int64)")
def _frame_size(job: int, count: int) -> int:
    """frame_bytes of `count` messages with the sums in the job."""
    size = HEADER_BYTES + BUFFER_DIRECTORY_BYTES
    size += _bytes_column_size(
        count, load_i64(job + _PAYLOAD_BYTES), load_i64(job + _PAYLOAD_NULLS)
    )
    if load_i64(job + JOB_KEYS):
        size += _bytes_column_size(count, load_i64(job + _KEY_BYTES), load_i64(job + _KEY_NULLS))
        size += BUFFER_ENTRY_BYTES + HASH_BYTES * count
    if load_i64(job + JOB_PAIR_TOTALS):
        pairs = load_i64(job + _PAIRS)
        size += BUFFER_ENTRY_BYTES + _padded(OFFSET_BYTES * (count + 1))
        size += _bytes_column_size(pairs, load_i64(job + _ATTRIBUTE_KEY_BYTES), 0)
        size += _bytes_column_size(pairs, load_i64(job + _ATTRIBUTE_VALUE_BYTES), 0)
    if load_i64(job + JOB_EVENT_TIMES):
        size += _times_size(count, load_i64(job + _EVENT_TIME_NULLS))
    if load_i64(job + JOB_DELIVER_AT):
        size += _times_size(count, load_i64(job + _DELIVER_AT_NULLS))
    return size


@kernel("int64(int64)")
def _buffer_count(job: int) -> int:
    """How many buffers the frame has."""
    buffers = 3 if load_i64(job + _PAYLOAD_NULLS) else 2
    if load_i64(job + JOB_KEYS):
        buffers += 4 if load_i64(job + _KEY_NULLS) else 3
    if load_i64(job + JOB_PAIR_TOTALS):
        buffers += 5
    if load_i64(job + JOB_EVENT_TIMES):
        buffers += 2 if load_i64(job + _EVENT_TIME_NULLS) else 1
    if load_i64(job + JOB_DELIVER_AT):
        buffers += 2 if load_i64(job + _DELIVER_AT_NULLS) else 1
    return buffers


@kernel("void(int64,int64,int64)")
def _write_keys(job: int, start: int, count: int) -> None:
    """Keys and their hashes; the hash of a null is 0."""
    cursor, none = job + _CURSOR, load_i64(job + JOB_NONE)
    items = load_i64(load_i64(job + JOB_KEYS) + AT_LIST_ITEMS) + POINTER_BYTES * start
    data_bytes, nulls = load_i64(job + _KEY_BYTES), load_i64(job + _KEY_NULLS)
    _write_items(cursor, BufferId.KEY_OFFSETS, items, count, data_bytes, nulls, none)
    hashes = open_buffer(cursor, BufferId.KEY_HASH, HASH_BYTES * count)
    for index in range(count):
        item = load_i64(items + POINTER_BYTES * index)
        value = 0
        if item != none:
            value = xxh64(item + AT_BYTES_DATA, load_i64(item + AT_ITEM_COUNT))
        store_u64(hashes + HASH_BYTES * index, value)


@kernel("void(int64,int64,int64)")
def _write_attributes(job: int, start: int, count: int) -> None:
    """Map offsets, then the pairs' keys and values."""
    cursor, none = job + _CURSOR, load_i64(job + JOB_NONE)
    totals = load_i64(job + JOB_PAIR_TOTALS) + _WORD * start
    first, pairs = load_i64(totals), load_i64(job + _PAIRS)
    place = open_buffer(cursor, BufferId.ATTRIBUTE_OFFSETS, OFFSET_BYTES * (count + 1))
    for index in range(count + 1):
        store_u32(place + OFFSET_BYTES * index, load_i64(totals + _WORD * index) - first)
    keys = load_i64(load_i64(job + JOB_ATTRIBUTE_KEYS) + AT_LIST_ITEMS) + POINTER_BYTES * first
    data_bytes = load_i64(job + _ATTRIBUTE_KEY_BYTES)
    _write_items(cursor, BufferId.ATTRIBUTE_KEY_OFFSETS, keys, pairs, data_bytes, 0, none)
    values = load_i64(load_i64(job + JOB_ATTRIBUTE_VALUES) + AT_LIST_ITEMS) + POINTER_BYTES * first
    data_bytes = load_i64(job + _ATTRIBUTE_VALUE_BYTES)
    _write_items(cursor, BufferId.ATTRIBUTE_VALUE_OFFSETS, values, pairs, data_bytes, 0, none)


@kernel("void(int64,int64,int64,int64,int64,int64)")
def _write_times(
    cursor: int, times_id: int, times: int, valid: int, count: int, nulls: int
) -> None:
    """One column of times: validity if there are nulls, then int64 nanoseconds."""
    if nulls:
        place = open_buffer(cursor, times_id - 1, (count + 7) >> 3)
        memory_zero(place, (count + 7) >> 3)
        for index in range(count):
            byte = place + (index >> 3)
            store_u8(byte, load_u8(byte) | ((load_u8(valid + index) != 0) << (index & 7)))
    memory_copy(open_buffer(cursor, times_id, TIME_BYTES * count), times, TIME_BYTES * count)


@kernel("void(int64,int64,int64,int64)")
def _write_columns(destination: int, job: int, start: int, count: int) -> None:
    """The whole body, from the sums in the job."""
    cursor = job + _CURSOR
    open_body(cursor, destination + HEADER_BYTES, _buffer_count(job))
    items = load_i64(load_i64(job + JOB_PAYLOADS) + AT_LIST_ITEMS) + POINTER_BYTES * start
    data_bytes, nulls = load_i64(job + _PAYLOAD_BYTES), load_i64(job + _PAYLOAD_NULLS)
    _write_items(
        cursor, BufferId.PAYLOAD_OFFSETS, items, count, data_bytes, nulls, load_i64(job + JOB_NONE)
    )
    if load_i64(job + JOB_KEYS):
        _write_keys(job, start, count)
    if load_i64(job + JOB_PAIR_TOTALS):
        _write_attributes(job, start, count)
    times, nulls = load_i64(job + JOB_EVENT_TIMES), load_i64(job + _EVENT_TIME_NULLS)
    if times:
        valid = load_i64(job + JOB_EVENT_TIME_VALID) + start
        _write_times(cursor, BufferId.EVENT_TIME, times + TIME_BYTES * start, valid, count, nulls)
    times, nulls = load_i64(job + JOB_DELIVER_AT), load_i64(job + _DELIVER_AT_NULLS)
    if times:
        valid = load_i64(job + JOB_DELIVER_AT_VALID) + start
        _write_times(cursor, BufferId.DELIVER_AT, times + TIME_BYTES * start, valid, count, nulls)


@kernel("int64(int64,int64,int64,int64)")
def pack_columns(destination: int, capacity: int, job: int, start: int) -> int:
    """As `pack_payloads`, with the columns of a job. -1 if something cannot be packed."""
    memory_zero(job + _PAYLOAD_BYTES, _SUM_BYTES)
    available = min(
        load_i64(load_i64(job + JOB_PAYLOADS) + AT_ITEM_COUNT), load_i64(job + JOB_COUNT)
    )
    count, needed, full = 0, 0, False
    while start + count < available and not full:
        block = min(_BLOCK, available - start - count)
        if _add_messages(job, start + count, block, 1) != 0:
            return -1
        count += block
        needed = _frame_size(job, count)
        while needed > capacity:
            if count == 1:
                return min(needed, _BYTES_MASK)
            full = True
            count -= 1
            _add_messages(job, start + count, 1, -1)
            needed = _frame_size(job, count)
    if count != 0 and destination != 0:
        _write_columns(destination, job, start, count)
        write_header(destination, needed, count)
        if load_i64(job + JOB_DELIVER_AT) != 0:
            store_u16(destination + At.FLAGS, FLAG_DELAYED)
    return needed | (count << COUNT_SHIFT)
