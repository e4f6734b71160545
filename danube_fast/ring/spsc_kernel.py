"""Kernels of the SPSC ring: where a record goes, where the oldest lies, when the peer knows.

`spsc.py` tells the story and calls them through the entry points at the end of this file. All take
the ring's address and its capacity; the capacity is never read from the memory, which a peer may
scribble over. A negative result is one of the codes below; none of them changes the ring.
"""

from __future__ import annotations

from danube_fast.frame.cpython import AT_BYTES_DATA, AT_ITEM_COUNT, AT_TYPE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import load_i64, memory_copy, store_u64
from danube_fast.ring.atomics import load_acquire, load_relaxed, store_relaxed, store_release
from danube_fast.ring.layout import (
    AT_CACHED_HEAD,
    AT_CACHED_TAIL,
    AT_HEAD,
    AT_TAIL,
    AT_VERSION,
    RECORD_ALIGNMENT,
    RECORD_DATA,
    RECORD_HEADER_BYTES,
    RECORD_KIND_SHIFT,
    RECORD_LENGTH_MASK,
    RECORD_PAD,
    RING_HEADER_BYTES,
    WORD_BYTES,
)

__all__ = [
    "DAMAGED",
    "EMPTY",
    "FULL",
    "NOT_BYTES",
    "TOO_LARGE",
    "front",
    "publish",
    "push_tuple",
    "readable",
    "release",
    "reserve",
    "seal_version",
    "used",
    "version",
]

FULL = -1
"""No room just now; the consumer must pop first."""
EMPTY = -1
"""No record just now."""
DAMAGED = -2
"""The peer wrote positions or lengths that cannot be; see `ring/repair.py`."""
NOT_BYTES = -3
"""An argument is not exactly `bytes`; push through the memoryview instead."""
TOO_LARGE = -4
"""The record can never fit; see `record_bytes_max`."""

AT_TUPLE_ITEMS = 24
"""Where CPython keeps the items of a tuple, in it; proved by `spsc.py` at import."""


@kernel("int64(int64)")
def _record_bytes(length: int) -> int:
    """Bytes that a record with a payload of `length` takes; `layout.record_bytes` for kernels."""
    return RECORD_HEADER_BYTES + ((length + RECORD_ALIGNMENT - 1) & -RECORD_ALIGNMENT)


@kernel("int64(int64,int64,int64,int64)")
def _reserve(base: int, capacity: int, tail: int, need: int) -> int:
    """Position at or behind `tail` of `need` contiguous free bytes, or FULL, or DAMAGED.

    Writes the pad before it, if there is one. `tail` is a multiple of 8, not negative.
    """
    place = tail & (capacity - 1)
    pad = 0
    if place + need > capacity:
        pad = capacity - place
    end = tail + pad + need
    used = end - load_relaxed(base + AT_CACHED_HEAD)
    if used > capacity or used < need:
        # Pairs with store_release in _release: all before this head is done with.
        head = load_acquire(base + AT_HEAD)
        if head < 0 or tail < head or tail - head > capacity:
            return DAMAGED
        store_relaxed(base + AT_CACHED_HEAD, head)
        if end - head > capacity:
            return FULL
    if pad > 0:
        header = (pad - RECORD_HEADER_BYTES) | (RECORD_PAD << RECORD_KIND_SHIFT)
        store_u64(base + RING_HEADER_BYTES + place, header)
    return tail + pad


@kernel("int64(int64)")
def _own_tail(base: int) -> int:
    """The tail as the producer reads it, or DAMAGED if no producer can have written it."""
    tail = load_relaxed(base + AT_TAIL)
    return DAMAGED if tail < 0 or tail & (RECORD_ALIGNMENT - 1) != 0 else tail


@kernel("int64(int64,int64,int64)")
def _reserve_one(base: int, capacity: int, length: int) -> int:
    """Position of a free stretch for a payload of `length` bytes, or a code."""
    need = _record_bytes(length)
    if need > capacity >> 1:
        return TOO_LARGE
    tail = _own_tail(base)
    return tail if tail < 0 else _reserve(base, capacity, tail, need)


@kernel("int64(int64,int64,int64,int64)")
def _publish(base: int, capacity: int, position: int, length: int) -> int:
    """Write the header of the record at `position` and let the consumer see it. The new tail."""
    header = length | (RECORD_DATA << RECORD_KIND_SHIFT)
    store_u64(base + RING_HEADER_BYTES + (position & (capacity - 1)), header)
    tail = position + _record_bytes(length)
    # Pairs with load_acquire in _front: payload and header come before the tail.
    store_release(base + AT_TAIL, tail)
    return tail


