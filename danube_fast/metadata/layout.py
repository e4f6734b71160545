"""The layout of metadata in LMDB, byte by byte.

directory/
  lock        flock held by the one process that has the store open
  data.mdb    LMDB, two named databases:

    "store"     b"format"    u32 little-endian, FORMAT_VERSION
                b"revision"  u64 little-endian, revision of the newest change | crc
                b"identity"  16 random bytes, the same as in the seal         | crc
    "entries"   key, UTF-8   -> | revision u64 | flags u32 | crc u32 | value ... |
                                0              8           12        16

crc: crc32c of the key and of the value without the crc itself. LMDB has none.
"""

from __future__ import annotations

import struct

from danube_fast.frame.crc import crc32c

__all__ = [
    "DATA_FILE",
    "ENTRIES_DATABASE",
    "ENTRY_HEADER",
    "FLAG_LEASED",
    "FORMAT",
    "FORMAT_KEY",
    "FORMAT_VERSION",
    "IDENTITY_KEY",
    "LOCK_FILE",
    "REVISION",
    "REVISION_KEY",
    "STORE_DATABASE",
    "decode_entry",
    "encode_entry",
    "guard",
    "unguard",
]

FORMAT_VERSION = 2
"""A store of a newer version is refused; one of the version before is read."""

LOCK_FILE = "lock"
DATA_FILE = "data.mdb"

STORE_DATABASE = b"store"
ENTRIES_DATABASE = b"entries"

FORMAT_KEY = b"format"
FORMAT = struct.Struct("<I")
REVISION_KEY = b"revision"
REVISION = struct.Struct("<Q")
IDENTITY_KEY = b"identity"

ENTRY_HEADER = struct.Struct("<QI")
"""Revision and flags, before the crc and the value; version 1 had no crc."""
CRC = struct.Struct("<I")

FLAG_LEASED = 1
"""The key stands under a lease of the process that wrote it: dropped when the store is opened."""


def guard(key: bytes, value: bytes) -> bytes:
    """A value of the database "store" with its crc."""
    return value + CRC.pack(crc32c(key + value))


def unguard(key: bytes, stored: bytes | memoryview | None) -> bytes | None:
    """The value without its crc; None if it is missing or damaged."""
    data = b"" if stored is None else bytes(stored)
    if len(data) < CRC.size:
        return None
    value = data[: -CRC.size]
    return value if crc32c(key + value) == CRC.unpack(data[-CRC.size :])[0] else None


def encode_entry(key: bytes, revision: int, flags: int, value: bytes) -> bytes:
    """Encode the value that stands under a key."""
    header = ENTRY_HEADER.pack(revision, flags)
    return header + CRC.pack(crc32c(key + header + value)) + value


def decode_entry(key: bytes, stored: bytes | memoryview) -> tuple[int, int, bytes] | None:
    """(revision, flags, value); None if it is damaged."""
    data = bytes(stored)
    start = ENTRY_HEADER.size + CRC.size
    if len(data) < start:
        return None
    header, value = data[: ENTRY_HEADER.size], data[start:]
    if crc32c(key + header + value) != CRC.unpack_from(data, ENTRY_HEADER.size)[0]:
        return None
    revision, flags = ENTRY_HEADER.unpack(header)
    return revision, flags, value


if (FORMAT.size, REVISION.size, ENTRY_HEADER.size, CRC.size) != (4, 8, 12, 4):
    raise ImportError("the metadata layout does not have the sizes that its drawing shows")
