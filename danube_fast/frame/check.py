"""Is this a frame? The one gate between bytes that anyone may have written and code that trusts them.

`check_frame` reads nothing outside the bytes it is given, whatever they say, and never overflows:
every length is a u32, at most 19 of them are added, and nothing is followed before it was compared
with what is left. What it has accepted, `FrameView`, `split_frame` and the Arrow view read without
looking again.

    header  ->  directory, one entry at a time  ->  which buffers stand together
                  size right for its id?
                  offsets: start at 0, never fall, end at the size of the data behind them?

Faults are negative numbers, because a kernel does not raise.
"""

from __future__ import annotations

import enum
from typing import Self

from danube_fast.frame.crc import crc32c_extend
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import (
    AT_BUFFER_COUNT,
    AT_BUFFER_RESERVED,
    AT_ENTRY_BYTES,
    AT_ENTRY_ID,
    AT_ENTRY_RESERVED,
    BUFFER_DIRECTORY_BYTES,
    BUFFER_ENTRY_BYTES,
    BUFFER_ID_MAX,
    BUFFER_KINDS,
    CLIENT_HALF_BYTES,
    COMPRESSED_BODY_BYTES_MAX,
    DELTA_BYTES,
    FLAG_PAD,
    FLAG_SPLIT,
    FRAME_ALIGNMENT,
    FRAME_MAGIC,
    FRAME_VERSION,
    HEADER_BYTES,
    KIND_ATTRIBUTE_OFFSETS,
    KIND_DATA,
    KIND_DELTAS,
    KIND_OFFSETS,
    KIND_VALIDITY,
    KIND_WORDS,
    OFFSET_BYTES,
    SEQUENCE_MAX,
    TIME_BYTES,
    At,
    BufferId,
    Codec,
)
from danube_fast.frame.memory import load_i32, load_i64, load_u8, load_u16, load_u32

__all__ = [
    "Code",
    "Fault",
    "body_crc",
    "check_body",
    "check_frame",
    "check_header",
    "check_header_crc",
    "describe_fault",
]


