"""Kernels that read a log: which bytes are frames of it, in strict order, and what they say.

Three questions, asked of bytes in memory:
  scan_frames    from here on, which frames follow each other without a hole?   (replay, index)
  find_evidence  is there anything behind the cut that proves more was synced?  (recovery)
  check_run      are these bytes what the index says they are?                  (reading)

A frame is accepted only at its own log_position, with this log's id, an epoch not lower than the
one before and both checksums right, so stale frames of a recycled segment and leftovers of a torn
group are never taken. State goes in and out through an int64 array, the `STATE_*` words.
"""

from __future__ import annotations

from danube_fast.frame.check import Code, body_crc, check_header_crc
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import (
    FLAG_PAD,
    FRAME_ALIGNMENT,
    FRAME_MAGIC,
    FRAME_VERSION,
    HEADER_BYTES,
    At,
)
from danube_fast.frame.memory import (
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    load_word,
    store_u32,
    store_u64,
    store_word,
)
from danube_fast.wal.layout import (
    GROUP_ALIGNMENT,
    ROW_APPEND_TIME_NS,
    ROW_BASE_OFFSET,
    ROW_BASE_SEQUENCE,
    ROW_BYTES,
    ROW_EPOCH,
    ROW_FLAGS,
    ROW_FRAME_BYTES,
    ROW_MESSAGE_COUNT,
    ROW_OFFSET_SPAN,
    ROW_PARTITION_ID,
    ROW_POSITION,
    ROW_PRODUCER_EPOCH,
    ROW_PRODUCER_ID,
)

__all__ = ["ScanCode", "check_run", "describe_scan", "find_evidence", "find_next", "scan_frames"]


class ScanCode(Code):
    """How a scan ended. Negative: the bytes at the current position are not a frame of this log."""

    END = 0
    MORE = 1
    ROWS_FULL = 2
    MAGIC = -1, "there is no frame"
    HEADER_CRC = -2, "the crc of the frame's header is wrong"
    VERSION = -3, "the frame's format version is newer than this program"
    LOG_ID = -4, "the frame belongs to another log"
    POSITION = -5, "the frame was written for another position (left by a recycled segment)"
    EPOCH = -6, "the frame is of an earlier epoch (left by a torn group)"
    LENGTH = -7, "the frame's length does not fit the segment"
    BODY_CRC = -8, "the crc of the frame's body is wrong"
    TRUNCATED = -9, "the file ends inside the frame or in front of it"
    PARTITION = -10, "the frame is of another partition than the index says"
    MISSING = -11, "a segment is missing"


def describe_scan(code: int) -> str:
    """One clause that says what is wrong at the position where a scan stopped."""
    return ScanCode(code).text or "nothing is wrong"


# Words of the state array.
STATE_POSITION = 0  # in and out: position of the next frame
STATE_END = 1  # in: where the segment ends
STATE_LOG_ID = 2  # in
STATE_EPOCH = 3  # in and out: epoch of the last frame taken
STATE_SYNCED = 4  # in and out: largest synced_position seen
STATE_ROWS = 5  # out: rows written
STATE_ROWS_MAX = 6  # in
STATE_NEEDED = 7  # out with MORE: bytes that the next frame needs
STATE_CHECK_BODIES = 8  # in: 1 to check body_crc32c
STATE_WORDS = 9


@kernel("int64(int64,int64,int64)")
def check_own(address: int, position: int, log_id: int) -> int:
    """frame_bytes if a sound header of this log for exactly this position is here, else a fault."""
    if load_u32(address + At.MAGIC) != FRAME_MAGIC:
        return ScanCode.MAGIC
    if check_header_crc(address) == 0:
        return ScanCode.HEADER_CRC
    if load_i64(address + At.LOG_ID) != log_id:
        return ScanCode.LOG_ID
    if load_i64(address + At.LOG_POSITION) != position:
        return ScanCode.POSITION
    if load_u8(address + At.VERSION) != FRAME_VERSION:
        return ScanCode.VERSION
    frame_bytes = load_u32(address + At.FRAME_BYTES)
    if frame_bytes < HEADER_BYTES or frame_bytes & (FRAME_ALIGNMENT - 1) != 0:
        return ScanCode.LENGTH
    return frame_bytes


@kernel("void(int64,int64)")
def _write_row(row: int, address: int) -> None:
    """Copy what replay needs from the header at `address` into a REPLAY_DTYPE row."""
    store_u64(row + ROW_POSITION, load_i64(address + At.LOG_POSITION))
    store_u64(row + ROW_BASE_OFFSET, load_i64(address + At.BASE_OFFSET))
    store_u64(row + ROW_PRODUCER_ID, load_i64(address + At.PRODUCER_ID))
    store_u64(row + ROW_BASE_SEQUENCE, load_i64(address + At.BASE_SEQUENCE))
    store_u64(row + ROW_APPEND_TIME_NS, load_i64(address + At.APPEND_TIME_NS))
    store_u32(row + ROW_PARTITION_ID, load_u32(address + At.PARTITION_ID))
    store_u32(row + ROW_OFFSET_SPAN, load_u32(address + At.OFFSET_SPAN))
    store_u32(row + ROW_MESSAGE_COUNT, load_u32(address + At.MESSAGE_COUNT))
    store_u32(row + ROW_FRAME_BYTES, load_u32(address + At.FRAME_BYTES))
    store_u32(row + ROW_PRODUCER_EPOCH, load_u32(address + At.PRODUCER_EPOCH))
    store_u32(row + ROW_EPOCH, load_u32(address + At.EPOCH))
    store_u64(row + ROW_FLAGS, load_u16(address + At.FLAGS))


