"""Token buckets in shared memory: a rate that all workers of a broker draw on together.

    row   key u64 | messages paid until ns | bytes paid until ns | level      32 bytes, 0 = free

A bucket is one number, the time until which what was taken is paid for (the "theoretical arrival
time" of the generic cell rate algorithm, ITU-T I.371): taking n at a rate of r moves it by n / r
seconds, and as long as it is not more than the burst ahead of now there is something to take. Rows
are found by key in open addressing; the first who asks for a key takes a free row. Who writes: any
worker, by compare-and-exchange; a worker that dies leaves nothing half done.
"""

from __future__ import annotations

import os

from danube_fast.clock import SECOND_NS
from danube_fast.errors import ResourceExhausted
from danube_fast.frame.kernel import direct, kernel
from danube_fast.ring.atomics import compare_exchange, load_acquire, store_release
from danube_fast.ring.layout import (
    AT_BUCKET_BYTES,
    AT_BUCKET_KEY,
    AT_BUCKET_MESSAGES,
    BUCKET_ROW_BYTES,
    BUCKET_ROWS,
    BUCKET_TABLE_BYTES,
    WORD_BYTES,
)
from danube_fast.ring.memory import address_of_memory, create_memfd, map_fd, words_of

__all__ = ["BURST_NS", "Bucket", "BucketTable", "JointBucket"]

PROBES_MAX = 4096
_ROOM_MAX = 1 << 30
BURST_NS = 250_000_000
"""So much of a second's worth may be taken at once: who comes late for its share loses nothing."""


