"""Frames that were packed before, published as they are: each at the sequence that its caller has planned for it.

    ready frame --copied, sealed--> lane --> PUBLISH

A producer of messages gives up what is refused, and numbers what is behind it anew. Here a sequence says which frame
it is, also to the next process that goes on with the rest: so the first error ends all, and no number ever changes.
"""

from __future__ import annotations

from typing import ClassVar, cast

from danube_fast.client.link.buffers import FRAME_AT, Buffer, BufferPool, Buffers, Sending
from danube_fast.client.link.steps import Steps
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.outgoing import Outgoing, Packer
from danube_fast.client.produce.producers import Producers
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.produce.state import Remedies
from danube_fast.client.topics.routes import Partition, Routes, Topic
from danube_fast.client.values.options import ProducerOptions
from danube_fast.errors import AlreadyExists, DanubeError, DataLoss
from danube_fast.frame.layout import Codec

__all__ = ["FramePublisher", "open_frames_steps"]

_NOTHING = Outgoing()
_ASK_AGAIN = "the next try asks the broker what it has"


class _FramePacker(Packer):
    """Hands out the ready frame that was set."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(pool, Codec.NONE)
        self.frame: bytes | memoryview = b""
        self.message_count = 0

    def pack(self, outgoing: Outgoing, start: int) -> tuple[Buffer, int, int]:
        """Copy the frame: (buffer, frame_bytes, message_count)."""
        size = len(self.frame)
        buffer = self.pool.take(size)
        buffer.view[FRAME_AT : FRAME_AT + size] = self.frame
        return buffer, size, self.message_count


class _FixedLane(Lane):
    """A lane that fails where another one would give its frames new numbers."""

    __slots__ = ("_is_numbered",)

    def __init__(self, producer: FramePublisher, partition: Partition, *, is_joining: bool) -> None:
        self._is_numbered = False
        super().__init__(producer, partition, is_joining=is_joining)

    def _number_from(self, sequence: int) -> None:
        first = self.unacked[0].base_sequence if self.unacked else self.next_sequence
        if self._is_numbered and sequence != first:
            self.fail(
                DataLoss(
                    f"{self.topic} has lost messages that it had acked: the next one of {self.producer.name!r} was "
                    f"{first} and is {sequence} now"
                )
            )
            return
        self._is_numbered = True
        super()._number_from(sequence)


class FramePublisher(Publisher):
    """A producer of ready frames. Under one name each sequence stands for one frame, for all processes."""

    __slots__ = ("_ready",)
    remedies: ClassVar[Remedies] = Remedies(_ASK_AGAIN, _ASK_AGAIN, _ASK_AGAIN)

    def __init__(
        self, routes: Routes, buffers: Buffers, route: Topic, name: str, options: ProducerOptions
    ) -> None:
        super().__init__(routes, buffers, route, name, options)
        self.packer = self._ready = _FramePacker(buffers.pool(options.batch_bytes))

    def make_lane(self, partition: Partition, *, is_joining: bool = False) -> Lane:
        """Make the lane of a partition."""
        return _FixedLane(self, partition, is_joining=is_joining)

    def send_frame_steps(self, lane: Lane, frame: bytes | memoryview, count: int) -> Steps[None]:
        """Send a frame of `count` messages in a lane, which numbers it next; wait for room in the window.

        Raises what went wrong with any frame before, ResourceExhausted if there is no room for the producer's timeout.
        """
        deadline_ns = self.pump.clock.monotonic_ns() + self.timeout_ns
        while True:
            with self._lock:
                self._raise_errors()
                if lane.failure is not None:
                    raise lane.failure
                if lane.can_pour:
                    self._ready.frame, self._ready.message_count = frame, count
                    lane.pack(_NOTHING, 0)
                    self._ready.frame = b""
                    self.pump.try_drain()
                    return
            yield from self._room(lane, deadline_ns)

    def completed(self, topic: str, sending: Sending) -> None:
        """Lane: release a frame that is acked or given up; one that is given up ends all."""
        if isinstance(sending.error, AlreadyExists):
            sending.error = None  # accepted before, too long ago to name its offset
        super().completed(topic, sending)
        if sending.error is not None:
            self._fail(sending.error)

    def _fail(self, error: DanubeError) -> None:
        for lane in (*self.lanes, *self.joining):
            lane.fail(error)


def open_frames_steps(
    producers: Producers, topic: str, name: str, timeout: float
) -> Steps[FramePublisher]:
    """Open a producer of ready frames on a topic that exists. `timeout`: seconds for each frame. Raises as
    `Producers.open_steps`."""
    publisher = yield from producers.open_steps(
        topic, name=name, must_exist=True, timeout=timeout, kind=FramePublisher
    )
    return cast("FramePublisher", publisher)
