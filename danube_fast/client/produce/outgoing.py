"""Messages on their way into frames: the open batch of a lane, or a list handed to `send_many`.

`Packer` turns the front of an `Outgoing` into one frame in a send buffer. Only payloads are the
hot path: one kernel call over the list itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from danube_fast.checks import check_callable, check_seconds, check_time_ns
from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.buffers import FRAME_AT, Buffer, BufferPool
from danube_fast.client.link.joint import CAN_JOIN
from danube_fast.client.topics.routes import Topic
from danube_fast.client.values.limits import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    MESSAGE_BYTES_MAX_DEFAULT,
    MESSAGE_OVERHEAD_BYTES,
)
from danube_fast.client.values.message import MessageId
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.frame.codec import compress_frame
from danube_fast.frame.columns import Columns, as_items, as_list
from danube_fast.frame.hash import key_hash
from danube_fast.frame.layout import FRAME_OVERHEAD_BYTES, Codec, message_frame_bytes_max
from danube_fast.frame.pack import pack_columns_into, pack_into
from danube_fast.types import Dispatch

__all__ = [
    "Attributes",
    "Fields",
    "OnDelivery",
    "Outgoing",
    "Packer",
    "as_key",
    "as_payload",
    "as_time_ns",
    "check_delays",
    "checked_attributes",
    "due_ns",
    "outgoing_list",
]

Attributes = Mapping[str, str]
OnDelivery = Callable[[MessageId | None, DanubeError | None], object]
"""Called with the message's id, or with None and the error that kept it out."""
Fields = tuple[bytes | None, bytes | None, Attributes | None, int | None, int | None]
"""Of one message, checked: payload, key, attributes, event time, deliver-at."""

_ATTRIBUTE_OVERHEAD_BYTES = 16
_TEXT = frozenset((str,))


def as_payload(value: Any) -> bytes | None:
    """Return bytes as they are, other buffers copied. Raises InvalidArgument."""
    if type(value) is bytes or value is None:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(
        f"a payload is bytes, not {type(value).__name__}; encode it (text.encode(), json, ...)"
    )


def as_key(value: Any) -> bytes | None:
    """Return a key as bytes; text becomes UTF-8. Raises InvalidArgument."""
    if type(value) is bytes or value is None:
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"the key is not valid Unicode: {value!r:.100}") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(f"a key is str or bytes, not {type(value).__name__}; convert it")


def as_time_ns(value: Any, what: str) -> int | None:
    """Nanoseconds since the epoch from an int or an aware datetime. Raises InvalidArgument."""
    return None if value is None else check_time_ns(value, what)


def due_ns(deliver_at: Any, deliver_after: Any, clock: Clock) -> int:
    """Return when a message is due: at a time, or so many seconds from now. Raises InvalidArgument."""
    if deliver_after is None:
        return check_time_ns(deliver_at, "deliver_at", low=0)
    if deliver_at is not None:
        raise InvalidArgument("give deliver_at or deliver_after, not both")
    return clock.wall_ns() + int(check_seconds(deliver_after, "deliver_after") * 1e9)


def checked_attributes(value: Any) -> dict[str, str]:
    """Return a mapping of text to text, copied. Raises InvalidArgument."""
    if type(value) is dict or isinstance(value, Mapping):
        copy = dict(value)
        texts = (*copy, *copy.values())
        if set(map(type, texts)) <= _TEXT:
            try:
                "".join(texts).encode()
            except UnicodeEncodeError:
                raise InvalidArgument(
                    f"attributes must be valid Unicode; this is not: {value!r:.200}"
                ) from None
            return copy
    raise InvalidArgument(f"attributes map str to str; this does not: {value!r:.200}")


