"""Small records that a store keeps whole: a header tells what they are and in which format, and has their crc.

magic u64 | format version u32 | crc32c of the body u32 | bytes of the body u32 | 0 u32 | body
"""

from __future__ import annotations

import struct

from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.frame.crc import crc32c

__all__ = ["HEADER_BYTES", "seal", "unseal"]

_HEADER = struct.Struct("<QIIII")
HEADER_BYTES = _HEADER.size


def seal(magic: int, version: int, body: bytes) -> bytes:
    """Put the header before a body."""
    return _HEADER.pack(magic, version, crc32c(body), len(body), 0) + body


def unseal(data: bytes, magic: int, version: int, where: str, noun: str) -> bytes:
    """Check a record, and give its body.

    `version`: the newest that is read; `where` and `noun`: of errors, such as its key and "manifest". Raises DataLoss if
    it is damaged or something else, FailedPrecondition if its format is newer.
    """
    if len(data) < HEADER_BYTES:
        raise DataLoss(f"{where} has {len(data)} bytes, which is no {noun}")
    found, format_version, crc, size, _ = _HEADER.unpack_from(data)
    body = data[HEADER_BYTES:]
    if found != magic:
        raise DataLoss(f"{where} is no {noun}")
    if format_version > version:
        raise FailedPrecondition(
            f"{where} has format {format_version} and this version reads up to {version}; start the newer danube-fast "
            "that wrote it"
        )
    if len(body) != size or crc32c(body) != crc:
        raise DataLoss(f"{where} is damaged: its crc is wrong")
    return body
