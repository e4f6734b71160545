"""A plain publish over rings: packed, sealed, pushed and signalled by one thread in two kernels, its ack awaited in a third.

    publish(payload) -> lane with nothing unacked -> frame -> ring -> worker -> ring -> row of the ticket -> MessageId

It leaves the lane as every other publish does: a frame that is unacked, under a request that is on its way. So
whatever is not an ack (a refusal, a lost session, the end of its time) finds it where it looks for frames, and ends
the ticket.
"""

from __future__ import annotations

from danube_fast.client.link.buffers import FRAME_AT
from danube_fast.client.values.limits import MESSAGE_OVERHEAD_BYTES
from danube_fast.frame.cpython import BYTES_TYPE, NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_MAGIC, FRAME_OVERHEAD_BYTES
from danube_fast.frame.memory import store_u8, store_u32
from danube_fast.frame.pack_kernels import COUNT_SHIFT, pack_payloads
from danube_fast.frame.stamp import seal
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, write_unsigned
from danube_fast.net.protocol import Publish, op_code
from danube_fast.ring.duplex_kernel import HEAD, push_pair
from danube_fast.ring.layout import WORD_BYTES

__all__ = ["ALONE_OVERHEAD_BYTES", "PAYLOAD_BYTES_MAX", "pack_alone", "push_frame"]

PAYLOAD_BYTES_MAX = 16 * 1024 if OBJECTS_READABLE else -1
"""Larger ones take the way of all other messages, which knows what to do without room."""
ALONE_OVERHEAD_BYTES = FRAME_OVERHEAD_BYTES + MESSAGE_OVERHEAD_BYTES
"""What a frame has beside its one payload, at most."""
_PUBLISH = op_code(Publish)
_BYTES_MASK = (1 << COUNT_SHIFT) - 1
_BUNDLE_WORD_BYTES = 4


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64,int64)")
def _push_frame(
    row: int, request: int, frame: int, frame_bytes: int, partition_id: int,
    producer_id: int, sequence: int, time_ns: int, epoch: int,
) -> int:  # fmt: skip
    """Seal a packed frame, which has room for its bundle before it, and send it as a PUBLISH; less than 0 without room."""
    seal(frame, producer_id, sequence, time_ns, epoch, 0, 0)
    bundle = frame - FRAME_AT
    store_u32(bundle, BUNDLE_MAGIC)
    store_u32(bundle + _BUNDLE_WORD_BYTES, 1)
    store_u32(frame - BUNDLE_ENTRY_BYTES, partition_id)
    store_u32(frame - BUNDLE_ENTRY_BYTES + _BUNDLE_WORD_BYTES, frame_bytes)
    head = row + HEAD * WORD_BYTES
    store_u8(head, FIXED_ARRAY + 2)
    store_u8(head + 1, _PUBLISH)
    head_bytes = write_unsigned(head + 2, request) - head
    return push_pair(row, head, head_bytes, bundle, FRAME_AT + frame_bytes)


push_frame, _pack = direct(_push_frame), direct(pack_payloads)


def pack_alone(address: int, capacity_bytes: int, items: list[bytes]) -> int:
    """Pack a list of one payload at an address with enough room; the frame's bytes."""
    packed: int = _pack(address, capacity_bytes, id(items), 0, BYTES_TYPE, NONE)
    return packed & _BYTES_MASK