class Outgoing:
    """Parallel columns of messages; a column that is not used is None."""

    __slots__ = (
        "_prepared", "attributes", "byte_count", "callbacks", "deliver_at", "event_times", "keys",
        "payloads", "plain", "urgent",
    )  # fmt: skip

    def __init__(self, payloads: list[bytes | None] | None = None) -> None:
        self.payloads: list[bytes | None] = [] if payloads is None else payloads
        self.keys: list[bytes | None] | None = None
        self.attributes: list[Attributes | None] | None = None
        self.event_times: list[int | None] | None = None
        self.deliver_at: list[int | None] | None = None
        self.callbacks: list[tuple[int, OnDelivery | Ticket]] | None = None
        self.byte_count = 0
        self.plain = True
        """Only payloads."""
        self.urgent = False
        """A call waits for the ack: send it as soon as the window allows."""
        self._prepared: Columns | None = None

    def append(
        self,
        payload: bytes | None,
        key: bytes | None,
        attributes: Attributes | None,
        event_time: int | None,
        deliver_at: int | None,
        callback: OnDelivery | Ticket | None,
    ) -> None:
        """Add one message, whose fields were checked."""
        payloads = self.payloads
        count = len(payloads)
        size = MESSAGE_OVERHEAD_BYTES + (len(payload) if payload else 0)
        payloads.append(payload)
        if callback is not None:
            if self.callbacks is None:
                self.callbacks = []
            self.callbacks.append((count, callback))
        if not self.plain or key is not None or attributes or event_time is not None or deliver_at is not None:  # fmt: skip
            self.plain = False
            if key is not None:
                size += len(key) + MESSAGE_OVERHEAD_BYTES
            if attributes:
                size += sum(
                    len(k) + len(v) + _ATTRIBUTE_OVERHEAD_BYTES for k, v in attributes.items()
                )
            self.keys = _extended(self.keys, count, key)
            self.attributes = _extended(self.attributes, count, attributes or None)
            self.event_times = _extended(self.event_times, count, event_time)
            self.deliver_at = _extended(self.deliver_at, count, deliver_at)
            self._prepared = None
        self.byte_count += size

    def prepared(self) -> Columns:
        """Return the form that the packers read."""
        if self._prepared is None:
            self._prepared = Columns(
                self.payloads,
                keys=self.keys,
                attributes=self.attributes,
                event_times=self.event_times,
                deliver_at=self.deliver_at,
            )
        return self._prepared

    def cut(self, start: int, stop: int | None) -> Outgoing:
        """Return messages `start` to `stop` for a frame: not measured, and without callbacks."""
        out = Outgoing(self.payloads[start:stop])
        out.keys = self.keys and self.keys[start:stop]
        out.attributes = self.attributes and self.attributes[start:stop]
        out.event_times = self.event_times and self.event_times[start:stop]
        out.deliver_at = self.deliver_at and self.deliver_at[start:stop]
        out.plain = self.plain
        return out

    def part(self, start: int, stop: int | None = None) -> Outgoing:
        """Return messages `start` to `stop` on their own."""
        out = self.cut(start, stop)
        if self.callbacks:
            end = len(self.payloads) if stop is None else stop
            out.callbacks = [(i - start, call) for i, call in self.callbacks if start <= i < end]
        out.urgent = self.urgent
        out.byte_count = sum(
            MESSAGE_OVERHEAD_BYTES + (len(payload) if payload else 0) for payload in out.payloads
        )
        return out


def _extended(column: list[Any] | None, count: int, value: Any) -> list[Any] | None:
    if column is not None:
        column.append(value)
        return column
    return None if value is None else [None] * count + [value]


def outgoing_list(
    payloads: Sequence[bytes | None],
    keys: Sequence[bytes | str | None] | None,
    attributes: Sequence[Attributes | None] | None,
    event_times: Sequence[Any] | None,
    deliver_at: Sequence[Any] | None,
    on_delivery: OnDelivery | None,
) -> Outgoing:
    """Columns as `send_many` gets them, checked as far as the packers do not. InvalidArgument."""
    items = as_list(payloads, "payload")
    if on_delivery is not None:
        check_callable(on_delivery, "on_delivery")
    out = Outgoing(items)
    for what, column in (
        ("keys", keys), ("attributes", attributes),
        ("event_times", event_times), ("deliver_at", deliver_at),
    ):  # fmt: skip
        if column is not None and not isinstance(column, Sequence | np.ndarray):
            raise InvalidArgument(f"{what} is a list, one entry for each payload: {column!r:.100}")
        if column is not None and len(column) != len(items):
            raise InvalidArgument(
                f"{what} has {len(column)} entries for {len(items)} payloads; give one each"
            )
    if keys is not None:
        out.keys = [as_key(key) for key in keys]
    if attributes is not None:
        out.attributes = list(attributes)
    if event_times is not None:
        out.event_times = [as_time_ns(time, "event_time") for time in event_times]
    if deliver_at is not None:
        out.deliver_at = [as_time_ns(time, "deliver_at") for time in deliver_at]
    out.plain = keys is None and attributes is None and event_times is None and deliver_at is None
    if on_delivery is not None:
        out.callbacks = [(index, on_delivery) for index in range(len(items))]
    return out


