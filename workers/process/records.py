"""Messages between processes, cut into records of a mailbox ring.

A message is a msgpack head and a raw body. One that is larger than a ring record may be is cut into
fragments, which lie in the ring one after another:

      0            4            8
      | flags u32  | head u32   | fragment: bytes of head + body ...
        FIRST, LAST  head_bytes   (head_bytes only in the first fragment, else 0)

The sending process writes, the receiving one reads. A sender that died between two fragments left
a message without its end: the FIRST fragment of its successor throws it away. The successor of a
reader takes up in the middle: fragments without a FIRST before them are thrown away, and the
sender, who sees the new epoch, fails the call.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from danube_fast.errors import InvalidArgument

__all__ = ["MESSAGE_BYTES_MAX", "Assembler", "Envelope", "Head", "Kind", "encode_message", "fragments"]  # fmt: skip

V = TypeVar("V")

PREFIX = struct.Struct("<II")
FIRST = 1
LAST = 2

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Largest message: nothing between processes needs more, and a wild length must not eat memory."""

Parts = tuple[bytes | memoryview, ...]


class Kind(enum.IntEnum):
    """Kind of a message."""

    CALL = 0
    NOTIFY = 1
    REPLY = 2
    ERROR = 3


class Head(msgspec.Struct, Generic[V], array_like=True, frozen=True, gc=False):
    """First part of a message. `value`: an operation, its answer, or the text of an error; raw as it arrives."""

    kind: int
    sender_epoch: int
    target_epoch: int
    request: int
    operation: str
    value: V
    code: int = 0


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A whole message as it arrived."""

    head: Head[msgspec.Raw]
    body: bytes | memoryview


_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head[msgspec.Raw]).decode


def encode_message(head: Head[Any], body: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Encode the two halves of a message. Raises InvalidArgument if it is too large."""
    encoded = _encode_head(head)
    byte_count = len(encoded) + len(body)
    if byte_count > MESSAGE_BYTES_MAX:
        raise InvalidArgument(
            f"a message of {byte_count} bytes between processes is over the limit of "
            f"{MESSAGE_BYTES_MAX}; send it in several parts"
        )
    return encoded, body


def fragments(head: bytes, body: bytes | memoryview, record_bytes_max: int) -> Iterator[Parts]:
    """Cut a message into ring records, tuples of parts, of at most `record_bytes_max` bytes."""
    room = record_bytes_max - PREFIX.size
    if len(head) + len(body) <= room:
        yield PREFIX.pack(FIRST | LAST, len(head)), head, body
        return
    whole = memoryview(b"".join((head, body)))
    for start in range(0, len(whole), room):
        flags = (FIRST if start == 0 else 0) | (LAST if start + room >= len(whole) else 0)
        head_bytes = len(head) if start == 0 else 0
        yield PREFIX.pack(flags, head_bytes), whole[start : start + room]


class Assembler:
    """Put the fragments of one inbound ring together again."""

    __slots__ = ("_byte_count", "_head_bytes", "_parts")

    def __init__(self) -> None:
        self._parts: list[memoryview] = []
        self._head_bytes = self._byte_count = 0

    def feed(self, record: bytes) -> Envelope | None:
        """Take one ring record; the message once it is whole. A damaged record is dropped."""
        if len(record) < PREFIX.size:
            return None
        flags, head_bytes = PREFIX.unpack_from(record)
        part = memoryview(record)[PREFIX.size :]
        if flags & FIRST:
            self._parts.clear()
            self._head_bytes = head_bytes
            self._byte_count = 0
        elif not self._parts:
            return None
        self._parts.append(part)
        self._byte_count += len(part)
        if self._byte_count > MESSAGE_BYTES_MAX:
            self._parts.clear()
            return None
        if not flags & LAST:
            return None
        whole = part if len(self._parts) == 1 else memoryview(b"".join(self._parts))
        self._parts.clear()
        try:
            head = _decode_head(whole[: self._head_bytes])
        except msgspec.MsgspecError:
            return None
        return Envelope(head, whole[self._head_bytes :])
