"""A frame that arrived for one consumer: what messages and batches of it are views of."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from danube_fast.client.consume.attachment import Attachment, Owner
from danube_fast.client.consume.ranges import Ranges
from danube_fast.client.values.message import Message, Received
from danube_fast.frame.layout import Flag
from danube_fast.frame.view import FrameView

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Delivery"]

_SPLIT = int(Flag.SPLIT)


class Delivery:
    """One received frame. Columns are unpacked when asked for, and then kept."""

    __slots__ = (
        "_columns",
        "_offsets",
        "attachment",
        "base_offset",
        "count",
        "credit",
        "end_offset",
        "flow_id",
        "frame_bytes",
        "generation",
        "is_again",
        "is_dense",
        "number",
        "returned",
        "topic",
        "view",
    )

    def __init__(self, attachment: Attachment, view: FrameView, place: tuple[int, ...]) -> None:
        """`place`: the fields of the frame as `PLACE_FIELDS` has them."""
        self.attachment = attachment
        self.number = attachment.frames_received - 1
        """Which of the frames that the consumer was sent on this partition."""
        self.generation = attachment.generation
        """Which subscription of the attachment it came for; acks of an older one are no-ops."""
        self.credit, self.flow_id = attachment.credit, attachment.flow_id
        """The credit it was taken from; the attachment may have moved when that is given back."""
        self.topic = attachment.topic
        self.view = view
        flags, self.frame_bytes, self.count, _, self.base_offset, span = place
        self.is_dense = not flags & _SPLIT
        """Offsets rise by one (not split by the broker)."""
        self.is_again = not self.is_dense and view.redelivery_counts() is not None
        """Some of its messages were delivered before."""
        self.end_offset: int = self.base_offset + span
        """One past the last offset that the frame stands for."""
        self.returned = 0
        """Messages whose credit has gone back."""
        self._columns: dict[str, Any] = {}
        self._offsets: npt.NDArray[np.int64] | None = None

    @property
    def consumer(self) -> Owner:
        """The consumer that received it."""
        return self.attachment.consumer

    @property
    def producer_name(self) -> str:
        """Name of the producer, if the broker told."""
        return self.attachment.producer_name(self.view.producer_id)

    @property
    def partition(self) -> int | None:
        """Number of the partition; None if the topic has no partitions."""
        return self.attachment.number

    @property
    def publish_time(self) -> int:
        """Nanoseconds since the epoch."""
        return self.view.publish_time_ns

    @property
    def schema(self) -> tuple[int, int] | None:
        """Schema id and version."""
        view = self.view
        return (view.schema_id, view.schema_version) if view.schema_id else None

    def give_credit_back(self, taken: int) -> None:
        """Give back the credit of the first `taken` messages, which were taken or never will be."""
        before = self.returned
        if taken > before:
            self.returned = taken
            size, count = self.frame_bytes, self.count
            size = size * taken // count - size * before // count
            self.credit.take(size, taken - before, self.flow_id)

    # ------------------------------------------------------------ columns

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return the offset of every message, int64."""
        if self._offsets is None:
            self._offsets = self.view.offsets().astype("int64", copy=False)
        return self._offsets

    def offset_list(self, start: int, stop: int) -> range | list[int]:
        """Return the offsets of messages `start` to `stop`."""
        if self.is_dense:
            base = self.base_offset
            return range(base + start, base + stop)
        offsets: list[int] = self.offsets()[start:stop].tolist()
        return offsets

    def column(self, name: str, start: int, stop: int) -> list[Any]:
        """Return a slice of the column that `FrameView` calls `name`."""
        read: Callable[[int, int], list[Any] | None] = getattr(self.view, name)
        values = read(start, stop)
        return [None] * (stop - start) if values is None else values

    def _whole(self, name: str) -> Any:
        values = self._columns.get(name)
        if values is None:
            values = getattr(self.view, name)()
            if values is None:
                values = [None] * self.count
            self._columns[name] = values
        return values

    def key(self, index: int) -> bytes | None:
        """Key of a message."""
        return self._whole("keys")[index]  # type: ignore[no-any-return]

    def attributes_of(self, index: int) -> dict[str, str]:
        """Attributes of a message."""
        if self.count != 1:
            return self._whole("attributes")[index] or {}
        if (found := self._columns.get("attributes")) is None:
            found = self._columns["attributes"] = self.view.first_attributes() or {}
        return found

    def event_time(self, index: int) -> int | None:
        """Event time of a message."""
        return self._whole("event_times")[index]  # type: ignore[no-any-return]

    def sequence(self, index: int) -> int:
        """Sequence of a message."""
        return int(self._whole("sequences")[index])

    def redelivery_count(self, index: int) -> int:
        """Return how often a message was delivered before."""
        counts = self.view.redelivery_counts()
        return 0 if counts is None else int(counts[index])

    def next_part(self, index: int, redelivered_max: int) -> tuple[int, bool]:
        """Number of messages from `index` on that are handed out together, and whether they are redelivered:
        at most `redelivered_max` that come for the second time, or one that was redelivered before."""
        counts = self.view.redelivery_counts()
        if counts is None:
            return self.count - index, False
        first = int(counts[index])
        others = (counts[index:] != first).tolist()
        run = others.index(True) if True in others else len(others)
        return (min(run, redelivered_max if first == 1 else 1), True) if first else (run, False)

    # ------------------------------------------------------------ messages

    def only(self) -> Message:
        """Make the message of a frame that has one."""
        return Received(self, 0, self.view.first_payload(), self.base_offset)

    def messages(self, start: int, stop: int) -> Iterator[Message]:
        """Make messages `start` to `stop` of the frame."""
        payloads = self.view.payloads(start, stop)
        offsets = self.offset_list(start, stop)
        return map(Received, itertools.repeat(self), range(start, stop), payloads, offsets)

    def ranges(self, start: int, stop: int) -> Ranges[int]:
        """Return the offsets of messages `start` to `stop` as flat [start, end) pairs."""
        if self.is_dense:
            base = self.base_offset
            return array("q", (base + start, base + stop))
        return self.view.ranges(start, stop)
