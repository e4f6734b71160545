"""Reading a frame where it lies.

A `FrameView` is a few words over a buffer: header fields are read when asked for, the body is opened
(checked, decompressed) at the first use of a column. What was not accepted by `check_body` is never
followed, so no content of a frame can make a reader leave the buffer. The buffer must not change
while the view is in use: copy memory that others write before reading it.

    view = FrameView(buffer)     128 bytes must be there
    view.check()                 both that it is a frame and that its crc is right
    view.payloads()              list of bytes
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from typing import Any, overload

import numpy as np
import xxhash

from danube_fast.errors import DataLoss
from danube_fast.frame.check import check_body, check_frame, check_header_crc, describe_fault
from danube_fast.frame.codec import decompress_body
from danube_fast.frame.cpython import COUNTED_NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import (
    ALL_FLAGS,
    FLAG_PAD,
    HEADER_BYTES,
    SEQUENCE_MAX,
    At,
    BufferId,
    Codec,
)
from danube_fast.frame.plain import plain_unpack
from danube_fast.frame.unpack_kernels import find_buffer, find_ranges, unpack_items

__all__ = ["PLACE_FIELDS", "FrameView"]

PLACE_FIELDS = struct.Struct(
    f"<{At.FLAGS}xHII{At.PRODUCER_ID - At.MESSAGE_COUNT - 4}xQ"
    f"{At.BASE_OFFSET - At.PRODUCER_ID - 8}xQ{At.OFFSET_SPAN - At.BASE_OFFSET - 8}xI"
)
"""flags, frame_bytes, message_count, producer_id, base_offset, offset_span, read at once."""

_check_frame = direct(check_frame)
_check_body = direct(check_body)
_check_header_crc = direct(check_header_crc)
_find_buffer = direct(find_buffer)
_find_ranges = direct(find_ranges)
_unpack_items = direct(unpack_items)

_PAYLOADS = int(BufferId.PAYLOAD_OFFSETS)
_KEYS = int(BufferId.KEY_OFFSETS)
_ATTRIBUTES = int(BufferId.ATTRIBUTE_OFFSETS)
_ATTRIBUTE_KEYS, _ATTRIBUTE_VALUES = (
    int(BufferId.ATTRIBUTE_KEY_OFFSETS), int(BufferId.ATTRIBUTE_VALUE_OFFSETS),
)  # fmt: skip
_BOUNDS = struct.Struct("<ii")

_ANCHORS_MAX = 32
_ANCHOR_EVERY_BYTES = 256 * 1024
_ANCHOR_BYTES_MAX = 4096
_OBJECT_BYTES = 33
"""What a `bytes` object takes besides its bytes."""

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Pairs = array  # of type code "q"


class _Anchors:
    """Objects here and there among those that were unpacked lately.

    Python's allocator takes memory from the system by the MiB, and gives it back as soon as nothing in
    it lives. So who receives batch after batch has it unmapped, mapped and zeroed again each time,
    one page fault for every 43 messages of 100 B (a fifth of the consumer's time). One small
    object is enough to keep such a piece of memory; at most 32 of them are kept so.
    """

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=_ANCHORS_MAX)
        self._since_bytes = 0

    def pass_by(self, items: list[bytes | None], start: int, stop: int) -> None:
        """Items start to stop of a list were made."""
        last = items[stop - 1] if stop > start else None
        if last is None:
            return
        size = len(last) + _OBJECT_BYTES
        self._since_bytes += size * (stop - start)
        if self._since_bytes >= _ANCHOR_EVERY_BYTES and size <= _ANCHOR_BYTES_MAX:
            self._since_bytes = 0
            self._kept.append(last)


_anchors = _Anchors()


class _Field:
    """A header field: reads the buffer each time."""

    def __init__(self, kind: str, at: int, text: str) -> None:
        self._unpack = struct.Struct("<" + kind).unpack_from
        self._at = at
        self.__doc__ = text

    @overload
    def __get__(self, view: None, owner: type) -> _Field: ...
    @overload
    def __get__(self, view: FrameView, owner: type) -> int: ...
    def __get__(self, view: FrameView | None, owner: type) -> int | _Field:
        if view is None:
            return self
        return self._unpack(view.memory, view.offset + self._at)[0]  # type: ignore[no-any-return]


class FrameView:
    """One frame in a bytes-like object, `offset` bytes from its start.

    Raises DataLoss if not even a header is there. Columns raise DataLoss if the frame is unsound.
    """

    __slots__ = ("_body", "_body_memory", "_sound", "memory", "offset")

    magic = _Field("I", At.MAGIC, "FRAME_MAGIC")
    version = _Field("B", At.VERSION, "format version")
    codec = _Field("B", At.CODEC, "compression of the body, see `Codec`")
    flags = _Field("H", At.FLAGS, "bits of `Flag`")
    frame_bytes = _Field("I", At.FRAME_BYTES, "header and body, bytes")
    message_count = _Field("I", At.MESSAGE_COUNT, "messages in this frame")
    raw_body_bytes = _Field("I", At.RAW_BODY_BYTES, "body before compression, bytes")
    body_crc32c = _Field("I", At.BODY_CRC32C, "crc of client half and body")
    producer_id = _Field("Q", At.PRODUCER_ID, "who published, 0 if not named")
    base_sequence = _Field("Q", At.BASE_SEQUENCE, "sequence of the first message")
    publish_time_ns = _Field("q", At.PUBLISH_TIME_NS, "producer's wall clock, nanoseconds")
    producer_epoch = _Field("I", At.PRODUCER_EPOCH, "epoch of the producer")
    schema_id = _Field("I", At.SCHEMA_ID, "schema of the payloads, 0 for none")
    schema_version = _Field("H", At.SCHEMA_VERSION, "version of that schema")
    body_padding = _Field("B", At.BODY_PADDING, "bytes behind a compressed body")
    log_id = _Field("Q", At.LOG_ID, "the log that holds this frame")
    log_position = _Field("Q", At.LOG_POSITION, "its place there, bytes")
    base_offset = _Field("Q", At.BASE_OFFSET, "offset that deltas count from")
    append_time_ns = _Field("q", At.APPEND_TIME_NS, "broker's wall clock, nanoseconds")
    synced_position = _Field("Q", At.SYNCED_POSITION, "durable up to here when written")
    partition_id = _Field("I", At.PARTITION_ID, "the partition, unique in the cluster")
    epoch = _Field("I", At.EPOCH, "epoch of the partition's owner")
    offset_span = _Field("I", At.OFFSET_SPAN, "offsets from base_offset on that are covered")
    header_crc32c = _Field("I", At.HEADER_CRC32C, "crc of bytes 0 to 123")

    def __init__(self, buffer: Any, offset: int = 0) -> None:
        memory = memoryview(buffer)
        if memory.format != "B" or memory.ndim != 1:
            memory = np.frombuffer(buffer, dtype=np.uint8).data
        if offset < 0 or memory.nbytes - offset < HEADER_BYTES:
            raise DataLoss(
                f"{memory.nbytes} bytes with a frame at {offset}: its header of {HEADER_BYTES} "
                "bytes is not all there; read the data again"
            )
        self.memory = memory
        self.offset = offset
        self._sound = self._body = 0
        self._body_memory: memoryview | None = None

    @classmethod
    def checked(cls, buffer: bytes, offset: int, address: int, body: int) -> FrameView:
        """View a frame that was found to be sound: addresses of its first header byte, and of its body, 0 if that is
        compressed or not there."""
        view = cls.__new__(cls)
        view.memory, view.offset = memoryview(buffer), offset
        view._sound, view._body, view._body_memory = address, body, None
        return view

    def __repr__(self) -> str:
        return (
            f"FrameView(partition_id={self.partition_id}, base_offset={self.base_offset}, "
            f"message_count={self.message_count}, frame_bytes={self.frame_bytes})"
        )

    @property
    def address(self) -> int:
        """Address of the first header byte."""
        return address_of(self.memory) + self.offset

    @property
    def frame(self) -> memoryview:
        """Exactly the frame's bytes."""
        return self.memory[self.offset : self.offset + self.frame_bytes]

    def check(self, *, stamped: bool = False) -> None:
        """Check structure and body_crc32c, with `stamped` also header_crc32c.

        Raises DataLoss that names the fault. What is sound now is not looked at again.
        """
        self._sound = self._check(1)
        if stamped and not _check_header_crc(self.address):
            raise self._loss("header_crc32c is wrong")

    def _loss(self, fault: str) -> DataLoss:
        return DataLoss(f"damaged frame at byte {self.offset}: {fault}; read it from another copy")

    def _check(self, check_body_crc: int) -> int:
        """The frame's address, if the frame is sound."""
        address = self.address
        available_bytes = self.memory.nbytes - self.offset
        code = _check_frame(address, available_bytes, ALL_FLAGS, check_body_crc)
        if code < 0:
            raise self._loss(describe_fault(code))
        return address

    def body(self) -> int:
        """Address of the uncompressed body, checked; 0 for a PAD frame, which has none.

        It stays valid as long as this view.
        """
        if self._body:
            return self._body
        address = self._sound or self._check(0)
        if self.flags & FLAG_PAD:
            return 0
        if self.codec == Codec.NONE:
            self._body = address + HEADER_BYTES
            return self._body
        packed = self.frame[HEADER_BYTES : self.frame_bytes - self.body_padding]
        memory = memoryview(decompress_body(packed, self.codec, self.raw_body_bytes))
        body = address_of(memory) if memory.nbytes else 0
        code = _check_body(body, memory.nbytes, self.message_count, self.flags, self.offset_span)
        if code < 0:
            raise self._loss(describe_fault(code))
        self._body_memory = memory
        self._body = body
        return body

    def body_memory(self) -> memoryview:
        """The uncompressed body's bytes, of a frame that has one."""
        self.body()
        if self._body_memory is not None:
            return self._body_memory
        return self.memory[self.offset + HEADER_BYTES : self.offset + self.frame_bytes]

    def place(self, buffer_id: int) -> int:
        """Where a buffer lies, bytes from the start of the body; 0 if it is absent."""
        body = self.body()
        return _find_buffer(body, buffer_id) if body else 0

    def array(self, buffer_id: int, dtype: str, count: int) -> np.ndarray[Any, Any] | None:
        """A buffer's first `count` elements, not copied (nor aligned); None if it is absent."""
        place = self.place(buffer_id)
        if not place:
            return None
        return np.frombuffer(self.body_memory(), dtype=dtype, count=count, offset=place)

    def first_payload(self) -> bytes | None:
        """Payload of the first message: `payloads(0, 1)[0]`, with less to do."""
        body = self._body or self.body()
        items: list[bytes | None] = [None]
        if (
            body
            and OBJECTS_READABLE
            and _unpack_items(body, _PAYLOADS, 0, 1, id(items), 0, COUNTED_NONE) == 0
        ):
            return items[0]
        return self.payloads(0, 1)[0]

    def _window(self, start: int, stop: int | None) -> tuple[int, int]:
        """Bound start and stop as a slice would."""
        first, last, _ = slice(start, stop).indices(self.message_count)
        return first, max(first, last)

    def _items(self, offsets_id: int, start: int, stop: int) -> list[bytes | None] | None:
        """A column of byte strings; None if it is absent."""
        if not self.body():  # a count that has not been checked makes no list
            return None
        items: list[bytes | None] = [None] * (stop - start)
        return items if self._fill(offsets_id, start, stop, items, 0) else None

    def _fill(
        self, offsets_id: int, start: int, stop: int, items: list[bytes | None], at: int
    ) -> bool:
        """Part of such a column over the None of a list, from its item `at` on; False if it is absent."""
        body = self.body()
        if not body:
            return False
        if len(items) < at + stop - start:
            raise IndexError(f"{stop - start} items from {at} on, and the list is too short")
        if OBJECTS_READABLE:
            absent = _unpack_items(body, offsets_id, start, stop, id(items), at, COUNTED_NONE)
            if absent:
                return False
            _anchors.pass_by(items, at, at + stop - start)
            return True
        offsets = self.array(offsets_id, "<i4", stop + 1)
        if offsets is None:
            return False
        memory = self.body_memory()
        data = memory[self.place(offsets_id + 1) :]
        validity = None
        if offsets_id in (_PAYLOADS, _KEYS) and (place := self.place(offsets_id - 1)):
            validity = memory[place:]
        items[at : at + stop - start] = plain_unpack(offsets, data, validity, start, stop)
        return True

    def payloads(self, start: int = 0, stop: int | None = None) -> list[bytes | None]:
        """Payloads of messages start to stop (as a slice); None is a tombstone."""
        first, last = self._window(start, stop)
        items = self._items(_PAYLOADS, first, last)
        return [] if items is None else items

    def fill_payloads(self, items: list[bytes | None], at: int, start: int, stop: int) -> None:
        """Payloads of messages start to stop into a list that is None from item `at` on."""
        first, last = self._window(start, stop)
        self._fill(_PAYLOADS, first, last, items, at)

    def keys(self, start: int = 0, stop: int | None = None) -> list[bytes | None] | None:
        """Keys of messages start to stop; None if the frame has no keys."""
        first, last = self._window(start, stop)
        return self._items(_KEYS, first, last)

    def key_hashes(self) -> np.ndarray[Any, np.dtype[np.uint64]] | None:
        """uint64 hash of every key (0 where there is none); None if the frame has no keys."""
        hashes = self.array(BufferId.KEY_HASH, "<u8", self.message_count)
        if hashes is not None:
            return hashes
        keys = self.keys()
        if keys is None:
            return None
        digests = [0 if key is None else xxhash.xxh64_intdigest(key, 0) for key in keys]
        return np.array(digests, dtype=np.uint64)

    def attributes(self, start: int = 0, stop: int | None = None) -> list[dict[str, str]] | None:
        """Attributes of messages start to stop, a dict each; None if the frame has none.

        Bytes that are not UTF-8 become U+FFFD: one bad message must not stop a reader.
        """
        first, last = self._window(start, stop)
        offsets = self.array(BufferId.ATTRIBUTE_OFFSETS, "<i4", self.message_count + 1)
        if offsets is None:
            return None
        bounds = offsets[first : last + 1].tolist()
        low, high = (bounds[0], bounds[-1]) if bounds else (0, 0)
        keys = self._strings(BufferId.ATTRIBUTE_KEY_OFFSETS, low, high)
        values = self._strings(BufferId.ATTRIBUTE_VALUE_OFFSETS, low, high)
        rows = []
        for index in range(last - first):
            part = slice(bounds[index] - low, bounds[index + 1] - low)
            rows.append(dict(zip(keys[part], values[part], strict=True)))
        return rows

    def first_attributes(self) -> dict[str, str] | None:
        """Attributes of the first message: `attributes(0, 1)[0]`, with less to do."""
        body = self._body or self.body()
        place = _find_buffer(body, _ATTRIBUTES) if body else 0
        if not place or self._body_memory is not None or not OBJECTS_READABLE:
            rows = self.attributes(0, 1)
            return None if rows is None else rows[0]
        low, high = _BOUNDS.unpack_from(self.memory, self.offset + HEADER_BYTES + place)
        keys: list[Any] = [None] * (high - low)
        values = keys.copy()
        for offsets_id, items in ((_ATTRIBUTE_KEYS, keys), (_ATTRIBUTE_VALUES, values)):
            if _unpack_items(body, offsets_id, low, high, id(items), 0, COUNTED_NONE):
                return {}
        try:
            return dict(zip(map(bytes.decode, keys), map(bytes.decode, values), strict=True))
        except UnicodeDecodeError:
            rows = self.attributes(0, 1)
            return None if rows is None else rows[0]

    def _strings(self, offsets_id: int, start: int, stop: int) -> list[str]:
        items = self._items(offsets_id, start, stop) or []
        return [(item or b"").decode("utf-8", "replace") for item in items]

    def _times(self, times_id: BufferId, start: int, stop: int | None) -> list[int | None] | None:
        first, last = self._window(start, stop)
        times = self.array(times_id, "<i8", self.message_count)
        if times is None:
            return None
        values: list[int | None] = times[first:last].tolist()
        validity = self.array(times_id - 1, "u1", (self.message_count + 7) >> 3)
        if validity is not None:
            there = np.unpackbits(validity, bitorder="little")[first:last]
            for index in np.flatnonzero(there == 0).tolist():
                values[index] = None
        return values

    def event_times(self, start: int = 0, stop: int | None = None) -> list[int | None] | None:
        """Event times of messages start to stop, nanoseconds; None if the frame has none."""
        return self._times(BufferId.EVENT_TIME, start, stop)

    def deliver_at(self, start: int = 0, stop: int | None = None) -> list[int | None] | None:
        """Times not to deliver before, nanoseconds; None if the frame has none."""
        return self._times(BufferId.DELIVER_AT, start, stop)

    def deliver_at_ns(self) -> IntArray | None:
        """int64[n]: times not to deliver before, 0 where a message has none; None as above."""
        times = self.array(BufferId.DELIVER_AT, "<i8", self.message_count)
        validity = self.array(BufferId.DELIVER_AT_VALIDITY, "u1", (self.message_count + 7) >> 3)
        if times is None or validity is None:
            return times
        return np.where(np.unpackbits(validity, bitorder="little")[: len(times)], times, 0)

    def offset_deltas(self) -> IntArray:
        """int64[n]: each message's offset less base_offset."""
        deltas = self.array(BufferId.OFFSET_DELTA, "<u4", self.message_count)
        if deltas is None:
            return np.arange(self.message_count, dtype=np.int64)
        return deltas.astype(np.int64)

    def offsets(self) -> IntArray:
        """int64[n]: each message's offset."""
        return self.offset_deltas() + np.int64(self._sound_base())

    def _sound_base(self) -> int:
        base_offset = self.base_offset
        if base_offset > SEQUENCE_MAX:
            raise self._loss(f"base_offset {base_offset} is over 2**62 - 1")
        return base_offset

    def ranges(self, start: int = 0, stop: int | None = None) -> Pairs[int]:
        """Offsets of messages start to stop as flat [low, high) pairs, int64, in their order."""
        first, last = self._window(start, stop)
        place, base = self.place(BufferId.OFFSET_DELTA), self._sound_base()
        if first == last:
            return array("q")
        if not place:
            return array("q", (base + first, base + last))
        found = array("q", bytes(16 * (last - first)))
        pairs = _find_ranges(self.body() + place, base, first, last, address_of(found))
        del found[2 * pairs :]
        return found

    def sequences(self) -> IntArray:
        """int64[n]: each message's sequence."""
        deltas = self.array(BufferId.SEQUENCE_DELTA, "<u4", self.message_count)
        if deltas is None:
            deltas = np.arange(self.message_count, dtype=np.int64)
        return deltas.astype(np.int64) + np.int64(self.base_sequence)

    def redelivery_counts(self) -> np.ndarray[Any, np.dtype[np.uint32]] | None:
        """uint32[n]: how often each message was delivered before; None if all were never."""
        return self.array(BufferId.REDELIVERY_COUNT, "<u4", self.message_count)
