"""Whether what arrived is what was sent: every byte, once, in order for each stream.

A kernel walks the received list and compares each payload with the bytes of its number (about 12 ns
a message of 100 B; joining and comparing costs 30). It runs inside the clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from danube_fast.bench.payloads import NUMBER_BYTES, Payloads
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
AT_NEXT = 16
"""Of the state: next number of each stream, from here on."""


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def _verify(
    items_list: int,
    count: int,
    bytes_type: int,
    expected: int,
    message_bytes: int,
    total: int,
    streams: int,
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
        due = state + AT_NEXT + 8 * (number % streams)
        if number < load_i64(due):
            store_u64(state + AT_DUPLICATED, load_i64(state + AT_DUPLICATED) + 1)
            continue
        store_u64(due, number + streams)
        right += 1
    return right


_call_verify = direct(_verify)


class Verifier:
    """Message `number` belongs to stream `number % streams`; each stream must come in order."""

    def __init__(self, payloads: Payloads, streams: int) -> None:
        self._payloads = payloads
        self._streams = streams
        self._state: Any = np.zeros(2 + streams, np.int64)
        self._state[2:] = np.arange(streams)
        self._address = int(self._state.ctypes.data)
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
            self._address,
        )

    def _take_slowly(self, received: list[Any]) -> None:
        """What the kernel does, where it cannot read objects."""
        for item in received:
            number = int.from_bytes((item or b"")[:NUMBER_BYTES], "little")
            if number >= self._payloads.count or item != self._payloads[number]:
                self._state[1] += 1
            elif number < self._state[2 + number % self._streams]:
                self._state[0] += 1
            else:
                self._state[2 + number % self._streams] = number + self._streams
                self.right += 1

    @property
    def duplicated(self) -> int:
        """Messages that came again, or after a later one of their stream."""
        return int(self._state[0])

    @property
    def corrupted(self) -> int:
        """Messages that nobody sent."""
        return int(self._state[1])

    @property
    def lost(self) -> int:
        """Messages that did not come (in their place)."""
        return self._payloads.count - self.right