@kernel("int64(int64,int64,int64)")
def _judge(state: int, address: int, available: int) -> int:
    """frame_bytes if the next frame of the scan is at `address`, MORE below 128 bytes, or a fault."""
    position = load_word(state, STATE_POSITION)
    remaining = load_word(state, STATE_END) - position
    if remaining < HEADER_BYTES:
        return ScanCode.LENGTH
    if available < HEADER_BYTES:
        store_word(state, STATE_NEEDED, HEADER_BYTES)
        return ScanCode.MORE
    frame_bytes = check_own(address, position, load_word(state, STATE_LOG_ID))
    if frame_bytes < 0:
        return frame_bytes
    if load_u32(address + At.EPOCH) < load_word(state, STATE_EPOCH):
        return ScanCode.EPOCH
    if frame_bytes > remaining:
        return ScanCode.LENGTH
    if load_u16(address + At.FLAGS) & FLAG_PAD != 0:
        return frame_bytes
    if frame_bytes > available:
        store_word(state, STATE_NEEDED, frame_bytes)
        return ScanCode.MORE
    check = load_word(state, STATE_CHECK_BODIES) != 0
    if check and body_crc(address, frame_bytes) != load_u32(address + At.BODY_CRC32C):
        return ScanCode.BODY_CRC
    return frame_bytes


@kernel("int64(int64,int64,int64,int64)", nogil=True)
def scan_frames(state: int, address: int, available: int, rows: int) -> int:
    """Take frames from `address` on until something stops it; returns a ScanCode.

    `state` is the address of STATE_WORDS int64 words, `rows` of room for STATE_ROWS_MAX rows of
    REPLAY_DTYPE. END: the segment's end was reached. MORE: the bytes end inside a frame; read on
    from STATE_POSITION, at least STATE_NEEDED bytes. Nothing outside `available` is read.
    """
    start = load_word(state, STATE_POSITION)
    rows_max = load_word(state, STATE_ROWS_MAX)
    position, count = start, 0
    code: int = ScanCode.END
    while position != load_word(state, STATE_END):
        if count == rows_max:
            code = ScanCode.ROWS_FULL
            break
        here = address + position - start
        frame_bytes = _judge(state, here, available - (position - start))
        if frame_bytes < HEADER_BYTES:
            code = frame_bytes
            break
        if load_u16(here + At.FLAGS) & FLAG_PAD == 0:
            _write_row(rows + ROW_BYTES * count, here)
            count += 1
        store_word(state, STATE_EPOCH, load_u32(here + At.EPOCH))
        synced = load_i64(here + At.SYNCED_POSITION)
        if synced > load_word(state, STATE_SYNCED):
            store_word(state, STATE_SYNCED, synced)
        position += frame_bytes
        store_word(state, STATE_POSITION, position)
    store_word(state, STATE_ROWS, count)
    return code


# Words of the evidence array.
EVIDENCE_SYNCED = 0  # largest synced_position of any valid header
EVIDENCE_EPOCH = 1  # largest epoch
EVIDENCE_FIRST = 2  # position of the first valid header, -1 if none
EVIDENCE_WORDS = 3


@kernel("void(int64,int64,int64,int64,int64)", nogil=True)
def find_evidence(evidence: int, address: int, available: int, position: int, log_id: int) -> None:
    """Look for own headers at `position` and every 4096 after it; adds to the evidence words.

    `evidence` is the address of EVIDENCE_WORDS int64 words.
    """
    at = 0
    while at + HEADER_BYTES <= available:
        here = address + at
        if check_own(here, position + at, log_id) > 0:
            synced = load_i64(here + At.SYNCED_POSITION)
            if synced > load_word(evidence, EVIDENCE_SYNCED):
                store_word(evidence, EVIDENCE_SYNCED, synced)
            epoch = load_u32(here + At.EPOCH)
            if epoch > load_word(evidence, EVIDENCE_EPOCH):
                store_word(evidence, EVIDENCE_EPOCH, epoch)
            if load_word(evidence, EVIDENCE_FIRST) < 0:
                store_word(evidence, EVIDENCE_FIRST, position + at)
        at += GROUP_ALIGNMENT


@kernel("int64(int64,int64,int64,int64,int64)", nogil=True)
def find_next(address: int, available: int, position: int, log_id: int, epoch: int) -> int:
    """How far behind `address` the first own header is that is not older than `epoch`; -1 if none.

    Looks at every 4096th byte, as groups start there.
    """
    at = 0
    while at + HEADER_BYTES <= available:
        here = address + at
        if check_own(here, position + at, log_id) > 0 and load_u32(here + At.EPOCH) >= epoch:
            return at
        at += GROUP_ALIGNMENT
    return -1


@kernel("int64(int64,int64,int64,int64,int64)", nogil=True)
def check_run(state: int, address: int, byte_count: int, position: int, partition_id: int) -> int:
    """Number of frames if the bytes are whole frames of one partition from `position` on.

    Else a fault, with the position it was met at in STATE_POSITION. STATE_LOG_ID is read.
    """
    at, count = 0, 0
    log_id = load_word(state, STATE_LOG_ID)
    while at < byte_count:
        here = address + at
        store_word(state, STATE_POSITION, position + at)
        if byte_count - at < HEADER_BYTES:
            return ScanCode.LENGTH
        frame_bytes = check_own(here, position + at, log_id)
        if frame_bytes < 0:
            return frame_bytes
        if frame_bytes > byte_count - at:
            return ScanCode.LENGTH
        if load_u32(here + At.PARTITION_ID) != partition_id:
            return ScanCode.PARTITION
        if body_crc(here, frame_bytes) != load_u32(here + At.BODY_CRC32C):
            return ScanCode.BODY_CRC
        at += frame_bytes
        count += 1
    return count
