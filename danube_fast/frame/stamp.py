"""Writes the broker's half of a header, and the two checksums.

`seal` is the client's last act on a frame, `stamp` the broker's. Both write in place.

    client: pack -> seal:   client half + body_crc32c over bytes 0-19, 24-63 and the body
    broker: check -> stamp: broker half + header_crc32c over bytes 0-123

A stamp leaves the client half and the body alone, so the client's crc still proves the message
bytes at the consumer. No argument is checked: callers pass values in the range of their field.
"""

from __future__ import annotations

from danube_fast.frame.check import body_crc
from danube_fast.frame.crc import crc32c_extend
from danube_fast.frame.kernel import kernel
from danube_fast.frame.layout import FLAG_PAD, FRAME_MAGIC, FRAME_VERSION, HEADER_BYTES, At, Codec
from danube_fast.frame.memory import (
    load_u32,
    memory_zero,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
)

__all__ = ["reseal", "seal", "stamp", "write_pad"]


@kernel("void(int64,int64,int64,int64,int64,int64,int64)")
def seal(
    address: int,
    producer_id: int,
    base_sequence: int,
    publish_time_ns: int,
    producer_epoch: int,
    schema_id: int,
    schema_version: int,
) -> None:
    """Finish the client half of a packed frame and write body_crc32c."""
    store_u64(address + At.PRODUCER_ID, producer_id)
    store_u64(address + At.BASE_SEQUENCE, base_sequence)
    store_u64(address + At.PUBLISH_TIME_NS, publish_time_ns)
    store_u32(address + At.PRODUCER_EPOCH, producer_epoch)
    store_u32(address + At.SCHEMA_ID, schema_id)
    store_u16(address + At.SCHEMA_VERSION, schema_version)
    store_u32(address + At.BODY_CRC32C, body_crc(address, load_u32(address + At.FRAME_BYTES)))


@kernel("void(int64,int64,int64,int64,int64,int64,int64,int64,int64)")
def stamp(
    address: int,
    log_id: int,
    log_position: int,
    base_offset: int,
    append_time_ns: int,
    synced_position: int,
    partition_id: int,
    epoch: int,
    offset_span: int,
) -> None:
    """Write the broker half of a frame and header_crc32c."""
    store_u64(address + At.LOG_ID, log_id)
    store_u64(address + At.LOG_POSITION, log_position)
    store_u64(address + At.BASE_OFFSET, base_offset)
    store_u64(address + At.APPEND_TIME_NS, append_time_ns)
    store_u64(address + At.SYNCED_POSITION, synced_position)
    store_u32(address + At.PARTITION_ID, partition_id)
    store_u32(address + At.EPOCH, epoch)
    store_u32(address + At.OFFSET_SPAN, offset_span)
    store_u32(address + At.RESERVED_B, 0)
    store_u32(address + At.RESERVED_C, 0)
    store_u32(address + At.HEADER_CRC32C, crc32c_extend(0, address, At.HEADER_CRC32C))


@kernel("void(int64)")
def reseal(address: int) -> None:
    """Write both crcs of a frame that the broker made from another one."""
    store_u32(address + At.BODY_CRC32C, body_crc(address, load_u32(address + At.FRAME_BYTES)))
    store_u32(address + At.HEADER_CRC32C, crc32c_extend(0, address, At.HEADER_CRC32C))


@kernel("void(int64,int64)")
def write_pad(address: int, frame_bytes: int) -> None:
    """Write the client half of a PAD frame of `frame_bytes` bytes; its body is left as it is.

    The caller stamps it. Only the 128 header bytes are written.
    """
    memory_zero(address, HEADER_BYTES)
    store_u32(address + At.MAGIC, FRAME_MAGIC)
    store_u8(address + At.VERSION, FRAME_VERSION)
    store_u8(address + At.CODEC, Codec.NONE)
    store_u16(address + At.FLAGS, FLAG_PAD)
    store_u32(address + At.FRAME_BYTES, frame_bytes)
