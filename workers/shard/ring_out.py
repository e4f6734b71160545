"""The commands that a worker sends most, written straight into the ring of their client, or given to the ROUTER: one
kernel call each.

    PUBLISHED of one frame     [op, [[request, [status, offset]]], {}]
    DELIVER of one bundle      [op, [consumer id]], bundle
    PONG, over rings           [op, request]

Everything else, and these when there is no room, goes the ordinary way.
"""

from __future__ import annotations

from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import store_u8
from danube_fast.net.msgpack_kernel import (
    EMPTY_MAP,
    FIXED_ARRAY,
    UNSIGNED_BYTES_MAX,
    write_unsigned,
)
from danube_fast.net.protocol import Deliver, Pong, Published, op_code
from danube_fast.ring.duplex_kernel import (
    HEAD,
    HEAD_BYTES_MAX,
    IN,
    push_pair,
    push_part,
    word_of,
)
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.workers.shard.routed_peers import send_pair, send_part

__all__ = [
    "PLAIN_BYTES_MAX",
    "deliver_one",
    "pong_one",
    "publish_one",
    "send_delivery",
    "send_published",
]

PLAIN_BYTES_MAX = 16 * 1024
"""A larger bundle is not plain: Python's part of its cost is small."""
_PUBLISHED, _DELIVER, _PONG = op_code(Published), op_code(Deliver), op_code(Pong)
_PUBLISHED_BYTES_MAX = 6 + 3 * UNSIGNED_BYTES_MAX
if _PUBLISHED_BYTES_MAX > HEAD_BYTES_MAX:
    raise ImportError(f"a PUBLISHED of {_PUBLISHED_BYTES_MAX} bytes does not fit {HEAD_BYTES_MAX}")


@kernel("int64(int64,int64,int64,int64)")
def publish_one(row: int, request: int, status: int, offset: int) -> int:
    """Answer a PUBLISH of one frame; less than 0 without room. None of the numbers is negative."""
    head = row + HEAD * WORD_BYTES
    store_u8(head, FIXED_ARRAY + 3)
    store_u8(head + 1, _PUBLISHED)
    store_u8(head + 2, FIXED_ARRAY + 1)
    store_u8(head + 3, FIXED_ARRAY + 2)
    at = write_unsigned(head + 4, request)
    store_u8(at, FIXED_ARRAY + 2)
    at = write_unsigned(write_unsigned(at + 1, status), offset)
    store_u8(at, EMPTY_MAP)
    if word_of(row, IN) == 0:
        return send_part(row, head, at + 1 - head)
    return push_part(row, head, at + 1 - head)


@kernel("int64(int64,int64)")
def pong_one(row: int, request: int) -> int:
    """Answer a PING over rings; less than 0 without room."""
    head = row + HEAD * WORD_BYTES
    store_u8(head, FIXED_ARRAY + 2)
    store_u8(head + 1, _PONG)
    return push_part(row, head, write_unsigned(head + 2, request) - head)


@kernel("int64(int64,int64,int64,int64)")
def deliver_one(row: int, consumer_id: int, bundle: int, bundle_bytes: int) -> int:
    """Deliver a bundle of one frame; less than 0 without room."""
    head = row + HEAD * WORD_BYTES
    store_u8(head, FIXED_ARRAY + 2)
    store_u8(head + 1, _DELIVER)
    store_u8(head + 2, FIXED_ARRAY + 1)
    end = write_unsigned(head + 3, consumer_id)
    if word_of(row, IN) == 0:
        return send_pair(row, head, end - head, bundle, bundle_bytes)
    return push_pair(row, head, end - head, bundle, bundle_bytes)


send_published, send_delivery = direct(publish_one), direct(deliver_one)
