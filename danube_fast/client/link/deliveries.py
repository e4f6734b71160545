r"""A DELIVER of one frame, taken in one kernel call: the bundle as a bytes object, and for which consumer.

rings ---- DELIVER of one frame ---> receiver          anything else stays first in the ring
socket --- DELIVER of one frame ---> receiver          anything else stays in hand (`net/port_row.py`)
\-- acks that have rows -----> rows              (over rings a leader hands them over while it sleeps)
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from danube_fast.client.link.buffers import FRAME_AT
from danube_fast.client.link.published import hand_over
from danube_fast.client.link.users import Receiver
from danube_fast.frame.bundle import bundle_entries
from danube_fast.frame.check import check_frame
from danube_fast.frame.cpython import AT_BYTES_DATA, COUNTED_NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import (
    ALL_FLAGS,
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
from danube_fast.net.port_kernels import SIZE_MASK
from danube_fast.net.port_row import (
    CONTENT,
    HEAD_BYTES,
    HEAD_FOUND,
    IS_SMALL,
    NOTHING,
    SMALL_BYTES_MAX,
    drop_body,
    find_body,
    keep_head,
    receive_body,
    receive_next,
)
from danube_fast.net.protocol import Deliver, op_code
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

__all__ = ["Deliveries", "hand_on", "take_from_rings", "take_from_socket"]

Take: TypeAlias = Callable[[int, int, int, int], int]
"""A kernel: (row, words of `Deliveries`, list, where None counts its references) -> consumer's id."""
_DELIVER = op_code(Deliver)
_NUMBER, _IS_END, _SOUND, _BODY, _ANSWERS, _LINK = (
    (PAIR_WORDS + word) * WORD_BYTES for word in range(6)
)
_WORDS = PAIR_WORDS + 6
_END_WORD, _SOUND_WORD, _BODY_WORD, _ANSWERS_WORD, _LINK_WORD = range(PAIR_WORDS + 1, _WORDS)
_EAGAIN = errno.EAGAIN
_AT_COUNT = 4
_AT_FRAME_BYTES = FRAME_AT - 4


@kernel("int64(int64,int64,int64)")
def _read_consumer(head: int, end: int, number: int) -> int:
    """Id of the one consumer of a DELIVER; 0 if it is no such command. `number` is scratch for a word."""
    if end < head + 4 or load_u8(head) != FIXED_ARRAY + 2 or load_u8(head + 1) != _DELIVER:
        return 0
    if load_u8(head + 2) != FIXED_ARRAY + 1 or read_unsigned(head + 3, end, number) != end:
        return 0
    return load_i64(number)


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


@kernel("int64(int64,int64,int64,int64,int64)")
def _keep_frame(bundle: int, size: int, pair: int, target: int, counted_none: int) -> int:
    """Put a bundle of one frame into the list at `target`, as bytes, and note what `_check` finds; 0 if it is none, or
    memory ran out."""
    if size < FRAME_AT or load_u32(bundle) != BUNDLE_MAGIC or load_u32(bundle + _AT_COUNT) != 1:
        return 0
    if load_u32(bundle + _AT_FRAME_BYTES) != size - FRAME_AT:
        return 0
    item = keep_bytes(target, 0, bundle, size, counted_none)
    if item == 0:
        return 0
    _check(item + AT_BYTES_DATA + FRAME_AT, size - FRAME_AT, pair)
    return 1


@kernel("int64(int64,int64,int64,int64)")
def _take_from_rings(row: int, pair: int, target: int, counted_none: int) -> int:
    """Take the oldest message of a ring into the list at `target`: its consumer's id, 0 if it is none of these. Notes
    what `_check` finds, and whether the ring has come to its end."""
    store_u64(pair + _IS_END, 0)
    if target == 0:
        return 0
    found = peek_pair(row, pair)
    if found < 0:
        return 0
    head = pair + PAIR_HEAD
    consumer_id = _read_consumer(head, head + load_i64(pair + PAIR_HEAD_BYTES), pair + _NUMBER)
    if consumer_id == 0:
        return 0
    bundle, size = load_i64(pair + PAIR_BODY), load_i64(pair + PAIR_BODY_BYTES)
    if _keep_frame(bundle, size, pair, target, counted_none) == 0:
        return 0
    release_pair(row, found)
    store_u64(pair + _IS_END, 1 if _front(word_of(row, IN), word_of(row, CAPACITY)) == EMPTY else 0)
    return consumer_id


