"""The frame and the bundle: every byte of them, drawn and proved at import.

A frame carries one or more messages of one partition. The same bytes travel in a ZeroMQ part, lie
in a shared-memory ring, stand in the write-ahead log and in a history object.

      0        8        16       24       32       40       48       56      64
      +--------+--------+--------+--------+--------+--------+--------+-------+
  0   | magic  | bytes  | raw    | producer_id     | publish_time_ns | schema|  client half
      | v c fl | count  | crc    |        | base_seq|        |epoch,id|version|
      +--------+--------+--------+--------+--------+--------+--------+-------+
  64  | log_id | log_pos| base_of| append_t| synced | part,ep| span    | crc  |  broker half
      +--------+--------+--------+--------+--------+--------+--------+-------+
  128 | body: buffer directory, then the buffers, each padded with zeros to 8 bytes |

The client half is written by the packer of the frame and is covered, with the body, by
`body_crc32c`. The broker half is stamped by the partition's owner; `header_crc32c` covers bytes
0 to 123. All integers are little-endian. A frame is always a multiple of 8 bytes long.

Body (of the uncompressed frame):

    u32 buffer_count | u32 reserved
    buffer_count x ( u16 buffer_id | u16 reserved | u32 buffer_bytes )   ascending buffer_id
    buffers in the same order; each starts at a multiple of 8 and is padded with zeros

so the place of a buffer is a prefix sum over the directory: buffers cannot overlap or lie outside
the body. With codec lz4 or zstd the whole body is compressed; `body_padding` says how many of the
frame's last bytes are padding.

A bundle is a directory and frames back to back:

    u32 magic | u32 frame_count
    frame_count x ( u32 partition_id | u32 frame_bytes )
    frames
"""

from __future__ import annotations

import enum

import numpy as np

__all__ = [
    "BUNDLE_ENTRY_BYTES",
    "BUNDLE_HEADER_BYTES",
    "BUNDLE_MAGIC",
    "CONTROL_PARTITION_ID",
    "FRAME_ALIGNMENT",
    "FRAME_BYTES_CAP",
    "FRAME_MAGIC",
    "FRAME_OVERHEAD_BYTES",
    "FRAME_VERSION",
    "HEADER_BYTES",
    "HEADER_DTYPE",
    "BufferId",
    "Codec",
    "Flag",
    "message_frame_bytes_max",
    "padded",
]

FRAME_MAGIC = 0x4652_4644  # b"DFRF" in the file
FRAME_VERSION = 1
HEADER_BYTES = 128
FRAME_ALIGNMENT = 8
FRAME_BYTES_CAP = 1024 * 1024
"""Largest frame that carries more than one message, bytes. One message alone may be larger."""
FRAME_OVERHEAD_BYTES = 1024
"""Room for header, directories and padding beside the messages of a frame."""

BUNDLE_MAGIC = 0x4E42_4644  # b"DFBN"
BUNDLE_HEADER_BYTES = 8
BUNDLE_ENTRY_BYTES = 8

CONTROL_PARTITION_ID = 0
"""The reserved partition of every log: its frames are the log's own state."""


class Codec(enum.IntEnum):
    """Compression of a frame's body."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


class Flag(enum.IntFlag):
    """Bits of the header's `flags`. A client may set DELAYED, and none of the others."""

    SPLIT = 1
    """Made by the broker from another frame: carries offset deltas, crc of the body by the broker."""
    CONTROL = 2
    """A frame of the reserved partition; its payloads are msgpack records."""
    PAD = 4
    """Fills the log up to the next group; message_count is 0, the body is not read."""
    DELAYED = 8
    """Some messages have a deliver-at time that the broker waits for."""


