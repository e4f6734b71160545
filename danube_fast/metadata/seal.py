"""The seal: a small file outside the metadata's folder that says which metadata belongs here.

    0      8      12     16         32         40          60     64
    +------+------+------+----------+----------+-----------+------+
    | magic| vers |      | identity | revision |           |  crc |   slot 0: even revisions
    +------+------+------+----------+----------+-----------+------+
    the same at 4096                                                  slot 1: odd revisions

It is written after each commit of the store, so a store that is missing, empty, another directory's
or an older backup is told from the one that was acknowledged. Two slots: a write that is torn, or a
flipped byte, leaves the other one. The supervisor puts an empty one into a data directory that has no
logs yet: only there, and where revision 0 is told, may a store be made. The coordinator writes it.
"""

from __future__ import annotations

import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

from danube_fast.descriptors import open_file
from danube_fast.durable import replace_file
from danube_fast.errors import FailedPrecondition
from danube_fast.frame.crc import crc32c

__all__ = ["Seal", "SealFile"]

VERSION = 1
MAGIC = int.from_bytes(b"DanubeMd", "little")
IDENTITY_BYTES = 16
SLOTS = 2
SLOT_DISTANCE_BYTES = 4096
_SLOT = struct.Struct("<QII16sQ20s")
_CRC = struct.Struct("<I")
SLOT_BYTES = _SLOT.size + _CRC.size


class Seal(NamedTuple):
    """Which store, and its newest revision that was acknowledged."""

    identity: bytes
    revision: int

    @classmethod
    def new(cls) -> Seal:
        """Make the seal of a store which is still to be made."""
        return cls(secrets.token_bytes(IDENTITY_BYTES), 0)

    def encode(self) -> bytes:
        """One slot."""
        body = _SLOT.pack(MAGIC, VERSION, 0, self.identity, self.revision, bytes(20))
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Seal | None:
        """A slot; None if it is damaged. Raises FailedPrecondition if its format is newer."""
        if len(data) != SLOT_BYTES:
            return None
        body = data[: _SLOT.size]
        magic, version, _, identity, revision, _ = _SLOT.unpack(body)
        if magic != MAGIC or crc32c(body) != _CRC.unpack(data[_SLOT.size :])[0]:
            return None
        if version > VERSION:
            raise FailedPrecondition(
                f"{path} has format {version} and this version reads up to {VERSION}; start the "
                "newer danube-fast that wrote it"
            )
        return cls(identity, revision)


class SealFile:
    """The seal at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_empty(self) -> bool:
        """Whether it stands there without a word: nothing was acknowledged yet."""
        return self.path.exists() and self.path.stat().st_size == 0

    def read(self) -> Seal | None:
        """The newest sound slot; None if there is no file, or nothing sound in it."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        found = [
            Seal.decode(data[at : at + SLOT_BYTES], self.path)
            for at in (slot * SLOT_DISTANCE_BYTES for slot in range(SLOTS))
        ]
        return max((seal for seal in found if seal), key=lambda seal: seal.revision, default=None)

    def create(self, seal: Seal) -> None:
        """Make it anew, both slots, durably. Raises OSError."""
        slot = seal.encode()
        replace_file(self.path, slot.ljust(SLOT_DISTANCE_BYTES, b"\0"), slot)

    def open(self) -> int:
        """A descriptor for `write`. Raises OSError."""
        return open_file(self.path, os.O_RDWR | os.O_CLOEXEC)

    @staticmethod
    def write(fd: int, seal: Seal) -> None:
        """Replace the older slot, durably. Raises OSError."""
        os.pwrite(fd, seal.encode(), seal.revision % SLOTS * SLOT_DISTANCE_BYTES)
        os.fdatasync(fd)


def _prove() -> None:
    if SLOT_BYTES != 64:
        raise ImportError("a slot of the seal does not have the size that its drawing shows")


_prove()
