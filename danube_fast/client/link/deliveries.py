"""A DELIVER of one frame, taken out of a ring in one kernel call: the bundle as a bytes object, and for which consumer.

Anything else stays first in the ring, for the ordinary way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from danube_fast.client.link.users import Receiver
from danube_fast.frame.check import check_frame
from danube_fast.frame.cpython import AT_BYTES_DATA, COUNTED_NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import (
    ALL_FLAGS,
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    BUNDLE_MAGIC,
    FLAG_PAD,
    HEADER_BYTES,
    At,
    Codec,
)
from danube_fast.frame.memory import load_i64, load_u8, load_u16, load_u32, store_u64
from danube_fast.frame.unpack_kernels import keep_bytes
from danube_fast.frame.view import PLACE_FIELDS, FrameView
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, read_unsigned
from danube_fast.net.protocol import Deliver, op_code
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.duplex_kernel import (
    CAPACITY,
    IN,
    PAIR_BODY,
    PAIR_BODY_BYTES,
    PAIR_HEAD,
    PAIR_HEAD_BYTES,
    PAIR_WORDS,
    peek_pair,
    release_pair,
    word_of,
)
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.ring.spsc_kernel import EMPTY, _front

__all__ = ["Deliveries"]

FRAME_AT = BUNDLE_HEADER_BYTES + BUNDLE_ENTRY_BYTES
"""Where the frame begins in its bundle."""
_DELIVER = op_code(Deliver)
_NUMBER, _IS_END, _SOUND, _BODY = ((PAIR_WORDS + word) * WORD_BYTES for word in range(4))
_WORDS = PAIR_WORDS + 4
_END_WORD, _SOUND_WORD, _BODY_WORD = range(PAIR_WORDS + 1, _WORDS)
_AT_COUNT = 4
_AT_FRAME_BYTES = FRAME_AT - 4


@kernel("int64(int64,int64)")
def _read_consumer(head: int, end: int) -> int:
    """Where the id of the one consumer of a DELIVER begins; 0 if it is no such command."""
    if end < head + 4 or load_u8(head) != FIXED_ARRAY + 2 or load_u8(head + 1) != _DELIVER:
        return 0
    return head + 3 if load_u8(head + 2) == FIXED_ARRAY + 1 else 0


@kernel("int64(int64,int64,int64)")
def _check(frame: int, byte_count: int, pair: int) -> int:
    """Note the address of a frame, 0 if it is not sound, and that of its body, 0 if that is compressed or not there."""
    is_sound = check_frame(frame, byte_count, ALL_FLAGS, 1) > 0
    is_plain = (
        load_u8(frame + At.CODEC) == Codec.NONE and load_u16(frame + At.FLAGS) & FLAG_PAD == 0
    )
    store_u64(pair + _SOUND, frame if is_sound else 0)
    store_u64(pair + _BODY, frame + HEADER_BYTES if is_sound and is_plain else 0)
    return 0


@kernel("int64(int64,int64,int64,int64)")
def _take_delivery(row: int, pair: int, target: int, counted_none: int) -> int:
    """Take the oldest message of a ring into the list at `target`: its consumer's id, 0 if it is none of these. Notes
    what `_check` finds, and whether the ring has come to its end."""
    found = peek_pair(row, pair)
    store_u64(pair + _IS_END, 0)
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
    item = keep_bytes(target, 0, bundle, size, counted_none)
    if item == 0:
        return 0
    release_pair(row, found)
    store_u64(pair + _IS_END, 1 if _front(word_of(row, IN), word_of(row, CAPACITY)) == EMPTY else 0)
    _check(item + AT_BYTES_DATA + FRAME_AT, size - FRAME_AT, pair)
    return load_i64(pair + _NUMBER)


_take = direct(_take_delivery)


class Deliveries:
    """Takes such messages for one thread at a time."""

    def __init__(self) -> None:
        self._cell: list[bytes | None] = [None]
        self._pair = np.zeros(_WORDS, np.int64)
        self._words = self._pair.data
        self._address: int = self._pair.ctypes.data
        self.are_all = False
        """Whether nothing came behind those that were taken the last time."""

    def take_all(self, duplex: Duplex | None, receivers: Mapping[int, Receiver]) -> int:
        """Hand on such messages as long as one comes first in the rings; how many."""
        count, cell, words = 0, self._cell, self._words
        self.are_all = False
        if duplex is None or not OBJECTS_READABLE:
            return 0
        while not self.are_all and (
            consumer_id := _take(duplex.row, self._address, id(cell), COUNTED_NONE)
        ):
            count += 1
            self.are_all = words[_END_WORD] != 0
            bundle, cell[0] = cell[0] or b"", None
            receiver = receivers.get(consumer_id)
            if receiver is None:
                continue
            if address := words[_SOUND_WORD]:
                view = FrameView.checked(bundle, FRAME_AT, address, words[_BODY_WORD])
                receiver.on_checked(view, PLACE_FIELDS.unpack_from(bundle, FRAME_AT))
            else:
                receiver.on_frame(memoryview(bundle), FRAME_AT, len(bundle) - FRAME_AT)
        return count