class BufferId(enum.IntEnum):
    """Buffers of a body, in the order in which they stand. Each is an Arrow buffer."""

    PAYLOAD_VALIDITY = 1
    PAYLOAD_OFFSETS = 2
    PAYLOAD_DATA = 3
    KEY_VALIDITY = 4
    KEY_OFFSETS = 5
    KEY_DATA = 6
    KEY_HASH = 7
    ATTRIBUTE_OFFSETS = 8
    ATTRIBUTE_KEY_OFFSETS = 9
    ATTRIBUTE_KEY_DATA = 10
    ATTRIBUTE_VALUE_OFFSETS = 11
    ATTRIBUTE_VALUE_DATA = 12
    EVENT_TIME_VALIDITY = 13
    EVENT_TIME = 14
    DELIVER_AT_VALIDITY = 15
    DELIVER_AT = 16
    OFFSET_DELTA = 17
    SEQUENCE_DELTA = 18
    REDELIVERY_COUNT = 19


BUFFER_DIRECTORY_BYTES = 8
BUFFER_ENTRY_BYTES = 8
BUFFER_ID_MAX = int(max(BufferId))

AT_BUFFER_COUNT = 0
"""Inside the body: number of entries of the buffer directory, u32."""
AT_BUFFER_RESERVED = 4
AT_ENTRY_ID = 0
"""Inside a directory entry: buffer id, u16."""
AT_ENTRY_RESERVED = 2
AT_ENTRY_BYTES = 4

AT_BUNDLE_FRAME_COUNT = 4
"""Inside a bundle: number of frames, u32; the magic stands before it."""
AT_BUNDLE_ENTRY_PARTITION_ID = 0
AT_BUNDLE_ENTRY_FRAME_BYTES = 4

OFFSET_BYTES = 4
"""One entry of an Arrow offsets buffer: int32."""
HASH_BYTES = 8
TIME_BYTES = 8
DELTA_BYTES = 4

BODY_BYTES_MAX = 0x7FFF_FF00
"""Largest uncompressed body, bytes: Arrow offsets are int32."""
COMPRESSED_BODY_BYTES_MAX = 128 * 1024 * 1024
"""Largest uncompressed body of a compressed frame, bytes: bounds what a reader may be made to
allocate by a short frame."""
SEQUENCE_MAX = (1 << 62) - 1
"""Sequences and offsets stay below 2**62, so that kernels may add counts to them in int64."""

HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("codec", "u1"),
        ("flags", "<u2"),
        ("frame_bytes", "<u4"),
        ("message_count", "<u4"),
        ("raw_body_bytes", "<u4"),
        ("body_crc32c", "<u4"),
        ("producer_id", "<u8"),
        ("base_sequence", "<u8"),
        ("publish_time_ns", "<i8"),
        ("producer_epoch", "<u4"),
        ("schema_id", "<u4"),
        ("schema_version", "<u2"),
        ("body_padding", "u1"),
        ("reserved_a", "u1", (5,)),
        ("log_id", "<u8"),
        ("log_position", "<u8"),
        ("base_offset", "<u8"),
        ("append_time_ns", "<i8"),
        ("synced_position", "<u8"),
        ("partition_id", "<u4"),
        ("epoch", "<u4"),
        ("offset_span", "<u4"),
        ("reserved_b", "<u4"),
        ("reserved_c", "<u4"),
        ("header_crc32c", "<u4"),
    ]
)


class At(enum.IntEnum):
    """Where each field of the header stands, bytes."""

    MAGIC = 0
    VERSION = 4
    CODEC = 5
    FLAGS = 6
    FRAME_BYTES = 8
    MESSAGE_COUNT = 12
    RAW_BODY_BYTES = 16
    BODY_CRC32C = 20
    PRODUCER_ID = 24
    BASE_SEQUENCE = 32
    PUBLISH_TIME_NS = 40
    PRODUCER_EPOCH = 48
    SCHEMA_ID = 52
    SCHEMA_VERSION = 56
    BODY_PADDING = 58
    RESERVED_A = 59
    LOG_ID = 64
    LOG_POSITION = 72
    BASE_OFFSET = 80
    APPEND_TIME_NS = 88
    SYNCED_POSITION = 96
    PARTITION_ID = 104
    EPOCH = 108
    OFFSET_SPAN = 112
    RESERVED_B = 116
    RESERVED_C = 120
    HEADER_CRC32C = 124


CLIENT_HALF_BYTES = 64

