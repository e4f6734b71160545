"""Headers of files and objects: 64 bytes, of which three fields never move.

    0      8      12                                                    60   64
    +------+------+-----------------------------------------------------+----+
    | magic| vers | fields of this kind and version                     | crc|
    +------+------+-----------------------------------------------------+----+

So an older program can tell a newer format from damage.
"""

from __future__ import annotations

import struct

from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.frame.crc import crc32c

__all__ = ["FILE_HEADER_BYTES", "open_header", "seal_header"]

FILE_HEADER_BYTES = 64
_CRC_AT = 60
_VERSION_AT = 8
_WORD = struct.Struct("<I")


def seal_header(head: bytes) -> bytes:
    """`head` with its crc in the last four bytes."""
    return head[:_CRC_AT] + _WORD.pack(crc32c(head[:_CRC_AT]))


def open_header(data: bytes, magic: int, version_max: int, what: str, remedy: str = "") -> bytes:
    """The 64 bytes of a header that is whole and of a known version.

    Raises DataLoss if it is damaged, with `remedy`, FailedPrecondition if its format is newer.
    """
    head = bytes(data[:FILE_HEADER_BYTES])
    if (
        len(head) < FILE_HEADER_BYTES
        or int.from_bytes(head[:_VERSION_AT], "little") != magic
        or crc32c(head[:_CRC_AT]) != _WORD.unpack_from(head, _CRC_AT)[0]
    ):
        raise DataLoss(f"the header of {what} is damaged{remedy and f'; {remedy}'}")
    (version,) = _WORD.unpack_from(head, _VERSION_AT)
    if version > version_max:
        raise FailedPrecondition(
            f"{what} has format version {version}, this program reads up to {version_max}: "
            "start the newer danube-fast that wrote it"
        )
    return head
