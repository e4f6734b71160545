"""An object of history, byte for byte.

    0      header            64 bytes: which object of which broker
    64     frames            of one partition after the other, back to back, as they stood in the log
    B      table of blocks   80 bytes for each 256 KiB of frames or so, in the order of the frames
    end-64 trailer           64 bytes: where the table is

    header   0      8      12     16         32       40       48            60   64
             +------+------+------+----------+--------+--------+-------------+----+
             | magic| vers | epoch| identity | number | created| zeros       | crc|
             +------+------+------+----------+--------+--------+-------------+----+
    trailer  0      8      12     16         24       32   36                60   64
             +------+------+------+----------+--------+----+-----------------+----+
             | magic| vers | rows | table at | bytes  | crc| zeros           | crc|
             +------+------+------+----------+--------+----+-----------------+----+

`identity` is that of the broker's metadata. `epoch` and `number` are of the uploader and make the key. In
the trailer `bytes` is the size of the whole object, and the crc at 32 covers the table.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from danube_fast.errors import DataLoss
from danube_fast.frame.crc import crc32c
from danube_fast.frame.file_header import FILE_HEADER_BYTES, open_header, seal_header

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_DTYPE",
    "OBJECTS_PREFIX",
    "OBJECT_HEADER_BYTES",
    "TRAILER_BYTES",
    "Blocks",
    "ObjectHeader",
    "Trailer",
    "decode_blocks",
    "object_key",
]

FORMAT_VERSION = 1
OBJECT_MAGIC = int.from_bytes(b"DanubeOb", "little")
TRAILER_MAGIC = int.from_bytes(b"DanubeOt", "little")
OBJECT_HEADER_BYTES = TRAILER_BYTES = FILE_HEADER_BYTES
OBJECTS_PREFIX = "objects/"
BLOCK_BYTES = 256 * 1024
"""A block ends with the frame that makes it as large as this, or with its partition."""

_OBJECT = struct.Struct("<QII16sQq16s")
_TRAILER = struct.Struct("<QIIQQI28s")

BLOCK_DTYPE = np.dtype(
    [
        ("base_offset", "<i8"),
        ("end_offset", "<i8"),
        ("position", "<i8"),
        ("append_min_ns", "<i8"),
        ("append_max_ns", "<i8"),
        ("publish_min_ns", "<i8"),
        ("publish_max_ns", "<i8"),
        ("partition_id", "<u4"),
        ("byte_count", "<u4"),
        ("message_count", "<u4"),
        ("frame_count", "<u4"),
        ("crc", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""One block: whole frames of one partition, at `position` in the object. `crc` covers its bytes."""

Blocks = np.ndarray[Any, np.dtype[Any]]


class ObjectHeader(NamedTuple):
    """The first 64 bytes of an object."""

    identity: bytes
    epoch: int
    number: int
    created_ns: int

    def encode(self) -> bytes:
        """The bytes."""
        return seal_header(
            _OBJECT.pack(
                OBJECT_MAGIC, FORMAT_VERSION, self.epoch, self.identity, self.number,
                self.created_ns, bytes(16),
            )
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, where: str) -> ObjectHeader:
        """Read one. Raises DataLoss, FailedPrecondition."""
        head = open_header(data, OBJECT_MAGIC, FORMAT_VERSION, where)
        _, _, epoch, identity, number, created_ns, _ = _OBJECT.unpack(head)
        return cls(identity, epoch, number, created_ns)


class Trailer(NamedTuple):
    """The last 64 bytes of an object."""

    block_count: int
    blocks_position: int
    object_bytes: int
    blocks_crc: int

    def encode(self) -> bytes:
        """The bytes."""
        return seal_header(
            _TRAILER.pack(
                TRAILER_MAGIC, FORMAT_VERSION, self.block_count, self.blocks_position,
                self.object_bytes, self.blocks_crc, bytes(28),
            )
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, where: str) -> Trailer:
        """Read one. Raises DataLoss, FailedPrecondition."""
        head = open_header(data, TRAILER_MAGIC, FORMAT_VERSION, f"the end of {where}")
        _, _, block_count, position, object_bytes, crc, _ = _TRAILER.unpack(head)
        return cls(block_count, position, object_bytes, crc)


def decode_blocks(data: bytes, crc: int, where: str) -> Blocks:
    """Rows of a table of blocks, or of a part of one. Raises DataLoss if its crc is another."""
    if len(data) % BLOCK_DTYPE.itemsize or crc32c(data) != crc:
        raise DataLoss(f"the table of blocks of {where} is damaged")
    return np.frombuffer(data, BLOCK_DTYPE)


def object_key(epoch: int, number: int) -> str:
    """Key of an object: the epoch of its uploader, and its number there."""
    return f"{OBJECTS_PREFIX}{epoch:08d}/{number:012d}"


def _prove() -> None:
    if _OBJECT.size != FILE_HEADER_BYTES or _TRAILER.size != FILE_HEADER_BYTES:
        raise ImportError("header and trailer of an object do not have 64 bytes")
    if BLOCK_DTYPE.itemsize != 80:
        raise ImportError("a row of the table of blocks does not have 80 bytes")


_prove()
