"""Messages in, frame out.

    pack_into          into memory that is there (a ring, a send buffer), as many as fit
    pack_columns_into  the same for prepared `Columns`, for more than one frame
    encode_frame       all messages into one new frame, sealed, compressed if asked

After `pack_into` the caller seals the frame (`stamp.seal`), because only the sender knows the
sequence, and only at that moment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from danube_fast.errors import InvalidArgument
from danube_fast.frame.codec import compress_frame
from danube_fast.frame.columns import Attributes, Columns, Times, as_list
from danube_fast.frame.cpython import BYTES_TYPE, NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import address_of, direct
from danube_fast.frame.layout import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    Codec,
)
from danube_fast.frame.pack_kernels import COUNT_SHIFT, pack_columns, pack_payloads
from danube_fast.frame.plain import plain_pack
from danube_fast.frame.stamp import seal

__all__ = ["encode_frame", "pack_columns_into", "pack_into"]

_pack_payloads = direct(pack_payloads)
_pack_columns = direct(pack_columns)
_seal = direct(seal)
_BYTES_MASK = (1 << COUNT_SHIFT) - 1
_CHANGED = "a list changed while it was packed; hand over one that stays"
_CAPACITY_MAX = HEADER_BYTES + BODY_BYTES_MAX


def pack_columns_into(
    destination_address: int, capacity_bytes: int, columns: Columns, start: int = 0
) -> tuple[int, int]:
    """Pack messages of `columns` from index `start` while they fit: (frame_bytes, message_count).

    If not even one fits: (frame_bytes that one needs, 0), and nothing was written. With address 0
    nothing is written either; the numbers are those of a real call.
    """
    capacity_bytes = min(capacity_bytes, _CAPACITY_MAX)
    if not 0 <= start < columns.count:
        raise InvalidArgument(f"start {start} is not one of {columns.count} messages")
    if not OBJECTS_READABLE:
        try:
            frame, count, needed = plain_pack(columns, start, capacity_bytes)
        except (TypeError, IndexError):
            columns.verify()
            raise InvalidArgument(_CHANGED) from None
        if destination_address and count:
            ctypes.memmove(destination_address, frame, needed)
        return needed, count
    packed = _pack_columns(destination_address, capacity_bytes, columns.job_address, start)
    if packed <= 0:  # something else than bytes
        columns.verify()
        packed = _pack_columns(destination_address, capacity_bytes, columns.job_address, start)
    if packed <= 0:
        raise InvalidArgument(_CHANGED)
    return packed & _BYTES_MASK, packed >> COUNT_SHIFT


def pack_into(
    destination_address: int,
    capacity_bytes: int,
    payloads: Sequence[bytes | None],
    start: int = 0,
    *,
    keys: Sequence[bytes | None] | None = None,
    attributes: Attributes | None = None,
    event_times: Times | np.ndarray[Any, Any] | None = None,
    deliver_at: Times | np.ndarray[Any, Any] | None = None,
) -> tuple[int, int]:
    """Pack payloads[start:] while they fit into `capacity_bytes`: (frame_bytes, message_count).

    If not even one fits: (frame_bytes that one needs, 0), and nothing was written. The header is
    complete but for what `seal` and `stamp` write. A list with nothing but payloads is packed by
    one kernel call; with other columns and more than one frame, make a `Columns` once and use
    `pack_columns_into`. Raises InvalidArgument, naming index and type, for what cannot be packed.
    """
    plain = keys is None and attributes is None and event_times is None and deliver_at is None
    if not (plain and OBJECTS_READABLE):
        columns = Columns(
            payloads,
            keys=keys,
            attributes=attributes,
            event_times=event_times,
            deliver_at=deliver_at,
        )
        return pack_columns_into(destination_address, capacity_bytes, columns, start)
    items = as_list(payloads, "payload")
    if not 0 <= start < len(items):
        raise InvalidArgument(f"start {start} is not one of {len(items)} messages")
    capacity_bytes = min(capacity_bytes, _CAPACITY_MAX)
    packed = _pack_payloads(destination_address, capacity_bytes, id(items), start, BYTES_TYPE, NONE)
    if packed <= 0:  # something else than bytes
        return pack_columns_into(destination_address, capacity_bytes, Columns(items), start)
    return packed & _BYTES_MASK, packed >> COUNT_SHIFT


def encode_frame(
    payloads: Sequence[bytes | None],
    *,
    keys: Sequence[bytes | None] | None = None,
    attributes: Attributes | None = None,
    event_times: Times | np.ndarray[Any, Any] | None = None,
    deliver_at: Times | np.ndarray[Any, Any] | None = None,
    producer_id: int = 0,
    base_sequence: int = 0,
    publish_time_ns: int = 0,
    producer_epoch: int = 0,
    schema_id: int = 0,
    schema_version: int = 0,
    codec: Codec = Codec.NONE,
) -> bytearray:
    """One sealed frame of all messages.

    With a codec the body is compressed; if that does not make the frame smaller, or the body is
    over `COMPRESSED_BODY_BYTES_MAX`, it stays as it is. Raises InvalidArgument for what cannot be
    packed, for no message at all, and for more than `BODY_BYTES_MAX` bytes.
    """
    columns = Columns(
        payloads, keys=keys, attributes=attributes, event_times=event_times, deliver_at=deliver_at
    )
    if not columns.count:
        raise InvalidArgument("a frame needs at least one message")
    frame_bytes, count = pack_columns_into(0, _CAPACITY_MAX, columns)
    if count != columns.count:
        raise InvalidArgument(
            f"{columns.count} messages do not fit one frame of {_CAPACITY_MAX} bytes "
            f"(message {count} is the first that does not); send fewer at a time"
        )
    frame = bytearray(frame_bytes)
    pack_columns_into(address_of(frame), frame_bytes, columns)
    if codec != Codec.NONE:
        frame = compress_frame(frame, codec)
    _seal(
        address_of(frame),
        producer_id,
        base_sequence,
        publish_time_ns,
        producer_epoch,
        schema_id,
        schema_version,
    )
    return frame
