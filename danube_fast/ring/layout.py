"""Shared memory between processes: the ring, the control block and the counters, drawn and proved.

A line is 128 bytes (two cache lines: adjacent-line prefetch) and has one writer, named here. All
words are signed 64-bit, little-endian, at multiples of 8.

Ring: one memory region per ordered pair of processes.

        0                8                16
        +----------------+----------------+---
  0     | version word   | capacity_bytes |         creator; the version word is stored last
        +----------------+----------------+---
  128   | tail           | cached_head    | room asked      producer
        +----------------+----------------+---
  256   | head           | cached_tail    |         consumer
        +----------------+----------------+---
  384   | sleeping word  | sleep_count    |         consumer sets, producer clears
        +----------------+----------------+---
  512   | data, capacity_bytes, a power of two                                       |

  room asked and the sleeping word are for the rings of a `Duplex`; other rings have a doorbell of
  their own and leave them 0. A producer without room stores a number there that was not there before.

  tail and head are positions: they only grow; position & (capacity - 1) is the place in the data.
  A record never wraps; a pad record fills the end of the data instead.

  record    u32 length | u32 kind | payload, padded to 8        length does not count the header

  A record exists once the tail has passed it, and is free once the head has passed it. So at every
  instant what lies in [head, tail) is whole, whichever side dies.

Control block: a header line, then one slot of four lines per process.

  line 0    status word | pid                              the process itself
            status word = epoch u32 << 32 | port u16 << 16 | state u16: read together, so one word
  line 1    heartbeat_count, heartbeat_time_ns, ...        the process: a pair per thread
  line 2    restarts                                       the supervisor
  line 3    sleeping word | sleep_count                    the process sets, any peer clears

Counter block: a header line, then COUNTERS_PER_PROCESS words per process, which the process writes.
"""

from __future__ import annotations

import enum

__all__ = [
    "CONTROL_VERSION_WORD",
    "COUNTERS_PER_PROCESS",
    "COUNTER_VERSION_WORD",
    "HEARTBEATS_PER_PROCESS",
    "LINE_BYTES",
    "RECORD_HEADER_BYTES",
    "RING_CAPACITY_BYTES_MAX",
    "RING_CAPACITY_BYTES_MIN",
    "RING_HEADER_BYTES",
    "RING_VERSION_WORD",
    "RecordKind",
    "control_bytes",
    "counter_bytes",
    "record_bytes",
    "record_payload_bytes_max",
    "ring_bytes",
]

LINE_BYTES = 128
WORD_BYTES = 8

# ---------------------------------------------------------------- ring

RING_MAGIC = 0x4752_4644  # b"DFRG" in memory
RING_VERSION = 1
RING_VERSION_WORD = RING_VERSION << 32 | RING_MAGIC

AT_VERSION = 0
AT_CAPACITY = 8
AT_TAIL = LINE_BYTES
AT_CACHED_HEAD = LINE_BYTES + 8
AT_ROOM_ASKED = LINE_BYTES + 16
AT_HEAD = 2 * LINE_BYTES
AT_CACHED_TAIL = 2 * LINE_BYTES + 8
AT_READER_SLEEPING = 3 * LINE_BYTES
AT_READER_SLEEP_COUNT = 3 * LINE_BYTES + 8
RING_HEADER_BYTES = 4 * LINE_BYTES

RING_CAPACITY_BYTES_MIN = 64
RING_CAPACITY_BYTES_MAX = 1 << 30
"""Place and length of a record travel in one int64, 32 bits each."""

RECORD_HEADER_BYTES = 8
RECORD_ALIGNMENT = 8
RECORD_KIND_SHIFT = 32
RECORD_LENGTH_MASK = (1 << RECORD_KIND_SHIFT) - 1


class RecordKind(enum.IntEnum):
    """Kinds of record."""

    DATA = 0
    PAD = 1
    """Fills the data up to its end; carries nothing."""


RECORD_DATA = int(RecordKind.DATA)
RECORD_PAD = int(RecordKind.PAD)


def record_bytes(payload_bytes: int) -> int:
    """Bytes that a record of `payload_bytes` takes in the ring."""
    return RECORD_HEADER_BYTES + ((payload_bytes + RECORD_ALIGNMENT - 1) & -RECORD_ALIGNMENT)


def record_payload_bytes_max(capacity_bytes: int) -> int:
    """Largest payload of a ring: with half of it, a record and the pad before it always fit."""
    return capacity_bytes // 2 - RECORD_HEADER_BYTES


def ring_bytes(capacity_bytes: int) -> int:
    """Memory that a ring of `capacity_bytes` (a power of two) needs."""
    return RING_HEADER_BYTES + capacity_bytes


# ---------------------------------------------------------------- control block

CONTROL_MAGIC = 0x4C43_4644  # b"DFCL"
CONTROL_VERSION = 1
CONTROL_VERSION_WORD = CONTROL_VERSION << 32 | CONTROL_MAGIC
CONTROL_HEADER_BYTES = LINE_BYTES
CONTROL_SLOT_BYTES = 4 * LINE_BYTES

AT_PROCESS_COUNT = 8