@kernel("int64(int64,int64,int64,int64)")
def _push_tuple(base: int, capacity: int, parts: int, bytes_type: int) -> int:
    """Push one record made of the `bytes` objects of the tuple at address `parts`. Or a code."""
    count = load_i64(parts + AT_ITEM_COUNT)
    length = 0
    for index in range(count):
        part = load_i64(parts + AT_TUPLE_ITEMS + index * WORD_BYTES)
        if load_i64(part + AT_TYPE) != bytes_type:
            return NOT_BYTES
        length += load_i64(part + AT_ITEM_COUNT)
    position = _reserve_one(base, capacity, length)
    if position < 0:
        return position
    destination = base + RING_HEADER_BYTES + (position & (capacity - 1)) + RECORD_HEADER_BYTES
    for index in range(count):
        part = load_i64(parts + AT_TUPLE_ITEMS + index * WORD_BYTES)
        part_bytes = load_i64(part + AT_ITEM_COUNT)
        memory_copy(destination, part + AT_BYTES_DATA, part_bytes)
        destination += part_bytes
    return _publish(base, capacity, position, length)


@kernel("int64(int64,int64,int64,int64)")
def _look(base: int, capacity: int, head: int, tail: int) -> int:
    """Place << 32 | length of the data record at or behind `head`, or EMPTY, or DAMAGED."""
    if head == tail:
        return EMPTY
    if (
        head < 0
        or tail < head
        or tail - head > capacity
        or (head | tail) & (RECORD_ALIGNMENT - 1) != 0
    ):
        return DAMAGED
    place = head & (capacity - 1)
    header = load_i64(base + RING_HEADER_BYTES + place)
    if header >> RECORD_KIND_SHIFT == RECORD_PAD:
        head += capacity - place
        if (header & RECORD_LENGTH_MASK) + RECORD_HEADER_BYTES + place != capacity or head >= tail:
            return DAMAGED
        place = 0
        header = load_i64(base + RING_HEADER_BYTES)
    length = header & RECORD_LENGTH_MASK
    need = _record_bytes(length)
    if header >> RECORD_KIND_SHIFT != RECORD_DATA or need > tail - head or place + need > capacity:
        return DAMAGED
    return place << RECORD_KIND_SHIFT | length


@kernel("int64(int64,int64,int64,int64)")
def _behind(capacity: int, head: int, place: int, length: int) -> int:
    """Position behind the record that `_look` found from `head`."""
    skipped = (place - head) & (capacity - 1)
    return head + skipped + _record_bytes(length)


@kernel("int64(int64,int64)")
def _front(base: int, capacity: int) -> int:
    """Place << 32 | length of the oldest record, or EMPTY, or DAMAGED. Moves nothing."""
    head = load_relaxed(base + AT_HEAD)
    tail = load_relaxed(base + AT_CACHED_TAIL)
    if head == tail:
        # Pairs with store_release in _publish.
        tail = load_acquire(base + AT_TAIL)
        store_relaxed(base + AT_CACHED_TAIL, tail)
    return _look(base, capacity, head, tail)


@kernel("int64(int64,int64,int64)")
def _release(base: int, capacity: int, found: int) -> int:
    """Give the record `found` by `_front` back to the producer."""
    head = load_relaxed(base + AT_HEAD)
    place = found >> RECORD_KIND_SHIFT
    head = _behind(capacity, head, place, found & RECORD_LENGTH_MASK)
    # Pairs with load_acquire in _reserve: the copy out of the record comes before the head.
    store_release(base + AT_HEAD, head)
    return head


@kernel("int64(int64)")
def _readable(base: int) -> int:
    """1 if the consumer has something to pop."""
    return 1 if load_acquire(base + AT_TAIL) != load_relaxed(base + AT_HEAD) else 0


@kernel("int64(int64)")
def _used(base: int) -> int:
    """Bytes between head and tail."""
    head = load_acquire(base + AT_HEAD)
    return load_acquire(base + AT_TAIL) - head


@kernel("int64(int64)")
def _version(base: int) -> int:
    """The version word; pairs with store_release in _seal_version."""
    return load_acquire(base + AT_VERSION)


@kernel("int64(int64,int64)")
def _seal_version(base: int, word: int) -> int:
    """Store the version word, last of all. Pairs with load_acquire in _version."""
    store_release(base + AT_VERSION, word)
    return word


reserve = direct(_reserve_one)
publish = direct(_publish)
push_tuple = direct(_push_tuple)
front = direct(_front)
release = direct(_release)
readable = direct(_readable)
used = direct(_used)
version = direct(_version)
seal_version = direct(_seal_version)