@kernel("int64(int64,int64,int64,int64)")
def _take_body(port: int, pair: int, target: int, counted_none: int) -> int:
    """Take the part behind a DELIVER as `_keep_frame` does; it stays in hand, and 0 is returned, if there are more, or
    it is large or no frame alone."""
    size = receive_body(port)
    if size < 0 or size > SMALL_BYTES_MAX:  # one with more behind it has a bit above its size
        return 0
    if _keep_frame(find_body(port), size, pair, target, counted_none) == 0:
        return 0
    drop_body(port)
    return 1


@kernel("int64(int64,int64,int64,int64)")
def _take_from_socket(port: int, pair: int, target: int, counted_none: int) -> int:
    """Hand acks over to their rows, and take the delivery behind them, as `_take_from_rings` does. What is none of these
    stays in hand. A body is received only if the last one was small: its size is not known before."""
    store_u64(pair + _IS_END, 0)
    if load_i64(port + HEAD_FOUND) != NOTHING:
        return 0
    answers, link = load_i64(pair + _ANSWERS), load_i64(pair + _LINK)
    while True:
        found = receive_next(port)
        if found < 0:  # of any other error Python hears when it tries
            store_u64(pair + _IS_END, 1 if found == -_EAGAIN else 0)
            return 0
        head, size = port + CONTENT, found & SIZE_MASK
        has_more = found != size
        if size <= HEAD_BYTES and not has_more:
            if hand_over(answers, link, head, head + size, pair + _NUMBER) != 0:
                continue
        elif size <= HEAD_BYTES and target != 0 and load_i64(port + IS_SMALL) != 0:
            consumer_id = _read_consumer(head, head + size, pair + _NUMBER)
            if consumer_id != 0 and _take_body(port, pair, target, counted_none) != 0:
                return consumer_id
        keep_head(port, found)
        return 0


def hand_on(
    consumer_ids: Sequence[int], bundles: Sequence[Any], receivers: Mapping[int, Receiver]
) -> None:
    """Hand on the frames of any DELIVER. Raises DataLoss for what is no bundle."""
    index = 0
    for bundle in bundles:
        kind = type(bundle)
        buffer = (
            bundle if kind is memoryview else memoryview(bundle) if kind is bytes else bundle.buffer
        )
        for _, start, frame_bytes in bundle_entries(buffer):
            receiver = receivers.get(consumer_ids[index])
            index += 1
            if receiver is not None:
                receiver.on_frame(buffer, start, frame_bytes)


take_from_rings: Take = direct(_take_from_rings)
take_from_socket: Take = direct(_take_from_socket)


class Deliveries:
    """Takes such messages of one connection, for one thread at a time."""

    def __init__(self, answers: int, link: int) -> None:
        """With the table of `Answers`, and the connection's number there."""
        self._cell: list[bytes | None] = [None]
        self._pair = np.zeros(_WORDS, np.int64)
        self._words = self._pair.data
        self._words[_ANSWERS_WORD], self._words[_LINK_WORD] = answers, link
        self._address: int = self._pair.ctypes.data
        self.are_all = False
        """Whether nothing came behind those that were taken the last time."""

    def take_all(self, take: Take, row: int, receivers: Mapping[int, Receiver]) -> int:
        """Hand on such messages as long as one comes first in the rings, or the socket, of that row; how many."""
        count, cell, words = 0, self._cell, self._words
        self.are_all = False
        target = id(cell) if OBJECTS_READABLE else 0
        while not self.are_all and (consumer_id := take(row, self._address, target, COUNTED_NONE)):
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
        self.are_all = words[_END_WORD] != 0
        return count
