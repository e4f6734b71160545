"""The messages of many frames as columns of one Arrow table.

    for table in tables(memory, low, high):       frames back to back, only offsets from low to below high
        table.offsets(), table.payloads(), ...    pyarrow arrays of table.row_count rows

Only what is asked for is copied. A frame alone has `arrow.to_record_batch`, which copies nothing; with frames of few
messages it costs more than this, for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from danube_fast.errors import DataLoss
from danube_fast.frame.arrow import import_pyarrow, valid_strings
from danube_fast.frame.check import describe_fault
from danube_fast.frame.columns import array_address
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import At, BufferId
from danube_fast.frame.table_kernels import (
    Entry,
    Listing,
    Sum,
    fill_attributes,
    fill_bits,
    fill_bytes,
    fill_event_times,
    fill_numbers,
    fill_publish_times,
    list_frames,
    measure,
)
from danube_fast.frame.view import FrameView

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FrameTable", "producer_ids", "tables"]

ROWS_MAX = 64 * 1024
"""Of a table, if its first frame has no more."""
BYTES_MAX = 32 * 1024 * 1024
"""Bytes of uncompressed bodies in a table, if its first frame has no more."""
ENTRIES_MAX = 4096
"""Frames of a table."""
INT64_MAX = (1 << 63) - 1
WORD_BYTES = 8

_list_frames = direct(list_frames)
_measure = direct(measure)
_fill_attributes = direct(fill_attributes)
_fill_bits = direct(fill_bits)
_fill_bytes = direct(fill_bytes)
_fill_event_times = direct(fill_event_times)
_fill_numbers = direct(fill_numbers)
_fill_publish_times = direct(fill_publish_times)


def tables(
    memory: Any, low: int, high: int, *, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
) -> Iterator[FrameTable]:
    """Make a table of some frames after the other, with the messages at offsets from `low` to below `high`.

    `memory`: bytes-like, whole frames back to back; the tables point into it until their columns are made. Their crcs
    are not compared. Raises ImportError without pyarrow, DataLoss at a frame that is unsound.
    """
    view = memoryview(memory).cast("B")
    start = address_of(view) if len(view) else 0
    for entries in _listed(view, start, low, high, rows_max, bytes_max):
        table = FrameTable(view, start, entries, low, high)
        if table.row_count:
            yield table


def _listed(
    view: memoryview, start: int, low: int, high: int, rows_max: int, bytes_max: int
) -> Iterator[Any]:
    """List the frames of `view`, which stands at the address `start`: rows of Entry, some at a time. Raises as `tables`."""
    at, state = 0, np.zeros(len(Listing), dtype=np.int64)
    while at < len(view):
        entries = np.empty((ENTRIES_MAX, len(Entry)), dtype=np.int64)
        code = _list_frames(
            start + at, len(view) - at, low, high, array_address(entries), ENTRIES_MAX, rows_max,
            bytes_max, array_address(state),
        )  # fmt: skip
        at += int(state[Listing.CONSUMED])
        count = int(state[Listing.COUNT])
        if count:
            yield entries[:count]
        if code < 0:
            raise DataLoss(
                f"damaged frame at byte {at}: {describe_fault(code)}; read it from another copy"
            )


def producer_ids(memory: Any) -> list[int]:
    """List the ids of the producers of some frames, each once, rising; those without a producer are passed over.

    `memory`: bytes-like, whole frames back to back. Raises DataLoss at a frame that is unsound.
    """
    found: set[int] = set()
    view = memoryview(memory).cast("B")
    start = address_of(view) if len(view) else 0
    for entries in _listed(view, start, 0, INT64_MAX, INT64_MAX, INT64_MAX):
        found.update(np.unique(_producers(view, start, entries)).tolist())
    return sorted(found - {0})


def _producers(view: memoryview, start: int, entries: Any) -> Any:
    """Read the producer id of each frame: one stands at a whole word, as frames do."""
    words = np.frombuffer(view, dtype="<i8", count=len(view) // WORD_BYTES)
    return words[(entries[:, Entry.HEADER] - start + At.PRODUCER_ID) // WORD_BYTES]


class FrameTable:
    """Messages of some frames, in their order."""

    def __init__(self, view: memoryview, start: int, entries: Any, low: int, high: int) -> None:
        """`entries`: rows of Entry, whose bodies are unpacked here; `start`: the address of `view`."""
        self._arrow = import_pyarrow()
        self._view, self._start, self._entries = view, start, entries
        self._unpacked: list[FrameView] = []
        """Frames whose bodies had to be unpacked."""
        for index in np.flatnonzero(entries[:, Entry.BODY] == 0):
            frame = FrameView(view, int(entries[index, Entry.HEADER]) - start)
            entries[index, Entry.BODY] = frame.body()
            self._unpacked.append(frame)
        self._sums = np.zeros(len(Sum), dtype=np.int64)
        self._address, self._count = array_address(entries), len(entries)
        _measure(self._address, self._count, low, high, array_address(self._sums))
        self.row_count = int(self._sums[Sum.ROWS])

    def offsets(self) -> pa.Array:
        """int64: offset of each message."""
        return self._numbers(At.BASE_OFFSET, BufferId.OFFSET_DELTA)

    def sequences(self) -> pa.Array:
        """int64: sequence of each message."""
        return self._numbers(At.BASE_SEQUENCE, BufferId.SEQUENCE_DELTA)

    def producer_names(self, names: Mapping[int, str]) -> pa.Array:
        """string: the name of the producer of each message, null if `names`, by id, has none."""
        arrow, entries = self._arrow, self._entries
        ids, places = np.unique(_producers(self._view, self._start, entries), return_inverse=True)
        counts = entries[:, Entry.STOP] - entries[:, Entry.START]
        found = arrow.array([names.get(each) for each in ids.tolist()], type=arrow.string())
        return found.take(arrow.array(np.repeat(places, counts)))

    def publish_times(self) -> pa.Array:
        """timestamp[us, UTC]: the producer's clock."""
        return self._words(_fill_publish_times, self._arrow.timestamp("us", tz="UTC"))

    def event_times(self) -> pa.Array:
        """timestamp[us, UTC], null where a message has none."""
        validity = None
        if self._sums[Sum.EVENT_TIMES_PARTIAL]:
            validity = self._bits(BufferId.EVENT_TIME, BufferId.EVENT_TIME_VALIDITY)
        kind = self._arrow.timestamp("us", tz="UTC")
        return self._words(_fill_event_times, kind, validity)

    def payloads(self) -> pa.Array:
        """binary, null for a tombstone."""
        validity = None
        if self._sums[Sum.PAYLOAD_VALIDITIES]:
            validity = self._bits(BufferId.PAYLOAD_OFFSETS, BufferId.PAYLOAD_VALIDITY)
        return self._bytes(BufferId.PAYLOAD_OFFSETS, int(self._sums[Sum.PAYLOAD_BYTES]), validity)

    def keys(self) -> pa.Array:
        """binary, null where a message has none."""
        validity = None
        if self._sums[Sum.KEYS_PARTIAL]:
            validity = self._bits(BufferId.KEY_OFFSETS, BufferId.KEY_VALIDITY)
        return self._bytes(BufferId.KEY_OFFSETS, int(self._sums[Sum.KEY_BYTES]), validity)

    def attributes(self) -> pa.Array:
        """map<string, string>, empty where a message has none. Text that is no UTF-8 is mended with U+FFFD."""
        arrow, sums = self._arrow, self._sums
        pairs = int(sums[Sum.PAIRS])
        rows = np.empty(self.row_count + 1, dtype=np.int32)
        offsets = np.empty((2, pairs + 1), dtype=np.int32)
        data = [
            np.empty(int(sums[word]), dtype=np.uint8)
            for word in (Sum.ATTRIBUTE_KEY_BYTES, Sum.ATTRIBUTE_VALUE_BYTES)
        ]
        strings = [offsets[0], data[0], offsets[1], data[1]]
        addresses = np.array([array_address(each) for each in strings], dtype=np.int64)
        _fill_attributes(self._address, self._count, array_address(rows), array_address(addresses))
        kind = arrow.map_(arrow.string(), arrow.string())
        columns = [self._strings(pairs, offsets[side], data[side]) for side in (0, 1)]
        both = arrow.StructArray.from_arrays(columns, fields=[kind.key_field, kind.item_field])
        buffers = [None, arrow.py_buffer(rows)]
        return arrow.Array.from_buffers(kind, self.row_count, buffers, children=[both])

    def _numbers(self, base_at: int, deltas_id: int) -> Any:
        values = np.empty(self.row_count, dtype=np.int64)
        _fill_numbers(self._address, self._count, base_at, deltas_id, array_address(values))
        return self._arrow.array(values)

    def _words(self, fill: Any, kind: Any, validity: Any = None) -> Any:
        values = np.empty(self.row_count, dtype=np.int64)
        fill(self._address, self._count, array_address(values))
        buffers = [validity, self._arrow.py_buffer(values)]
        return self._arrow.Array.from_buffers(kind, self.row_count, buffers)

    def _bits(self, values_id: int, validity_id: int) -> Any:
        bits = np.zeros((self.row_count + 7) >> 3, dtype=np.uint8)
        _fill_bits(self._address, self._count, values_id, validity_id, array_address(bits))
        return self._arrow.py_buffer(bits)

    def _bytes(self, offsets_id: int, byte_count: int, validity: Any) -> Any:
        offsets = np.empty(self.row_count + 1, dtype=np.int32)
        data = np.empty(byte_count, dtype=np.uint8)
        _fill_bytes(
            self._address, self._count, offsets_id, array_address(offsets), array_address(data)
        )
        buffers = [validity, self._arrow.py_buffer(offsets), self._arrow.py_buffer(data)]
        return self._arrow.Array.from_buffers(self._arrow.binary(), self.row_count, buffers)

    def _strings(self, count: int, offsets: Any, data: Any) -> Any:
        arrow = self._arrow
        buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(data)]
        return valid_strings(arrow.Array.from_buffers(arrow.string(), count, buffers))