# As plain ints, which Python combines faster than flags.
FLAG_SPLIT = int(Flag.SPLIT)
FLAG_CONTROL = int(Flag.CONTROL)
FLAG_PAD = int(Flag.PAD)
FLAG_DELAYED = int(Flag.DELAYED)
ALL_FLAGS = FLAG_SPLIT | FLAG_CONTROL | FLAG_PAD | FLAG_DELAYED
CLIENT_FLAGS = FLAG_DELAYED
"""What a frame may carry that comes from a client."""

KIND_VALIDITY = 1
"""Bitmap, ceil(n / 8) bytes."""
KIND_OFFSETS = 2
"""int32[n + 1] into the buffer behind it."""
KIND_ATTRIBUTE_OFFSETS = 3
"""int32[m + 1] into the data behind it, where m pairs are the last of ATTRIBUTE_OFFSETS."""
KIND_DATA = 4
"""As many bytes as the last offset before it says."""
KIND_WORDS = 5
"""8 bytes a message."""
KIND_HALVES = 6
"""4 bytes a message."""
KIND_DELTAS = 7
"""u32[n], strictly rising, below offset_span."""

_KIND_OF = {
    BufferId.PAYLOAD_VALIDITY: KIND_VALIDITY,
    BufferId.PAYLOAD_OFFSETS: KIND_OFFSETS,
    BufferId.PAYLOAD_DATA: KIND_DATA,
    BufferId.KEY_VALIDITY: KIND_VALIDITY,
    BufferId.KEY_OFFSETS: KIND_OFFSETS,
    BufferId.KEY_DATA: KIND_DATA,
    BufferId.KEY_HASH: KIND_WORDS,
    BufferId.ATTRIBUTE_OFFSETS: KIND_OFFSETS,
    BufferId.ATTRIBUTE_KEY_OFFSETS: KIND_ATTRIBUTE_OFFSETS,
    BufferId.ATTRIBUTE_KEY_DATA: KIND_DATA,
    BufferId.ATTRIBUTE_VALUE_OFFSETS: KIND_ATTRIBUTE_OFFSETS,
    BufferId.ATTRIBUTE_VALUE_DATA: KIND_DATA,
    BufferId.EVENT_TIME_VALIDITY: KIND_VALIDITY,
    BufferId.EVENT_TIME: KIND_WORDS,
    BufferId.DELIVER_AT_VALIDITY: KIND_VALIDITY,
    BufferId.DELIVER_AT: KIND_WORDS,
    BufferId.OFFSET_DELTA: KIND_DELTAS,
    BufferId.SEQUENCE_DELTA: KIND_HALVES,
    BufferId.REDELIVERY_COUNT: KIND_HALVES,
}
BUFFER_KINDS = (0, *(_KIND_OF[buffer_id] for buffer_id in BufferId))
"""Kind of each buffer, by its id."""


def padded(byte_count: int) -> int:
    """`byte_count` rounded up to the frame alignment of 8."""
    return (byte_count + FRAME_ALIGNMENT - 1) & -FRAME_ALIGNMENT


def message_frame_bytes_max(message_bytes_max: int) -> int:
    """Largest frame of one message, uncompressed, with its key and attributes, where a payload may have
    `message_bytes_max` bytes. Client and broker have their limits from here."""
    return message_bytes_max + FRAME_OVERHEAD_BYTES


def _prove() -> None:
    places = {name.upper(): place[1] for name, place in (HEADER_DTYPE.fields or {}).items()}
    if places != {at.name: at for at in At}:
        raise ImportError("the fields of HEADER_DTYPE do not stand where `At` says")
    if [int(buffer_id) for buffer_id in BufferId] != list(range(1, BUFFER_ID_MAX + 1)):
        raise ImportError("buffer ids are not 1, 2, 3, ... in order; BUFFER_KINDS needs that")
    if HEADER_DTYPE.itemsize != HEADER_BYTES:
        raise ImportError(f"frame header is {HEADER_DTYPE.itemsize} bytes, not {HEADER_BYTES}")


_prove()
