"""State of a lane: where it stands, what is unacked, and what is open, that is not packed yet.

    plain    payloads that came alone; any thread appends to them without the lock
    batch    behind them, the messages of a batch with columns, callbacks, or calls that wait; under the lock

`plain` is always the same list, so nothing that is appended is lost, whatever is packed meanwhile. The thread that packs
it takes back `is_minded` first. A thread that finds it taken back behind its append has the lane looked after.
"""

from __future__ import annotations

import collections
import enum
import itertools
import operator
from collections.abc import Callable
from typing import Any

from danube_fast.client.link.buffers import Buffer, Sending
from danube_fast.client.produce.frame_limits import FrameLimits
from danube_fast.client.produce.outgoing import Outgoing
from danube_fast.client.produce.state import ProducerState
from danube_fast.client.topics.routes import Partition
from danube_fast.client.values.limits import FRAMES_IN_FLIGHT_MAX, MESSAGE_OVERHEAD_BYTES
from danube_fast.errors import DanubeError

__all__ = ["Change", "LaneState", "Phase", "at_once"]

Change = tuple[Any, ...]
"""A C function and its arguments."""


def at_once(*changes: Change) -> None:
    """Do all of it, or nothing: no signal handler and no other thread comes between C functions that C calls."""
    collections.deque(itertools.starmap(operator.call, changes), maxlen=0)


class Phase(enum.Enum):
    """The phases of a lane, which say what it may do."""

    OPENING = 1
    """Waits for the broker's next sequence; nothing can be packed the first time."""
    FLOWING = 2
    PAUSED = 3
    """A frame was refused: no sends until all on their way are answered and the backoff is over."""
    FAILED = 4
    """Fenced or deleted: nothing goes any more."""


class LaneState:
    """State of one lane. Nothing is open at first."""

    __slots__ = (
        "_measured", "_plain_bytes", "ack_class", "batch", "connection", "failure", "is_minded", "limits", "next_sequence",
        "opened", "parent", "partition_id", "phase", "plain", "producer", "producer_epoch", "producer_id", "topic", "unacked",
    )  # fmt: skip

    def __init__(self, producer: ProducerState, partition: Partition) -> None:
        self.producer = producer
        self.ack_class = producer.ack_class
        self.connection = partition.connection
        self.topic, self.parent = partition.topic, partition.parent
        self.partition_id = partition.partition_id
        self.phase = Phase.OPENING
        self.opened = False
        self.failure: DanubeError | None = None
        self.unacked: collections.deque[Sending] = collections.deque()
        self.next_sequence = 0
        self.producer_id = self.producer_epoch = 0
        self.limits = FrameLimits()
        self.plain: list[bytes | None] = []
        self.batch = Outgoing()
        self.is_minded = False
        """What is appended to `plain` now will be sent without a further word."""
        self._measured = self._plain_bytes = 0
        """How many of `plain` were measured, and what they take."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is open."""
        return not self.plain and not self.batch.payloads

    @property
    def open_messages(self) -> int:
        """How many messages are open."""
        return len(self.plain) + len(self.batch.payloads)

    def measure(self) -> int:
        """Return about how many bytes the open messages take in frames."""
        plain = self.plain
        if self._measured > len(plain):
            self._measured = self._plain_bytes = 0
        more = plain[self._measured :]
        self._measured += len(more)
        self._plain_bytes += sum(map(len, more)) + MESSAGE_OVERHEAD_BYTES * len(more)  # type: ignore[arg-type]
        return self._plain_bytes + self.batch.byte_count

    def first_open(self) -> tuple[Outgoing, Callable[[int], Change]]:
        """Return the messages that go first, and what makes the change that takes so many of them out."""
        if not self.plain:
            return self.batch, self._cut_batch
        outgoing = Outgoing(self.plain)
        outgoing.byte_count = self.measure() - self.batch.byte_count
        return outgoing, self.cut_plain

    def cut_plain(self, count: int) -> Change:
        """Return the change that takes the first of `plain` out."""
        self._measured = self._plain_bytes = 0
        return operator.delitem, self.plain, slice(count)

    def _cut_batch(self, count: int) -> Change:
        batch = self.batch
        is_all = count == len(batch.payloads)
        return setattr, self, "batch", Outgoing() if is_all else batch.part(count)

    def take_open(self) -> tuple[Outgoing, Outgoing]:
        """Take all out."""
        plain, self.plain[:] = Outgoing(self.plain[:]), ()
        batch, self.batch = self.batch, Outgoing()
        return plain, batch

    # ------------------------------------------------------------ what may go

    @property
    def can_pack(self) -> bool:
        """Whether the window has room for one more frame."""
        is_usable = self.opened and self.failure is None and self.producer.window_open
        return is_usable and len(self.unacked) < FRAMES_IN_FLIGHT_MAX

    @property
    def can_pour(self) -> bool:
        """Whether one more frame of many can go on its way at once. What finds the rings full is copied
        once more, to wait for room, so a call that has much to send waits instead."""
        return self.can_pack and self.connection.has_room

    @property
    def joins(self) -> bool:
        """Whether what is open may be packed together with that of other lanes."""
        packer = self.producer.packer
        is_plain = packer.joins and not self.batch.payloads
        is_plain = is_plain and len(self.plain) <= packer.batch_messages
        return is_plain and self.phase is Phase.FLOWING and bool(self.plain)

    def row(self) -> tuple[int, ...]:
        """Return what a kernel must know to pack what is open (`joint.py`)."""
        self.is_minded = False
        return (
            id(self.plain), self.partition_id, self.producer_id, self.producer_epoch, self.next_sequence,
            self.producer.packer.batch_bytes,
        )  # fmt: skip

    def take_buffer(self, byte_count: int) -> Buffer:
        """Return a buffer for a bundle of that many bytes, or more."""
        return self.producer.packer.pool.take(byte_count)
