"""Kernels of one side of a `Duplex`: its words, its signals, room, and a message of two parts in one call.

    IN, OUT      addresses of the ring that it reads and of the one that it writes; CAPACITY of each
    BELL_OUT     descriptor that wakes the peer when it is written; BELL_IN: the one by which the peer wakes this side.
                 -1 once the side is closed: the number of a closed descriptor may soon be another's
    ROOM_TOLD    the newest complaint of the peer that was answered
    ROOM_ASKED   number of the newest complaint of its own
    WAITS        1 from a complaint on until Python has sent all that waited: signals are for Python
    SESSION      number of the client's session, at the worker's side; 0: none
    SIGNAL       the word that goes out; SIGNALS: room for those that come
    HEAD         room for the first part of a message, for who sends it

The row of these words lies in memory of the side's own process, and one thread at a time works on it. What is
in the rings is copied before it is looked at: the peer may scribble over them.
"""

from __future__ import annotations

import errno

from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import load_i64, load_u32, memory_copy, store_u32, store_u64
from danube_fast.frame.system import errno_now, read, write
from danube_fast.ring.atomics import fence, load_relaxed, store_relaxed, store_seq_cst
from danube_fast.ring.doorbell import _cancel_sleep, _clear, _prepare_sleep, _sleep_to_end
from danube_fast.ring.layout import (
    AT_READER_SLEEPING,
    AT_ROOM_ASKED,
    RECORD_HEADER_BYTES,
    RECORD_KIND_SHIFT,
    RECORD_LENGTH_MASK,
    RING_HEADER_BYTES,
    WORD_BYTES,
)
from danube_fast.ring.spsc_kernel import (
    EMPTY,
    FULL,
    _front,
    _publish,
    _readable,
    _release,
    _reserve_one,
    _used,
)

__all__ = [
    "BELL_IN",
    "BELL_OUT",
    "CAPACITY",
    "ENDED",
    "HEAD",
    "HEAD_BYTES_MAX",
    "IN",
    "OTHER",
    "OUT",
    "PAIR_BODY",
    "PAIR_BODY_BYTES",
    "PAIR_HEAD",
    "PAIR_HEAD_BYTES",
    "PAIR_HEAD_BYTES_MAX",
    "PAIR_WORDS",
    "ROW_WORDS",
    "SESSION",
    "SIGNAL",
    "WAITS",
    "answer_room",
    "arm",
    "ask_room",
    "hear",
    "peek_pair",
    "peek_part",
    "push_pair",
    "push_part",
    "release_pair",
    "ring_peer",
    "signal_peer",
    "word_of",
]

IN, OUT, CAPACITY, BELL_OUT, BELL_IN, ROOM_TOLD, ROOM_ASKED, WAITS, SESSION, SIGNAL, HEAD = range(
    11
)
HEAD_BYTES_MAX = 5 * WORD_BYTES
SIGNALS = HEAD + HEAD_BYTES_MAX // WORD_BYTES
_SIGNALS_MAX = 1024
ROW_WORDS = SIGNALS + _SIGNALS_MAX // WORD_BYTES
_AT_SIGNAL, _AT_SIGNALS = SIGNAL * WORD_BYTES, SIGNALS * WORD_BYTES
_EAGAIN, _EINTR = errno.EAGAIN, errno.EINTR
_LENGTH_BYTES = 4
PAIR_HEAD_BYTES, PAIR_BODY, PAIR_BODY_BYTES, PAIR_HEAD = range(0, 4 * WORD_BYTES, WORD_BYTES)
PAIR_HEAD_BYTES_MAX = 2 * WORD_BYTES
PAIR_WORDS = (PAIR_HEAD + PAIR_HEAD_BYTES_MAX) // WORD_BYTES
"""The two parts of a message: how many bytes its head has, where its body is and how many that has, a copy of the head."""
OTHER = -5
ENDED = -1
"""The peer has closed its side."""


@kernel("int64(int64,int64)")
def word_of(row: int, number: int) -> int:
    """Word `number` of a row."""
    word: int = load_i64(row + number * WORD_BYTES)
    return word


@kernel("int64(int64)")
def _signal_peer(row: int) -> int:
    """Wake the peer whatever it says of itself. A full bell has woken it already; the end of the peer shows elsewhere."""
    write(word_of(row, BELL_OUT), row + _AT_SIGNAL, WORD_BYTES)
    return 1


@kernel("int64(int64)")
def _ring_peer(row: int) -> int:
    """Wake the peer if it sleeps; 1 if it was signalled. Behind the release of a record."""
    word = word_of(row, OUT) + AT_READER_SLEEPING
    number = _sleep_to_end(word)
    if number == 0:
        return 0
    _signal_peer(row)
    _clear(word, number)
    return 1


@kernel("int64(int64)")
def _ask_room(row: int) -> int:
    """Say that there was no room, and look again. Its fence pairs with the one in `answer_room`."""
    number = word_of(row, ROOM_ASKED) + 1
    store_u64(row + ROOM_ASKED * WORD_BYTES, number)
    store_relaxed(row + WAITS * WORD_BYTES, 1)
    store_seq_cst(word_of(row, OUT) + AT_ROOM_ASKED, number)
    fence()
    return number


@kernel("int64(int64)")
def _answer_room(row: int) -> int:
    """Signal a peer that has found no room, once half the ring is free. Behind the release of a record."""
    fence()
    ring = word_of(row, IN)
    number = load_relaxed(ring + AT_ROOM_ASKED)
    if number == word_of(row, ROOM_TOLD) or 2 * _used(ring) > word_of(row, CAPACITY):
        return 0
    store_u64(row + ROOM_TOLD * WORD_BYTES, number)
    return _signal_peer(row)


