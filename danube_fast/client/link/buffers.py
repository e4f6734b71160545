"""Send buffers: memory that a frame is packed into and stays in until it was acked.

    0        8                16                          16 + frame_bytes
    +--------+----------------+---------------------------+---------
    | bundle | entry          | frame                     | unused
    +--------+----------------+---------------------------+---------

A bundle of one frame therefore goes out as one slice, and may go out again. One of many lanes (`joint.py`) fills a
buffer from its beginning, and each of its frames may go out again by itself. Buffers are reused
last in, first out, so that producers whose acks keep pace stay in the processor's cache. There are
two sizes: a thousand producers with a few messages each must not touch the pages of as many large
ones.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from danube_fast.client.values.limits import FOREVER_NS
from danube_fast.errors import DanubeError
from danube_fast.frame.columns import OneMessage
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_HEADER_BYTES, BUNDLE_MAGIC

__all__ = ["FRAME_AT", "Buffer", "BufferPool", "Buffers", "Sender", "Sending"]

FRAME_AT = BUNDLE_HEADER_BYTES + BUNDLE_ENTRY_BYTES
_PREFIX = struct.Struct("<IIII")
_SMALL_BYTES = 64 * 1024
_KEPT_BYTES_MAX = 64 * 1024 * 1024
"""Of each size."""


class Buffer:
    """One bundle."""

    __slots__ = ("address", "capacity_bytes", "frames_left", "memory", "view")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        # not zeroed: a page that no frame reaches is never touched
        self.memory = np.empty(FRAME_AT + capacity_bytes, dtype=np.uint8)
        self.view = self.memory.data
        self.address = address_of(self.memory) + FRAME_AT
        """Where the frame begins, if there is one."""
        self.frames_left = 1
        """Frames in it that are neither acked nor given up."""

    def bundle(self, partition_id: int, frame_bytes: int) -> memoryview:
        """Write the bundle's directory; the bytes to send."""
        _PREFIX.pack_into(self.view, 0, BUNDLE_MAGIC, 1, partition_id, frame_bytes)
        return self.view[: FRAME_AT + frame_bytes]


class BufferPool:
    """Buffers for all producers of a client. Under the pump's lock."""

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes` is what the large ones hold."""
        self.capacity_bytes = capacity_bytes
        self.one = OneMessage()
        """For what is packed alone."""
        self._small_bytes = min(_SMALL_BYTES, capacity_bytes)
        self._small: list[Buffer] = []
        self._large: list[Buffer] = []

    def take(self, byte_count: int) -> Buffer:
        """Return a buffer for a frame of that many bytes, or more."""
        if byte_count <= self._small_bytes:
            return self._small.pop() if self._small else Buffer(self._small_bytes)
        if byte_count <= self.capacity_bytes:
            return self._large.pop() if self._large else Buffer(self.capacity_bytes)
        return Buffer(byte_count)

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer, when the last of its frames is not read any more."""
        if buffer.frames_left > 1:
            buffer.frames_left -= 1
            return
        size = buffer.capacity_bytes
        if size == self._small_bytes:
            free = self._small
        elif size == self.capacity_bytes:
            free = self._large
        else:  # larger than any batch, or of a pool of another size: frames of several producers share a buffer
            return
        if size * len(free) < _KEPT_BYTES_MAX:
            free.append(buffer)


class Buffers:
    """The pools of one client, by the size of a batch. Under the pump's lock."""

    def __init__(self) -> None:
        self._pools: dict[int, BufferPool] = {}

    def pool(self, batch_bytes: int) -> BufferPool:
        """Return the buffers for batches of that size."""
        pool = self._pools.get(batch_bytes)
        if pool is None:
            pool = self._pools[batch_bytes] = BufferPool(batch_bytes)
        return pool


class Sender(Protocol):
    """A lane, as the link sees it: one producer on one partition."""

    @property
    def partition_id(self) -> int:
        """The partition that its frames go to."""

    @property
    def ack_class(self) -> str:
        """Frames with the same are acked at the same moment."""

    @property
    def next_sequence(self) -> int:
        """The sequence of the next message that is packed."""

    @property
    def joins(self) -> bool:
        """Whether what is open may be packed together with that of other lanes."""

    @property
    def can_pack(self) -> bool:
        """Whether the window has room for one more frame."""

    def row(self) -> Sequence[int]:
        """Return what a kernel must know to pack what is open (`joint.py`)."""

    def take_buffer(self, byte_count: int) -> Buffer:
        """Return a buffer for a bundle of that many bytes, or more."""

    def packed(self, sending: Sending, now_ns: int) -> None:
        """Take a frame with the first of what is open as unacked, and on its way."""

    def push(self) -> bool:
        """Send what is open, if anything is, as far as the window allows."""

    def push_soon(self) -> None:
        """Send what is open, now or when all answers are read that are being read."""

    def answered(self, sending: Sending, status: int, offset: int, text: str) -> None:
        """Take the broker's answer to one frame."""

    def acked(self, sending: Sending, offset: int) -> None:
        """Take the answer that a frame is stored."""


class Sending(msgspec.Struct, eq=False):
    """A packed frame until it is acked or given up."""

    lane: Sender
    buffer: Buffer
    frame_bytes: int
    base_sequence: int
    message_count: int
    callbacks: list[tuple[int, Any]] | None = None
    """Of messages in it, with their places."""
    request: int = 0
    """Request under which it is on its way; 0 = not on its way."""
    publish_time_ns: int = 0
    deadline_ns: int = FOREVER_NS
    frame_at: int = FRAME_AT
    """Where in the buffer the frame begins."""
    done: bool = False
    offset: int = -1
    refusal: DanubeError | None = None
    """Why the broker did not take it the last time."""
    error: DanubeError | None = None

    @property
    def address(self) -> int:
        """Where the frame begins."""
        return self.buffer.address + self.frame_at - FRAME_AT

    def frame(self) -> memoryview:
        """Return the packed frame."""
        return self.buffer.view[self.frame_at : self.frame_at + self.frame_bytes]

    def stand_alone(self, pool: BufferPool) -> None:
        """Move the frame into a buffer of its own: it may stay for long, and those of others shall not stay with it."""
        shared, own = self.buffer, pool.take(self.frame_bytes)
        own.view[FRAME_AT : FRAME_AT + self.frame_bytes] = self.frame()
        self.buffer, self.frame_at = own, FRAME_AT
        pool.give_back(shared)