@kernel("void(int64,int64,int64,int64)")
def _pay(word: int, now_ns: int, count: int, rate: int) -> None:
    """Take `count` at `rate` a second, whatever is there."""
    while rate > 0 and count > 0:
        paid = load_acquire(word)
        if compare_exchange(word, paid, max(paid, now_ns) + count * SECOND_NS // rate):
            break


@kernel("int64(int64,int64,int64,int64,int64)")
def _wait(row: int, now_ns: int, messages_rate: int, bytes_rate: int, burst_ns: int) -> int:
    """In how many ns something may be taken; a rate of 0 is none."""
    wait = 0
    if messages_rate > 0:
        wait = max(wait, load_acquire(row + AT_BUCKET_MESSAGES) - now_ns - burst_ns)
    if bytes_rate > 0:
        wait = max(wait, load_acquire(row + AT_BUCKET_BYTES) - now_ns - burst_ns)
    return wait


@kernel("int64(int64,int64)")
def find_row(table: int, key: int) -> int:
    """Address of the row of a key, taken if need be; 0: there is none left."""
    for probe in range(PROBES_MAX):
        row = AT_BUCKET_KEY + table + ((key + probe) & (BUCKET_ROWS - 1)) * BUCKET_ROW_BYTES
        if load_acquire(row) == key or compare_exchange(row, 0, key):
            return row
        if load_acquire(row) == key:
            return row
    return 0


@kernel("int64(int64,int64,int64,int64)")
def _room(word: int, now_ns: int, rate: int, burst_ns: int) -> int:
    """How many may be taken at `rate` a second before the burst is used up."""
    left = now_ns + burst_ns - max(load_acquire(word), now_ns)
    return max(1, left * rate // SECOND_NS)


@kernel("void(int64)")
def _forgive(row: int) -> None:
    """All that was taken counts as paid for."""
    store_release(row + AT_BUCKET_MESSAGES, 0)
    store_release(row + AT_BUCKET_BYTES, 0)


_find, _pay_direct, _forgive_direct = direct(find_row), direct(_pay), direct(_forgive)
_room_direct, _wait_direct = direct(_room), direct(_wait)


class BucketTable:
    """The buckets of one broker. Made by `create`, mapped by every process from its descriptor."""

    def __init__(self, fd: int) -> None:
        """Map the table in `fd`; owns `fd` from here."""
        self.fd = fd
        self._map = map_fd(fd)
        self._address = address_of_memory(self._map)
        self._words = words_of(self._map)

    @classmethod
    def create(cls) -> BucketTable:
        """A new table; memory is used as rows are."""
        return cls(create_memfd("danube-fast-buckets", BUCKET_TABLE_BYTES))

    def address(self, key: int) -> int:
        """Address of the row of a key (not 0). Raises ResourceExhausted if all rows are taken."""
        row = int(_find(self._address, key))
        if not row:
            raise ResourceExhausted(
                f"{BUCKET_ROWS} rates were in use since the start; restart the broker to set more"
            )
        return row

    def word(self, address: int) -> int:
        """Read a word at an address of this table."""
        return self._words[(address - self._address) // WORD_BYTES]

    def set_word(self, address: int, value: int) -> None:
        """Write a word at an address of this table."""
        self._words[(address - self._address) // WORD_BYTES] = value

    def close(self) -> None:
        """Unmap and close; no kernel may use an address any more."""
        self._words.release()
        self._map.close()
        os.close(self.fd)


class Bucket:
    """One row, as its users know it: look how much may go, let it go, and take as much."""

    def __init__(
        self, row: int, messages_rate: int, bytes_rate: int, burst_ns: int = BURST_NS
    ) -> None:
        """`row` from `BucketTable.address`; rates a second, 0 = none."""
        self._row, self._burst_ns = row, burst_ns
        self._messages_rate = messages_rate
        self._bytes_rate = bytes_rate

    @property
    def rates(self) -> tuple[int, int]:
        """Messages and bytes a second."""
        return self._messages_rate, self._bytes_rate

    def forgive(self) -> None:
        """Cancel what is owed."""
        _forgive_direct(self._row)

    def wait_ns(self, now_ns: int) -> int:
        """In how many ns something may be taken; 0: now."""
        return int(
            _wait_direct(self._row, now_ns, self._messages_rate, self._bytes_rate, self._burst_ns)
        )

    def room(self, now_ns: int, message_bytes: int) -> int:
        """Messages of so many bytes that may be taken now; at least 1 when nothing is owed."""
        room, burst_ns = _ROOM_MAX, self._burst_ns
        if self._messages_rate:
            word = self._row + AT_BUCKET_MESSAGES
            room = _room_direct(word, now_ns, self._messages_rate, burst_ns)
        if self._bytes_rate:
            byte_count = _room_direct(
                self._row + AT_BUCKET_BYTES, now_ns, self._bytes_rate, burst_ns
            )
            room = min(room, max(1, byte_count // max(1, message_bytes)))
        return int(room)

    def take(self, now_ns: int, messages: int, byte_count: int) -> None:
        """Charge the bucket."""
        _pay_direct(self._row + AT_BUCKET_MESSAGES, now_ns, messages, self._messages_rate)
        _pay_direct(self._row + AT_BUCKET_BYTES, now_ns, byte_count, self._bytes_rate)


class JointBucket:
    """Two buckets that are drawn on together: nothing goes while either is used up."""

    def __init__(self, own: Bucket | None, shared: Bucket) -> None:
        """`own`: of one topic or subscription; `shared`: of all of a namespace."""
        self.own, self.shared = own, shared

    def wait_ns(self, now_ns: int) -> int:
        """In how many ns something may be taken from both; 0: now."""
        own_ns = 0 if self.own is None else self.own.wait_ns(now_ns)
        return max(own_ns, self.shared.wait_ns(now_ns))

    def room(self, now_ns: int, message_bytes: int) -> int:
        """Messages of so many bytes that may be taken now from both, at least 1 when nothing is owed."""
        room = self.shared.room(now_ns, message_bytes)
        return room if self.own is None else min(room, self.own.room(now_ns, message_bytes))

    def take(self, now_ns: int, messages: int, byte_count: int) -> None:
        """Charge both."""
        self.shared.take(now_ns, messages, byte_count)
        if self.own is not None:
            self.own.take(now_ns, messages, byte_count)
