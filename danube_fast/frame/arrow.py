"""A frame as a `pyarrow.RecordBatch`, without copying a message.

The body's buffers are Arrow buffers already, so the batch is made of pointers into the frame. Only
offset, sequence and publish_time, which the header holds once, are computed. Arrow wants buffers
that start at a multiple of 8: a frame at another address is copied first, whole.

Every batch has the same schema; a column that the frame lacks is all null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import (
    DELTA_BYTES,
    FRAME_ALIGNMENT,
    OFFSET_BYTES,
    TIME_BYTES,
    BufferId,
)
from danube_fast.frame.view import FrameView

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["batch_schema", "import_pyarrow", "to_record_batch", "valid_strings"]


def import_pyarrow() -> Any:
    """Import pyarrow. Raises ImportError that names the extra."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError("Arrow batches need pyarrow: pip install 'danube-fast[arrow]'") from error
    return pa


def batch_schema() -> pa.Schema:
    """Schema of every batch. Raises ImportError if pyarrow is not installed."""
    arrow = import_pyarrow()
    timestamp = arrow.timestamp("ns", tz="UTC")
    return arrow.schema(
        [
            arrow.field("offset", arrow.int64(), nullable=False),
            arrow.field("sequence", arrow.int64(), nullable=False),
            arrow.field("publish_time", timestamp, nullable=False),
            arrow.field("key", arrow.binary()),
            arrow.field("payload", arrow.binary()),
            arrow.field("attributes", arrow.map_(arrow.string(), arrow.string())),
            arrow.field("event_time", timestamp),
            arrow.field("deliver_at", timestamp),
            arrow.field("redelivery_count", arrow.uint32()),
        ]
    )


def valid_strings(strings: pa.StringArray) -> pa.StringArray:
    """Put U+FFFD in place of what is no UTF-8; the same array if all of it is."""
    arrow = import_pyarrow()
    try:
        strings.validate(full=True)
    except arrow.ArrowInvalid:
        raw = strings.view(arrow.binary()).to_pylist()
        return arrow.array([item.decode("utf-8", "replace") for item in raw])
    return strings


class _Body:
    """The buffers of a frame's body as Arrow sees them."""

    __slots__ = ("arrow", "buffer", "count", "view")

    def __init__(self, view: FrameView, arrow: Any) -> None:
        self.arrow = arrow
        self.view = view
        self.count = view.message_count
        memory: Any = view.body_memory()
        if address_of(memory) % FRAME_ALIGNMENT:
            memory = np.array(memory)  # a copy; numpy allocates at multiples of 16
        self.buffer = arrow.py_buffer(memory)  # keeps the memory alive

    def slice(self, buffer_id: int, byte_count: int) -> Any:
        """One buffer; None if the frame lacks it."""
        place = self.view.place(buffer_id)
        return self.buffer.slice(place, byte_count) if place else None

    def validity(self, buffer_id: int) -> Any:
        return self.slice(buffer_id, (self.count + 7) >> 3)

    def byte_strings(self, offsets_id: int, kind: Any, count: int, validity: Any = None) -> Any:
        """A binary or string array over an offsets buffer and the data behind it."""
        offsets = self.slice(offsets_id, OFFSET_BYTES * (count + 1))
        ends = self.view.array(offsets_id, "<i4", count + 1)
        if ends is None:
            return self.arrow.nulls(count, kind)
        data = self.slice(offsets_id + 1, int(ends[-1]))
        return self.arrow.Array.from_buffers(kind, count, [validity, offsets, data])

    def fixed(self, buffer_id: int, kind: Any, item_bytes: int, validity: Any = None) -> Any:
        """Array of fixed-size values; all null if the frame lacks it."""
        values = self.slice(buffer_id, item_bytes * self.count)
        if values is None:
            return self.arrow.nulls(self.count, kind)
        return self.arrow.Array.from_buffers(kind, self.count, [validity, values])

    def _strings(self, offsets_id: int, count: int) -> Any:
        return valid_strings(self.byte_strings(offsets_id, self.arrow.string(), count))

    def attributes(self) -> Any:
        """The map<string, string> array."""
        arrow = self.arrow
        kind = arrow.map_(arrow.string(), arrow.string())
        ends = self.view.array(BufferId.ATTRIBUTE_OFFSETS, "<i4", self.count + 1)
        if ends is None:
            return arrow.nulls(self.count, kind)
        pair_count = int(ends[-1])
        keys = self._strings(BufferId.ATTRIBUTE_KEY_OFFSETS, pair_count)
        values = self._strings(BufferId.ATTRIBUTE_VALUE_OFFSETS, pair_count)
        pairs = arrow.StructArray.from_arrays(
            [keys, values], fields=[kind.key_field, kind.item_field]
        )
        offsets = self.slice(BufferId.ATTRIBUTE_OFFSETS, OFFSET_BYTES * (self.count + 1))
        return arrow.Array.from_buffers(kind, self.count, [None, offsets], children=[pairs])


def to_record_batch(view: FrameView) -> pa.RecordBatch:
    """The frame's messages with the columns of `batch_schema`.

    Shares memory with the view's buffer (or with the decompressed body) and keeps it alive.
    Raises ImportError without pyarrow, DataLoss if the frame is unsound.
    """
    arrow = import_pyarrow()
    schema = batch_schema()
    if not view.body():
        return arrow.RecordBatch.from_pylist([], schema)
    body = _Body(view, arrow)
    timestamp = schema.field("publish_time").type
    publish_times = np.full(body.count, view.publish_time_ns, dtype=np.int64)
    columns = [
        arrow.array(view.offsets()),
        arrow.array(view.sequences()),
        arrow.Array.from_buffers(timestamp, body.count, [None, arrow.py_buffer(publish_times)]),
        body.byte_strings(
            BufferId.KEY_OFFSETS, arrow.binary(), body.count, body.validity(BufferId.KEY_VALIDITY)
        ),
        body.byte_strings(
            BufferId.PAYLOAD_OFFSETS,
            arrow.binary(),
            body.count,
            body.validity(BufferId.PAYLOAD_VALIDITY),
        ),
        body.attributes(),
        body.fixed(
            BufferId.EVENT_TIME, timestamp, TIME_BYTES, body.validity(BufferId.EVENT_TIME_VALIDITY)
        ),
        body.fixed(
            BufferId.DELIVER_AT, timestamp, TIME_BYTES, body.validity(BufferId.DELIVER_AT_VALIDITY)
        ),
        body.fixed(BufferId.REDELIVERY_COUNT, arrow.uint32(), DELTA_BYTES),
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)
