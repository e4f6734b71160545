"""Whether what arrived is what was sent: every byte, once, in order for each stream.

A kernel walks the received list and compares each payload with the bytes of its number (about 12 ns
a message of 100 B; joining and comparing costs 30). It runs inside the clock.

Prepared messages that are sent in turn, pass after pass, carry the same numbers again:

    sent      0 1 2 ... n-1 | 0 1 2 ... n-1 | 0 1 2 ...       n prepared, `wanted` in all
    pass      0               1               2

A stream comes in order, so each knows the number and the pass that are due. A number ahead of what is due
by half a pass at most has left a gap; any other one is late, and counts as a duplicate. Nothing that is
missing or comes twice is ever right: who loses or repeats whole passes has too few or too many messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube_fast.bench.load.payloads import NUMBER_BYTES, Payloads
from danube_fast.errors import InvalidArgument
from danube_fast.frame.cpython import (
    AT_BYTES_DATA,
    AT_ITEM_COUNT,
    AT_LIST_ITEMS,
    AT_TYPE,
    BYTES_TYPE,
    OBJECTS_READABLE,
    POINTER_BYTES,
)
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.memory import load_i64, memory_compare, store_u64

__all__ = ["Verifier"]

AT_DUPLICATED = 0
AT_CORRUPTED = 8
AT_WANTED = 16
AT_NEXT = 24
AT_PASS = 32
"""Of the state: number that is due, and its pass, of each stream, from here on."""
STREAM_BYTES = 16
_WORD_BYTES = 8


@kernel("int64(int64,int64,int64,int64,int64)")
def _advance(state: int, number: int, total: int, streams: int, ahead_max: int) -> int:
    """A number that came on its stream: 1 if it is not behind what is due, else 0."""
    stream = state + STREAM_BYTES * (number % streams)
    turn = load_i64(stream + AT_PASS)
    ahead = number - load_i64(stream + AT_NEXT)
    if ahead < 0:
        ahead += total
        turn += 1
    if ahead > ahead_max or turn * total + number >= load_i64(state + AT_WANTED):
        return 0
    following = number + streams
    if following >= total:
        following -= total
        turn += 1
    store_u64(stream + AT_NEXT, following)
    store_u64(stream + AT_PASS, turn)
    return 1


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64,int64)")
def _verify(
    items_list: int,
    count: int,
    bytes_type: int,
    expected: int,
    message_bytes: int,
    total: int,
    streams: int,
    ahead_max: int,
    state: int,
) -> int:
    """Compare `count` items of a list; counts stand in the state. Returns how many were right."""
    items = load_i64(items_list + AT_LIST_ITEMS)
    right = 0
    for index in range(count):
        item = load_i64(items + POINTER_BYTES * index)
        if (
            load_i64(item + AT_TYPE) != bytes_type
            or load_i64(item + AT_ITEM_COUNT) != message_bytes
        ):
            store_u64(state + AT_CORRUPTED, load_i64(state + AT_CORRUPTED) + 1)
            continue
        data = item + AT_BYTES_DATA
        number = load_i64(data)
        known = 0 <= number < total
        if not known or memory_compare(data, expected + number * message_bytes, message_bytes) != 0:
            store_u64(state + AT_CORRUPTED, load_i64(state + AT_CORRUPTED) + 1)
            continue
        if _advance(state, number, total, streams, ahead_max) == 0:
            store_u64(state + AT_DUPLICATED, load_i64(state + AT_DUPLICATED) + 1)
            continue
        right += 1
    return right


_call_advance = direct(_advance)
_call_verify = direct(_verify)


class Verifier:
    """Message `number` belongs to stream `number % streams`; each stream must come in order."""

    def __init__(self, payloads: Payloads, streams: int, wanted: int | None = None) -> None:
        """`wanted` messages in all (default: each prepared one once); more than were prepared if they are
        sent in turn: then each pass must hold as many of every stream. Raises InvalidArgument."""
        total = payloads.count
        wanted = total if wanted is None else wanted
        is_cyclic = wanted > total
        if is_cyclic and total % streams:
            raise InvalidArgument(
                f"{total} prepared messages cannot be sent in turn on {streams} streams; prepare a "
                f"multiple of {streams}"
            )
        self._payloads = payloads
        self._streams = streams
        self._ahead_max = total // 2 if is_cyclic else total
        self._state: Any = np.zeros((AT_NEXT + STREAM_BYTES * streams) // _WORD_BYTES, np.int64)
        self._state[AT_NEXT // _WORD_BYTES :: STREAM_BYTES // _WORD_BYTES] = np.arange(streams)
        self._address = int(self._state.ctypes.data)
        self.expect(wanted)
        self.received = 0
        self.right = 0

    def take(self, received: list[Any]) -> None:
        """Check payloads in the order in which they came."""
        self.received += len(received)
        if not OBJECTS_READABLE:
            self._take_slowly(received)
            return
        self.right += _call_verify(
            id(received),
            len(received),
            BYTES_TYPE,
            self._payloads.address,
            self._payloads.message_bytes,
            self._payloads.count,
            self._streams,
            self._ahead_max,
            self._address,
        )

    def _take_slowly(self, received: list[Any]) -> None:
        """What the kernel does, where it cannot read objects."""
        for item in received:
            number = int.from_bytes((item or b"")[:NUMBER_BYTES], "little")
            if number >= self._payloads.count or item != self._payloads[number]:
                self._state[1] += 1
            elif _call_advance(
                self._address, number, self._payloads.count, self._streams, self._ahead_max
            ):
                self.right += 1
            else:
                self._state[0] += 1

    @property
    def duplicated(self) -> int:
        """Messages that came again, or after a later one of their stream."""
        return int(self._state[0])

    @property
    def corrupted(self) -> int:
        """Messages that nobody sent."""
        return int(self._state[1])

    def expect(self, wanted: int) -> None:
        """So many messages in all: what comes beyond them was not sent so often."""
        self._state[AT_WANTED // _WORD_BYTES] = wanted

    @property
    def wanted(self) -> int:
        """Messages in all."""
        return int(self._state[AT_WANTED // _WORD_BYTES])

    @property
    def lost(self) -> int:
        """Messages that did not come (in their place)."""
        return self.wanted - self.right