class Packer:
    """Packs frames of one producer into buffers that all producers of the client share."""

    def __init__(self, pool: BufferPool, codec: Codec) -> None:
        self.pool = pool
        self.joins = CAN_JOIN and codec == Codec.NONE
        """Whether payloads may be packed together with those of other lanes."""
        self.message_bytes_max = MESSAGE_BYTES_MAX_DEFAULT
        self.batch_bytes = pool.capacity_bytes
        """Frames of several messages are never larger."""
        self.batch_messages = BATCH_MESSAGES_MAX
        self._codec = codec

    def keep_to(self, limits: Sequence[Mapping[str, int]]) -> None:
        """Pack nothing larger than brokers want it that have these limits (of WELCOME, and of the opened producers)."""
        self.batch_bytes, self.batch_messages = self.pool.capacity_bytes, BATCH_MESSAGES_MAX
        for some in limits:
            self.batch_bytes = min(self.batch_bytes, some.get("frame_bytes_max", BATCH_BYTES_MAX))
            most = some.get("frame_messages_max", BATCH_MESSAGES_MAX)
            self.batch_messages = min(self.batch_messages, most)
        self.message_bytes_max = min(
            some.get("message_bytes_max", MESSAGE_BYTES_MAX_DEFAULT) for some in limits
        )

    def pack(self, outgoing: Outgoing, start: int) -> tuple[Buffer, int, int]:
        """Pack one frame from index `start`: (buffer, frame_bytes, message_count), not sealed yet.

        Raises InvalidArgument for a message that cannot be packed or is too large.
        """
        most, whole, place = self.batch_messages, outgoing, start
        if most < BATCH_MESSAGES_MAX and len(outgoing.payloads) - start > most:
            outgoing, start = outgoing.cut(start, start + most), 0
        plain = outgoing.plain
        room = self.batch_bytes
        if outgoing.byte_count:  # of an open batch; a list is not measured
            columns_bytes = 0 if plain else outgoing.byte_count
            room = min(room, outgoing.byte_count + columns_bytes + FRAME_OVERHEAD_BYTES)
        buffer = self.pool.take(room)
        room = min(self.batch_bytes, buffer.capacity_bytes)
        try:
            if plain:
                size, count = pack_into(buffer.address, room, outgoing.payloads, start)
            else:
                columns = outgoing.prepared()
                size, count = pack_columns_into(buffer.address, room, columns, start)
        except InvalidArgument:
            self.pool.give_back(buffer)
            if outgoing is not whole:
                # raises, and names the place in the whole list
                pack_columns_into(buffer.address, room, whole.prepared(), place)
            raise
        if not count:
            self.pool.give_back(buffer)
            buffer, size = self._pack_large(outgoing, start, size)
            count = 1
        if self._codec != Codec.NONE:
            size = self._compress(buffer, size)
        return buffer, size, count

    def _pack_large(self, outgoing: Outgoing, start: int, size: int) -> tuple[Buffer, int]:
        """A message that is larger than a batch goes alone."""
        limit = self.message_bytes_max
        payload = outgoing.payloads[start]
        if size > message_frame_bytes_max(limit) or (payload and len(payload) > limit):
            raise InvalidArgument(
                f"a message needs {size} bytes and the broker accepts {limit} (message_bytes_max); "
                "split it, or raise the broker's limit"
            )
        buffer = self.pool.take(size)
        size, count = pack_columns_into(
            buffer.address, buffer.capacity_bytes, outgoing.part(start, start + 1).prepared()
        )
        if count != 1:
            raise InvalidArgument("a message changed while it was packed; do not change it")
        return buffer, size

    def _compress(self, buffer: Buffer, size: int) -> int:
        frame = bytearray(buffer.view[FRAME_AT : FRAME_AT + size])
        packed = compress_frame(frame, self._codec)
        if packed is not frame:
            buffer.view[FRAME_AT : FRAME_AT + len(packed)] = packed
        return len(packed)


def check_delays(topic: Topic) -> None:
    """Raises InvalidArgument if nothing is kept for later."""
    if topic.dispatch == Dispatch.NON_RELIABLE:
        raise InvalidArgument(
            f"{topic.name} is non_reliable and keeps nothing for later; deliver_at and "
            "deliver_after need a reliable topic"
        )


def by_key(outgoing: Outgoing, count: int, keyless: int) -> list[tuple[int, Outgoing]]:
    """Split by the partition, of `count`, of each key; what has no key goes to number `keyless`."""
    parts: dict[int, Outgoing] = {}
    keys = outgoing.keys or []
    callbacks = dict(outgoing.callbacks or ())
    for index, payload in enumerate(as_items(outgoing.payloads, "payload")):
        key = keys[index]
        attributes = outgoing.attributes[index] if outgoing.attributes else None
        lane_index = keyless if key is None else key_hash(key) % count
        part = parts.get(lane_index)
        if part is None:
            part = parts[lane_index] = Outgoing()
        part.append(
            payload,
            key,
            checked_attributes(attributes) if attributes else None,
            outgoing.event_times[index] if outgoing.event_times else None,
            outgoing.deliver_at[index] if outgoing.deliver_at else None,
            callbacks.get(index),
        )
    return list(parts.items())
