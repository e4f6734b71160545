"""A DELIVER of one frame, taken out of a ring in one kernel call: the bundle as a bytes object, and for which consumer.

Anything else stays first in the ring, for the ordinary way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from danube_fast.client.link.users import Receiver
from danube_fast.frame.cpython import COUNTED_NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import (
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    BUNDLE_MAGIC,
)
from danube_fast.frame.memory import load_i64, load_u8, load_u32
from danube_fast.frame.unpack_kernels import keep_bytes
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, read_unsigned
from danube_fast.net.protocol import Deliver, op_code
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.duplex_kernel import (
    PAIR_BODY,
    PAIR_BODY_BYTES,
    PAIR_HEAD,
    PAIR_HEAD_BYTES,
    PAIR_WORDS,
    peek_pair,
    release_pair,
)
from danube_fast.ring.layout import WORD_BYTES

__all__ = ["Deliveries"]

FRAME_AT = BUNDLE_HEADER_BYTES + BUNDLE_ENTRY_BYTES
"""Where the frame begins in its bundle."""
_DELIVER = op_code(Deliver)
_NUMBER = PAIR_WORDS * WORD_BYTES
_AT_COUNT = 4
_AT_FRAME_BYTES = FRAME_AT - 4


@kernel("int64(int64,int64)")
def _read_consumer(head: int, end: int) -> int:
    """Where the id of the one consumer of a DELIVER begins; 0 if it is no such command."""
    if end < head + 4 or load_u8(head) != FIXED_ARRAY + 2 or load_u8(head + 1) != _DELIVER:
        return 0
    return head + 3 if load_u8(head + 2) == FIXED_ARRAY + 1 else 0


@kernel("int64(int64,int64,int64,int64)")
def _take_delivery(row: int, pair: int, target: int, counted_none: int) -> int:
    """Take the oldest message of a ring into the list at `target`: its consumer's id, 0 if it is none of these."""
    found = peek_pair(row, pair)
    if found < 0:
        return 0
    head = pair + PAIR_HEAD
    end = head + load_i64(pair + PAIR_HEAD_BYTES)
    at = _read_consumer(head, end)
    if at == 0 or read_unsigned(at, end, pair + _NUMBER) != end:
        return 0
    bundle, size = load_i64(pair + PAIR_BODY), load_i64(pair + PAIR_BODY_BYTES)
    if size < FRAME_AT or load_u32(bundle) != BUNDLE_MAGIC or load_u32(bundle + _AT_COUNT) != 1:
        return 0
    if load_u32(bundle + _AT_FRAME_BYTES) != size - FRAME_AT:
        return 0
    if keep_bytes(target, 0, bundle, size, counted_none) == 0:
        return 0
    release_pair(row, found)
    return load_i64(pair + _NUMBER)


_take = direct(_take_delivery)


class Deliveries:
    """Takes such messages for one thread at a time."""

    def __init__(self) -> None:
        self._cell: list[bytes | None] = [None]
        self._pair = np.zeros(PAIR_WORDS + 1, np.int64)
        self._address: int = self._pair.ctypes.data

    def take_all(self, duplex: Duplex | None, receivers: Mapping[int, Receiver]) -> int:
        """Hand on such messages as long as one comes first in the rings; how many."""
        count, cell = 0, self._cell
        if duplex is None or not OBJECTS_READABLE:
            return 0
        while consumer_id := _take(duplex.row, self._address, id(cell), COUNTED_NONE):
            count += 1
            bundle, cell[0] = cell[0] or b"", None
            receiver = receivers.get(consumer_id)
            if receiver is not None:
                receiver.on_frame(memoryview(bundle), FRAME_AT, len(bundle) - FRAME_AT)
        return count