class Code(enum.IntEnum):
    """A number that a kernel returns, and what it says."""

    text: str

    def __new__(cls, number: int, text: str = "") -> Self:
        """Make a member of its number and text."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.text = text
        return member


class Fault(Code):
    """Why bytes are not a frame or not a bundle. Negative, so that kernels can return them."""

    TRUNCATED = -1, "fewer bytes are there than the frame needs"
    MAGIC = -2, "the bytes do not begin with the frame magic"
    VERSION = -3, "the frame has a format version that this program does not read; upgrade it"
    CODEC = -4, "the frame names a compression that this program does not know"
    FLAGS = -5, "the frame sets flags that are not allowed here"
    FRAME_BYTES = -6, "frame_bytes is not a multiple of 8 of at least 128"
    MESSAGE_COUNT = -7, "message_count does not fit the frame"
    RAW_BODY_BYTES = -8, "raw_body_bytes does not fit the frame or is over the limit"
    BODY_PADDING = -9, "body_padding is out of range"
    RESERVED = -10, "reserved bytes of the client half are not zero"
    SEQUENCE = -11, "base_sequence is over 2**62 - 1"
    BODY_CRC = -12, "body_crc32c is wrong: the frame was damaged on its way"
    DIRECTORY = -13, "the buffer directory is not ascending or does not fill the body exactly"
    BUFFER_BYTES = -14, "a buffer has a size that does not fit message_count"
    OFFSETS = -15, "an offsets buffer does not start at 0, falls, or does not end at its data"
    NULLS = -16, "a null has a length other than 0"
    COLUMNS = -17, "a buffer is missing, or stands where it may not"
    DELTAS = -18, "offset deltas are not ascending or not below offset_span"
    BUNDLE_MAGIC = -30, "the bytes do not begin with the bundle magic"
    BUNDLE_FRAME_COUNT = -31, "the bundle's directory is empty or longer than the bundle"
    BUNDLE_FRAME_BYTES = -32, "a frame of the bundle is not a multiple of 8 of at least 128 bytes"
    BUNDLE_SUM = -33, "the frames do not fill the bundle exactly"


def describe_fault(code: int) -> str:
    """One sentence for a negative code of the kernels here."""
    try:
        fault = Fault(code)
    except ValueError:
        return f"unknown fault {code}"
    return f"{fault.name}: {fault.text}"


# Plain ints for the kernels.

_RESERVED_A_WORD = CLIENT_HALF_BYTES - 8  # the word whose upper bytes are reserved
_RESERVED_A_SHIFT = 8 * (At.RESERVED_A - _RESERVED_A_WORD)
_CRC_BYTES = 4


def _bits(*buffer_ids: int) -> int:
    return sum(1 << buffer_id for buffer_id in buffer_ids)


_PAYLOAD = _bits(BufferId.PAYLOAD_OFFSETS, BufferId.PAYLOAD_DATA)
_KEYS = _bits(BufferId.KEY_OFFSETS, BufferId.KEY_DATA)
_KEYS_ANY = _KEYS | _bits(BufferId.KEY_VALIDITY, BufferId.KEY_HASH)
_ATTRIBUTES = _bits(
    BufferId.ATTRIBUTE_OFFSETS, BufferId.ATTRIBUTE_KEY_OFFSETS, BufferId.ATTRIBUTE_KEY_DATA,
    BufferId.ATTRIBUTE_VALUE_OFFSETS, BufferId.ATTRIBUTE_VALUE_DATA,
)  # fmt: skip
_EVENT_TIME = _bits(BufferId.EVENT_TIME)
_EVENT_TIME_VALIDITY = _bits(BufferId.EVENT_TIME_VALIDITY)
_DELIVER_AT = _bits(BufferId.DELIVER_AT)
_DELIVER_AT_VALIDITY = _bits(BufferId.DELIVER_AT_VALIDITY)
_OFFSET_DELTA = _bits(BufferId.OFFSET_DELTA)
_SPLIT_ONLY = _bits(BufferId.OFFSET_DELTA, BufferId.SEQUENCE_DELTA, BufferId.REDELIVERY_COUNT)


@kernel("int64(int64,int64)")
def _check_offsets(place: int, count: int) -> int:
    """Last of `count` + 1 int32 offsets if they start at 0 and never fall, else a fault."""
    previous = load_i32(place)
    if previous != 0:
        return Fault.OFFSETS
    fallen = 0
    for index in range(1, count + 1):
        following = load_i32(place + OFFSET_BYTES * index)
        fallen |= following - previous  # negative once anything fell: no branch in the loop
        previous = following
    return Fault.OFFSETS if fallen < 0 else previous


@kernel("int64(int64,int64,int64)")
def _check_nulls(validity: int, offsets: int, count: int) -> int:
    """0 if every null is 0 bytes long."""
    for index in range(count):
        if (load_u8(validity + (index >> 3)) >> (index & 7)) & 1 == 0:
            place = offsets + OFFSET_BYTES * index
            if load_i32(place) != load_i32(place + OFFSET_BYTES):
                return Fault.NULLS
    return 0


@kernel("int64(int64,int64,int64)")
def _check_deltas(place: int, count: int, offset_span: int) -> int:
    """0 if the u32 deltas rise strictly and stay below `offset_span`."""
    previous = -1
    for index in range(count):
        delta = load_u32(place + DELTA_BYTES * index)
        if delta <= previous or delta >= offset_span:
            return Fault.DELTAS
        previous = delta
    return 0


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _check_buffer(
    kind: int, place: int, byte_count: int, count: int, attribute_count: int, data_bytes: int
) -> int:
    """Size and content of one buffer. Returns the last offset of an offsets buffer, else 0."""
    if kind == KIND_DATA:
        return 0 if byte_count == data_bytes else Fault.OFFSETS
    if kind == KIND_OFFSETS:
        if byte_count != OFFSET_BYTES * (count + 1):
            return Fault.BUFFER_BYTES
        return _check_offsets(place, count)
    if kind == KIND_ATTRIBUTE_OFFSETS:
        if byte_count != OFFSET_BYTES * (attribute_count + 1):
            return Fault.BUFFER_BYTES
        return _check_offsets(place, attribute_count)
    if kind == KIND_VALIDITY:
        expected = (count + 7) >> 3
    elif kind == KIND_WORDS:
        expected = TIME_BYTES * count
    else:
        expected = DELTA_BYTES * count
    return 0 if byte_count == expected else Fault.BUFFER_BYTES


@kernel("int64(int64,int64)")
def _check_present(present: int, flags: int) -> int:
    """0 if the buffers whose bits are set may stand together."""
    if present & _PAYLOAD != _PAYLOAD:
        return Fault.COLUMNS
    if present & _KEYS_ANY != 0 and present & _KEYS != _KEYS:
        return Fault.COLUMNS
    if present & _ATTRIBUTES != 0 and present & _ATTRIBUTES != _ATTRIBUTES:
        return Fault.COLUMNS
    if present & _EVENT_TIME_VALIDITY != 0 and present & _EVENT_TIME == 0:
        return Fault.COLUMNS
    if present & _DELIVER_AT_VALIDITY != 0 and present & _DELIVER_AT == 0:
        return Fault.COLUMNS
    if flags & FLAG_SPLIT != 0:
        return 0 if present & _OFFSET_DELTA != 0 else Fault.COLUMNS
    return 0 if present & _SPLIT_ONLY == 0 else Fault.COLUMNS


@kernel("int64(int64,int64,int64,int64,int64)")
def check_body(body: int, body_bytes: int, count: int, flags: int, offset_span: int) -> int:
    """Check an uncompressed body of `body_bytes` bytes that holds `count` messages: 0 or a fault."""
    if body_bytes < BUFFER_DIRECTORY_BYTES:
        return Fault.DIRECTORY
    buffers = load_u32(body + AT_BUFFER_COUNT)
    end = body + body_bytes
    place = body + BUFFER_DIRECTORY_BYTES + BUFFER_ENTRY_BYTES * buffers
    if buffers > BUFFER_ID_MAX or place > end or load_u32(body + AT_BUFFER_RESERVED) != 0:
        return Fault.DIRECTORY
    entry = body + BUFFER_DIRECTORY_BYTES
    present, previous, data_bytes, attributes, nulls = 0, 0, 0, 0, 0
    for _ in range(buffers):
        buffer_id = load_u16(entry + AT_ENTRY_ID)
        byte_count = load_u32(entry + AT_ENTRY_BYTES)
        if buffer_id <= previous or buffer_id > BUFFER_ID_MAX:
            return Fault.DIRECTORY
        if byte_count > end - place or load_u16(entry + AT_ENTRY_RESERVED) != 0:
            return Fault.DIRECTORY
        kind = BUFFER_KINDS[buffer_id]
        code = _check_buffer(kind, place, byte_count, count, attributes, data_bytes)
        if code == 0 and kind == KIND_DELTAS:
            code = _check_deltas(place, count, offset_span)
        if code < 0:
            return code
        if nulls != 0 and kind == KIND_OFFSETS and _check_nulls(nulls, place, count) != 0:
            return Fault.NULLS
        if buffer_id == BufferId.ATTRIBUTE_OFFSETS:
            attributes = code
        data_bytes = code
        nulls = place if kind == KIND_VALIDITY else 0
        present |= 1 << buffer_id
        previous = buffer_id
        place += (byte_count + FRAME_ALIGNMENT - 1) & -FRAME_ALIGNMENT
        entry += BUFFER_ENTRY_BYTES
    return _check_present(present, flags) if place == end else Fault.DIRECTORY


@kernel("int64(int64,int64,int64)")
def check_header(address: int, available_bytes: int, allowed_flags: int) -> int:
    """Check the client half of a header: frame_bytes if it is sound and all there, else a fault."""
    if available_bytes < HEADER_BYTES:
        return Fault.TRUNCATED
    if load_u32(address + At.MAGIC) != FRAME_MAGIC:
        return Fault.MAGIC
    if load_u8(address + At.VERSION) != FRAME_VERSION:
        return Fault.VERSION
    codec = load_u8(address + At.CODEC)
    if codec > Codec.ZSTD:
        return Fault.CODEC
    flags = load_u16(address + At.FLAGS)
    if flags & ~allowed_flags != 0:
        return Fault.FLAGS
    frame_bytes = load_u32(address + At.FRAME_BYTES)
    if frame_bytes < HEADER_BYTES or frame_bytes & (FRAME_ALIGNMENT - 1) != 0:
        return Fault.FRAME_BYTES
    if frame_bytes > available_bytes:
        return Fault.TRUNCATED
    count = load_u32(address + At.MESSAGE_COUNT)
    if (count == 0) != (flags & FLAG_PAD != 0):
        return Fault.MESSAGE_COUNT
    if load_i64(address + _RESERVED_A_WORD) >> _RESERVED_A_SHIFT != 0:
        return Fault.RESERVED
    base_sequence = load_i64(address + At.BASE_SEQUENCE)
    if base_sequence < 0 or base_sequence > SEQUENCE_MAX:
        return Fault.SEQUENCE
    return frame_bytes


@kernel("int64(int64,int64)")
def body_crc(address: int, frame_bytes: int) -> int:
    """crc32c of the client half without the crc itself, and of the body."""
    crc = crc32c_extend(0, address, At.BODY_CRC32C)
    rest = At.BODY_CRC32C + _CRC_BYTES
    crc = crc32c_extend(crc, address + rest, CLIENT_HALF_BYTES - rest)
    return crc32c_extend(crc, address + HEADER_BYTES, frame_bytes - HEADER_BYTES)


@kernel("int64(int64)")
def check_header_crc(address: int) -> int:
    """1 if header_crc32c of the 128 bytes at `address` is right, else 0."""
    return (
        1
        if crc32c_extend(0, address, At.HEADER_CRC32C) == load_u32(address + At.HEADER_CRC32C)
        else 0
    )


@kernel("int64(int64,int64,int64,int64)")
def check_frame(address: int, available_bytes: int, allowed_flags: int, check_body_crc: int) -> int:
    """Check one frame of at most `available_bytes` bytes: frame_bytes if it is sound, else a fault.

    `allowed_flags` are the `Flag` bits it may carry. `check_body_crc` 1 also compares body_crc32c;
    header_crc32c is not looked at (see `check_header_crc`). Of a compressed body only the size is
    checked, of a PAD frame only the header. The bytes must not change while this runs.
    """
    frame_bytes = check_header(address, available_bytes, allowed_flags)
    if frame_bytes < 0:
        return frame_bytes
    flags = load_u16(address + At.FLAGS)
    if flags & FLAG_PAD != 0:
        return frame_bytes
    raw_bytes = load_u32(address + At.RAW_BODY_BYTES)
    padding = load_u8(address + At.BODY_PADDING)
    body_bytes = frame_bytes - HEADER_BYTES - padding
    plain = load_u8(address + At.CODEC) == Codec.NONE
    if padding >= FRAME_ALIGNMENT or body_bytes <= 0 or (plain and padding != 0):
        return Fault.BODY_PADDING
    if raw_bytes != body_bytes if plain else raw_bytes > COMPRESSED_BODY_BYTES_MAX:
        return Fault.RAW_BODY_BYTES
    count = load_u32(address + At.MESSAGE_COUNT)
    if not plain and count * OFFSET_BYTES > raw_bytes:  # each message has a payload offset
        return Fault.MESSAGE_COUNT
    if check_body_crc != 0 and body_crc(address, frame_bytes) != load_u32(address + At.BODY_CRC32C):
        return Fault.BODY_CRC
    if plain:
        span = load_u32(address + At.OFFSET_SPAN)
        fault = check_body(address + HEADER_BYTES, body_bytes, count, flags, span)
        if fault != 0:
            return fault
    return frame_bytes