@kernel("int64(int64)")
def _arm(row: int) -> int:
    """Ask the peer to signal what it sends. 0 if there is something already."""
    ring = word_of(row, IN)
    _prepare_sleep(ring + AT_READER_SLEEPING)
    if _readable(ring) != 0:
        _cancel_sleep(ring + AT_READER_SLEEPING)
        return 0
    return 1


@kernel("int64(int64)")
def _disarm(row: int) -> int:
    """Let the peer do without signals again."""
    return _cancel_sleep(word_of(row, IN) + AT_READER_SLEEPING)


@kernel("int64(int64)")
def _hear(row: int) -> int:
    """Take the signals that came through a pipe: how many bytes, or ENDED if the peer has closed its side."""
    count: int = read(word_of(row, BELL_IN), row + _AT_SIGNALS, _SIGNALS_MAX)
    if count > 0:
        return count
    if count == 0:
        return ENDED
    fault = errno_now()
    return 0 if fault in (_EAGAIN, _EINTR) else ENDED


@kernel("int64(int64,int64,int64)")
def _peek(row: int, pair: int, parts: int) -> int:
    """Find the oldest message, if it has so many parts, one or two, and the first is small: what `spsc_kernel` calls it,
    to be released; EMPTY, or OTHER for another message, or a damaged one. Fills the words of `pair`.

    Each length is read once, and the head is copied: the peer may change them meanwhile.
    """
    ring, capacity = word_of(row, IN), word_of(row, CAPACITY)
    found = _front(ring, capacity)
    if found < 0:
        return EMPTY if found == EMPTY else OTHER
    size, start = found & RECORD_LENGTH_MASK, (1 + parts) * _LENGTH_BYTES
    if size < start:
        return OTHER
    record = ring + RING_HEADER_BYTES + RECORD_HEADER_BYTES + (found >> RECORD_KIND_SHIFT)
    count, head_bytes = load_u32(record), load_u32(record + _LENGTH_BYTES)
    body_bytes = load_u32(record + 2 * _LENGTH_BYTES) if parts > 1 else 0
    if count != parts or head_bytes > PAIR_HEAD_BYTES_MAX:
        return OTHER
    if start + head_bytes + body_bytes != size:
        return OTHER
    memory_copy(pair + PAIR_HEAD, record + start, head_bytes)
    store_u64(pair + PAIR_HEAD_BYTES, head_bytes)
    store_u64(pair + PAIR_BODY, record + start + head_bytes)
    store_u64(pair + PAIR_BODY_BYTES, body_bytes)
    return found


@kernel("int64(int64,int64)")
def peek_pair(row: int, pair: int) -> int:
    """Find the oldest message, if it has two parts, as `_peek` does."""
    return _peek(row, pair, 2)


@kernel("int64(int64,int64)")
def peek_part(row: int, pair: int) -> int:
    """Find the oldest message, if it is one part, as `_peek` does: the head of `pair`."""
    return _peek(row, pair, 1)


@kernel("int64(int64,int64)")
def release_pair(row: int, found: int) -> int:
    """Give the message that `_peek` found back to the peer, and tell it of room."""
    _release(word_of(row, IN), word_of(row, CAPACITY), found)
    return _answer_room(row)


@kernel("int64(int64,int64)")
def _reserve(row: int, size: int) -> int:
    """Position of a record of that size, after a complaint if there is no room; or a code of the ring."""
    ring, capacity = word_of(row, OUT), word_of(row, CAPACITY)
    position = _reserve_one(ring, capacity, size)
    if position == FULL:
        _ask_room(row)
        position = _reserve_one(ring, capacity, size)
    return position


@kernel("int64(int64,int64)")
def _place_of(row: int, position: int) -> int:
    """Where the record at a position of the outgoing ring begins."""
    start = word_of(row, OUT) + RING_HEADER_BYTES + RECORD_HEADER_BYTES
    return start + (position & (word_of(row, CAPACITY) - 1))


@kernel("int64(int64,int64,int64)")
def _show(row: int, position: int, size: int) -> int:
    """Let the peer see the record at a position, and wake it; the record's size."""
    _publish(word_of(row, OUT), word_of(row, CAPACITY), position, size)
    _ring_peer(row)
    return size


@kernel("int64(int64,int64,int64)")
def push_part(row: int, part: int, part_bytes: int) -> int:
    """Append a message of one part and wake the peer: its size, or a code of the ring."""
    size = 2 * _LENGTH_BYTES + part_bytes
    position = _reserve(row, size)
    if position < 0:
        return position
    target = _place_of(row, position)
    store_u32(target, 1)
    store_u32(target + _LENGTH_BYTES, part_bytes)
    memory_copy(target + 2 * _LENGTH_BYTES, part, part_bytes)
    return _show(row, position, size)


@kernel("int64(int64,int64,int64,int64,int64)")
def push_pair(row: int, head: int, head_bytes: int, body: int, body_bytes: int) -> int:
    """Append a message of two parts and wake the peer: its size, or a code of the ring."""
    size = 3 * _LENGTH_BYTES + head_bytes + body_bytes
    position = _reserve(row, size)
    if position < 0:
        return position
    target = _place_of(row, position)
    store_u32(target, 2)
    store_u32(target + _LENGTH_BYTES, head_bytes)
    store_u32(target + 2 * _LENGTH_BYTES, body_bytes)
    memory_copy(target + 3 * _LENGTH_BYTES, head, head_bytes)
    memory_copy(target + 3 * _LENGTH_BYTES + head_bytes, body, body_bytes)
    return _show(row, position, size)


signal_peer = direct(_signal_peer)
ring_peer = direct(_ring_peer)
ask_room = direct(_ask_room)
answer_room = direct(_answer_room)
arm = direct(_arm)
hear = direct(_hear)
