"""Send buffers: memory that a frame is packed into and stays in until it was acked.

    0        8                16                          16 + frame_bytes
    +--------+----------------+---------------------------+---------
    | bundle | entry          | frame                     | unused
    +--------+----------------+---------------------------+---------

A bundle of one frame therefore goes out as one slice, and may go out again. Buffers are reused
last in, first out, so that producers whose acks keep pace stay in the processor's cache. There are
two sizes: a thousand producers with a few messages each must not touch the pages of as many large
ones.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np

from danube_fast.client.values.limits import FOREVER_NS
from danube_fast.errors import DanubeError
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_HEADER_BYTES, BUNDLE_MAGIC

__all__ = ["FRAME_AT", "Buffer", "BufferPool", "Buffers", "Sender", "Sending"]

FRAME_AT = BUNDLE_HEADER_BYTES + BUNDLE_ENTRY_BYTES
_PREFIX = struct.Struct("<IIII")
_SMALL_BYTES = 64 * 1024
_KEPT_BYTES_MAX = 64 * 1024 * 1024
"""Of each size."""


class Buffer:
    """One bundle of one frame."""

    __slots__ = ("address", "capacity_bytes", "memory", "view")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        # not zeroed: a page that no frame reaches is never touched
        self.memory = np.empty(FRAME_AT + capacity_bytes, dtype=np.uint8)
        self.view = self.memory.data
        self.address = address_of(self.memory) + FRAME_AT
        """Where the frame begins."""

    def bundle(self, partition_id: int, frame_bytes: int) -> memoryview:
        """Write the bundle's directory; the bytes to send."""
        _PREFIX.pack_into(self.view, 0, BUNDLE_MAGIC, 1, partition_id, frame_bytes)
        return self.view[: FRAME_AT + frame_bytes]


class BufferPool:
    """Buffers for all producers of a client. Under the pump's lock."""

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes` is what the large ones hold."""
        self.capacity_bytes = capacity_bytes
        self._free: dict[int, list[Buffer]] = {
            min(_SMALL_BYTES, capacity_bytes): [],
            capacity_bytes: [],
        }

    def take(self, byte_count: int) -> Buffer:
        """Return a buffer for a frame of that many bytes, or more."""
        for size, free in self._free.items():
            if byte_count <= size:
                return free.pop() if free else Buffer(size)
        return Buffer(byte_count)

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer that is not read any more."""
        size = buffer.capacity_bytes
        free = self._free.get(size)
        if free is not None and size * len(free) < _KEPT_BYTES_MAX:
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

    def push(self) -> bool:
        """Send the open batch, if there is one, as far as the window allows."""

    def answered(self, sending: Sending, status: int, offset: int, text: str) -> None:
        """Take the broker's answer to one frame."""


class Sending:
    """A packed frame until it is acked or given up."""

    __slots__ = (
        "base_sequence", "buffer", "callbacks", "deadline_ns", "done", "error",
        "frame_bytes", "lane", "message_count", "offset", "publish_time_ns", "refusal", "request",
    )  # fmt: skip

    def __init__(
        self, lane: Sender, buffer: Buffer, frame_bytes: int, base_sequence: int, message_count: int
    ) -> None:
        self.lane = lane
        self.buffer = buffer
        self.frame_bytes = frame_bytes
        self.base_sequence = base_sequence
        self.message_count = message_count
        self.publish_time_ns = 0
        self.deadline_ns = FOREVER_NS
        self.request = 0
        """Request under which it is on its way; 0 = not on its way."""
        self.done = False
        self.offset = -1
        self.refusal: DanubeError | None = None
        """Why the broker did not take it the last time."""
        self.error: DanubeError | None = None
        self.callbacks: list[tuple[int, Any]] | None = None

    def frame(self) -> memoryview:
        """Return the packed frame."""
        return self.buffer.view[FRAME_AT : FRAME_AT + self.frame_bytes]

    def on_published(self, request: int, status: int, offset: int, text: str) -> None:
        """Hand the broker's answer to the lane, unless it is for an earlier request."""
        if request == self.request:
            self.lane.answered(self, status, offset, text)
