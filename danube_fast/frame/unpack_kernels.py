"""Kernels that read a body which `check_body` has accepted.

`find_buffer` walks the directory (at most 19 entries), `find_ranges` reads offsets. `unpack_items` makes `bytes` objects straight
from a column and puts them into a list; it calls the Python C API, so it runs under the GIL and only
where `cpython.OBJECTS_READABLE`.
"""

from __future__ import annotations

from danube_fast.frame.cpython import AT_LIST_ITEMS, POINTER_BYTES
from danube_fast.frame.kernel import external, kernel
from danube_fast.frame.layout import (
    AT_BUFFER_COUNT,
    AT_ENTRY_BYTES,
    AT_ENTRY_ID,
    BUFFER_DIRECTORY_BYTES,
    BUFFER_ENTRY_BYTES,
    DELTA_BYTES,
    FRAME_ALIGNMENT,
    OFFSET_BYTES,
    BufferId,
)
from danube_fast.frame.memory import load_i32, load_i64, load_u8, load_u16, load_u32, store_u64

__all__ = ["find_buffer", "find_ranges", "keep_bytes", "unpack_items"]

_new_bytes = external("PyBytes_FromStringAndSize", "int64(int64,int64)")
_clear_error = external("PyErr_Clear", "void()")


@kernel("int64(int64,int64,int64,int64,int64)")
def keep_bytes(target: int, index: int, source: int, byte_count: int, counted_none: int) -> int:
    """Put a new bytes object in place of a None of the list at `target`, as `unpack_items` does: its address; 0 if
    memory ran out."""
    item: int = _new_bytes(source, byte_count)
    if item == 0:
        _clear_error()
        return 0
    store_u64(load_i64(target + AT_LIST_ITEMS) + index * POINTER_BYTES, item)
    if counted_none:
        store_u64(counted_none, load_i64(counted_none) - 1)
    return item


@kernel("int64(int64,int64)")
def find_buffer(body: int, buffer_id: int) -> int:
    """Where a buffer lies, bytes from the start of the body; 0 if it is absent."""
    buffers = load_u32(body + AT_BUFFER_COUNT)
    entry = body + BUFFER_DIRECTORY_BYTES
    place = BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * buffers
    for _ in range(buffers):
        found = load_u16(entry + AT_ENTRY_ID)
        if found >= buffer_id:
            return place if found == buffer_id else 0
        size = load_u32(entry + AT_ENTRY_BYTES)
        place += (size + FRAME_ALIGNMENT - 1) & -FRAME_ALIGNMENT
        entry += BUFFER_ENTRY_BYTES
    return 0


@kernel("int64(int64,int64,int64,int64,int64)")
def find_ranges(deltas: int, base: int, start: int, stop: int, target: int) -> int:
    """Write where the offsets of messages start to stop (at least one) lie, int64 [low, high) pairs; how
    many pairs. `deltas` is the address of u32 deltas from `base`."""
    first = target
    low = high = base + load_u32(deltas + DELTA_BYTES * start)
    for index in range(start, stop):
        offset = base + load_u32(deltas + DELTA_BYTES * index)
        if offset != high:
            store_u64(target, low)
            store_u64(target + 8, high)
            target += 16
            low = offset
        high = offset + 1
    store_u64(target, low)
    store_u64(target + 8, high)
    return ((target - first) >> 4) + 1


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def unpack_items(
    body: int, offsets_id: int, start: int, stop: int, target: int, at: int, counted_none: int
) -> int:
    """Items start to stop of a column of byte strings into the list object at `target`, from its item
    `at` on.

    The list holds None there; nulls stay None. The data has the id behind `offsets_id`, the validity
    bitmap of payloads and keys the one before it. What replaces a None takes its reference back from
    `counted_none`, the address of None, unless that is 0. Returns 0; 1 if the column is absent; -1 if
    memory ran out (MemoryError is set).
    """
    offsets = find_buffer(body, offsets_id)
    if offsets == 0:
        return 1
    nullable = offsets_id in (BufferId.PAYLOAD_OFFSETS, BufferId.KEY_OFFSETS)
    validity = find_buffer(body, offsets_id - 1) if nullable else 0
    data = body + find_buffer(body, offsets_id + 1)
    offsets += body
    first = load_i32(offsets + OFFSET_BYTES * start)
    slot = load_i64(target + AT_LIST_ITEMS) + POINTER_BYTES * at
    made = failed = 0
    for index in range(start, stop):
        last = load_i32(offsets + OFFSET_BYTES * (index + 1))
        there = 1
        if validity:
            there = load_u8(body + validity + (index >> 3)) >> (index & 7) & 1
        if there:
            item = _new_bytes(data + first, last - first)
            if item == 0:
                failed = 1
                break
            store_u64(slot, item)
            made += 1
        slot += POINTER_BYTES
        first = last
    if counted_none:
        store_u64(counted_none, load_i64(counted_none) - made)
    return -failed
