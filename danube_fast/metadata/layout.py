"""What stands in the LMDB home of metadata, byte by byte.

directory/
  lock        flock held by the one process that has the store open
  data.mdb    LMDB, two named databases:

    "store"     b"format"    u32 little-endian, FORMAT_VERSION
                b"revision"  u64 little-endian, revision of the newest change
    "entries"   key, UTF-8   -> | revision u64 | flags u32 | value ... |
                                0              8           12
"""

from __future__ import annotations

import struct

__all__ = [
    "DATA_FILE",
    "ENTRIES_DATABASE",
    "ENTRY_HEADER",
    "FLAG_LEASED",
    "FORMAT",
    "FORMAT_KEY",
    "FORMAT_VERSION",
    "LOCK_FILE",
    "REVISION",
    "REVISION_KEY",
    "STORE_DATABASE",
]

FORMAT_VERSION = 1
"""A store of a newer version is refused; one of the version before is read."""

LOCK_FILE = "lock"
DATA_FILE = "data.mdb"

STORE_DATABASE = b"store"
ENTRIES_DATABASE = b"entries"

FORMAT_KEY = b"format"
FORMAT = struct.Struct("<I")
REVISION_KEY = b"revision"
REVISION = struct.Struct("<Q")

ENTRY_HEADER = struct.Struct("<QI")
"""Revision and flags, before the value."""

FLAG_LEASED = 1
"""The key stands under a lease of the process that wrote it: dropped when the store is opened."""

if (FORMAT.size, REVISION.size, ENTRY_HEADER.size) != (4, 8, 12):
    raise ImportError("the metadata layout does not have the sizes that its drawing shows")