AT_STATUS = 0
AT_PID = 8
AT_HEARTBEAT = LINE_BYTES
HEARTBEAT_BYTES = 16
HEARTBEATS_PER_PROCESS = LINE_BYTES // HEARTBEAT_BYTES
AT_RESTARTS = 2 * LINE_BYTES
AT_SLEEPING = 3 * LINE_BYTES
AT_SLEEP_COUNT = 3 * LINE_BYTES + 8

STATUS_EPOCH_SHIFT = 32
STATUS_PORT_SHIFT = 16
STATUS_STATE_MASK = 0xFFFF
STATUS_PORT_MASK = 0xFFFF
STATUS_EPOCH_MAX = (1 << 31) - 1

# ---------------------------------------------------------------- counters

BUCKET_ROWS = 1 << 16
BUCKET_ROW_BYTES = 32
AT_BUCKET_KEY = 0
AT_BUCKET_MESSAGES = 8
"""Until when the messages that were taken are paid for, monotonic ns; bytes likewise."""
AT_BUCKET_BYTES = 16
AT_BUCKET_LEVEL = 24
"""A number that is set, beside the two of a rate."""
BUCKET_TABLE_BYTES = BUCKET_ROWS * BUCKET_ROW_BYTES

COUNTER_MAGIC = 0x4E43_4644  # b"DFCN"
COUNTER_VERSION = 1
COUNTER_VERSION_WORD = COUNTER_VERSION << 32 | COUNTER_MAGIC
COUNTER_HEADER_BYTES = LINE_BYTES
COUNTERS_PER_PROCESS = 128
COUNTER_SLOT_BYTES = COUNTERS_PER_PROCESS * WORD_BYTES


def control_bytes(process_count: int) -> int:
    """Memory of a control block for `process_count` processes."""
    return CONTROL_HEADER_BYTES + process_count * CONTROL_SLOT_BYTES


def counter_bytes(process_count: int) -> int:
    """Memory of a counter block for `process_count` processes."""
    return COUNTER_HEADER_BYTES + process_count * COUNTER_SLOT_BYTES


# ---------------------------------------------------------------- proof

_RING_WORDS = {
    "version": (AT_VERSION, "creator"),
    "capacity_bytes": (AT_CAPACITY, "creator"),
    "tail": (AT_TAIL, "producer"),
    "cached_head": (AT_CACHED_HEAD, "producer"),
    "room_asked": (AT_ROOM_ASKED, "producer"),
    "head": (AT_HEAD, "consumer"),
    "cached_tail": (AT_CACHED_TAIL, "consumer"),
    "sleeping": (AT_READER_SLEEPING, "consumer and producer"),
    "sleep_count": (AT_READER_SLEEP_COUNT, "consumer and producer"),
}
_SLOT_WORDS = {
    "status": (AT_STATUS, "process"),
    "pid": (AT_PID, "process"),
    "heartbeats": (AT_HEARTBEAT, "process, any thread"),
    "restarts": (AT_RESTARTS, "supervisor"),
    "sleeping": (AT_SLEEPING, "process and peers"),
    "sleep_count": (AT_SLEEP_COUNT, "process and peers"),
}


def _prove_words(name: str, words: dict[str, tuple[int, str]], byte_count: int) -> None:
    writers: dict[int, str] = {}
    taken: set[int] = set()
    for word, (at, writer) in words.items():
        if at % WORD_BYTES or at in taken or not 0 <= at <= byte_count - WORD_BYTES:
            raise ImportError(f"{name} word {word} at {at} overlaps, is unaligned or lies outside")
        taken.add(at)
        if writers.setdefault(at // LINE_BYTES, writer) != writer:
            raise ImportError(f"{name} word {word}: its line has another writer than {writer}")


def _prove() -> None:
    _prove_words("ring", _RING_WORDS, RING_HEADER_BYTES)
    _prove_words("control slot", _SLOT_WORDS, CONTROL_SLOT_BYTES)
    sizes = {
        "ring header": RING_HEADER_BYTES,
        "control header": CONTROL_HEADER_BYTES,
        "control slot": CONTROL_SLOT_BYTES,
        "counter header": COUNTER_HEADER_BYTES,
        "counter slot": COUNTER_SLOT_BYTES,
    }
    for name, byte_count in sizes.items():
        if byte_count % LINE_BYTES:
            raise ImportError(f"{name} of {byte_count} bytes is no multiple of {LINE_BYTES}")
    for capacity in (RING_CAPACITY_BYTES_MIN, RING_CAPACITY_BYTES_MAX):
        largest = record_bytes(record_payload_bytes_max(capacity))
        if capacity & (capacity - 1) or 2 * largest > capacity:
            raise ImportError(f"ring capacity {capacity}: a record of {largest} and a pad can wrap")
    if RECORD_HEADER_BYTES != RECORD_ALIGNMENT:
        raise ImportError("a pad record must fit wherever a record does not")
    if RING_CAPACITY_BYTES_MAX > RECORD_LENGTH_MASK >> 1:
        raise ImportError("place and length of a record no longer fit one int64")
    if AT_READER_SLEEP_COUNT - AT_READER_SLEEPING != AT_SLEEP_COUNT - AT_SLEEPING:
        raise ImportError("the doorbell's two words lie apart in one place and not in the other")
    if len({RING_VERSION_WORD, CONTROL_VERSION_WORD, COUNTER_VERSION_WORD}) != 3:
        raise ImportError("two kinds of shared memory have the same version word")


_prove()
