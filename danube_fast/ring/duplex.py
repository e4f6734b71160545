"""Duplex: messages of several parts between two processes of one host, over two rings and two bells.

    client                      one sealed memfd                       worker
      send(parts)  -->  | ring up    lead, part, part ... |  -->  receive(): copies
      receive()    <--  | ring down  lead, part, part ... |  <--  send(parts)

      eventfd up:  the client writes it; the worker's epoll tells of each write, and the worker never reads it
      pipe down:   the worker writes it, the client reads it; its end is the end of the worker
      socket:      carries nothing any more; its end is the end of the client

A message is one record: u32 count, count x u32 size, then the parts back to back. One that is too
large for a record goes as several, each behind a lead of MORE, the last behind END; they are what
its one record would have been, in slices.

Neither side trusts the other. Everything is copied before it is looked at and each length is read
once, so a peer that scribbles gets DataLoss on its own rings. Both sides of an eventfd have the same
open file: a client may make calls on it block, fill it, or take its signals away. The worker makes no
call on it, so such a client is merely not heard. What the worker writes is a pipe, of which each end is
an open file of its own: it does not block, and it is full only while the client has signals to read.
(Why not the socket: decision 41.)

Who finds no room says so in the ring with a new number; the reader answers each number with one
signal, as soon as half the ring is free.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from danube_fast.errors import DataLoss
from danube_fast.ring import duplex_kernel, layout
from danube_fast.ring.duplex_kernel import (
    BELL_IN,
    BELL_OUT,
    CAPACITY,
    ENDED,
    IN,
    OUT,
    ROW_WORDS,
    SIGNAL,
    WAITS,
)
from danube_fast.ring.spsc import SpscRing

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PARTS_MAX", "Duplex", "duplex_bytes"]

PARTS_MAX = 64
_MORE = 0xFFFF_FFFE
_END = 0xFFFF_FFFF
_WORD = struct.Struct("<I")
_WORD_BYTES = _WORD.size
_LEADS = [struct.Struct(f"<{1 + count}I") for count in range(PARTS_MAX + 1)]
_SMALL_BYTES = 16 * 1024
_PAGE_BYTES = mmap.PAGESIZE
_ring_peer = duplex_kernel.ring_peer
_ask_room = duplex_kernel.ask_room
_answer_room = duplex_kernel.answer_room
_arm = duplex_kernel.arm
_hear = duplex_kernel.hear


def _half_bytes(capacity_bytes: int) -> int:
    """One ring and what fills its last page."""
    return -(-layout.ring_bytes(capacity_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def duplex_bytes(capacity_bytes: int) -> int:
    """Memory for two rings of that capacity."""
    return 2 * _half_bytes(capacity_bytes)


class Duplex:
    """One side of such a connection. One thread at a time."""

    __slots__ = (
        "_in",
        "_memory",
        "_message_bytes_max",
        "_out",
        "_record_bytes_max",
        "_socket",
        "_whole",
        "row",
        "slices",
        "words",
    )  # fmt: skip

    def __init__(
        self, memory: mmap.mmap, sock: socket.socket, bells: tuple[int, int], capacity_bytes: int,
        *, serves: bool, message_bytes_max: int,
    ) -> None:  # fmt: skip
        """Over `memory` of `duplex_bytes(capacity_bytes)` whose two rings exist, and `bells`: the descriptor that
        wakes the peer, and the one by which the peer wakes this side. `close` closes them, and the socket.

        The side that `serves` reads the first ring and writes the second. Raises DataLoss or
        FailedPrecondition if the rings are not there; then all descriptors are left to the caller.
        """
        half = _half_bytes(capacity_bytes)
        view = memoryview(memory)
        rings = SpscRing.attach(view[:half]), SpscRing.attach(view[half : 2 * half])
        self._in, self._out = rings if serves else rings[::-1]
        self._socket = sock
        self._memory = np.zeros(ROW_WORDS, np.int64)
        self.words = self._memory.data
        """Its words: that of SESSION is the owner's, the number of the client's session, 0: none."""
        self.row: int = self._memory.ctypes.data
        """Address of its words, for kernels (`duplex_kernel.py`); it must outlive their use."""
        self.words[IN], self.words[OUT] = self._in.address, self._out.address
        self.words[CAPACITY], self.words[SIGNAL] = capacity_bytes, 1
        self.words[BELL_OUT], self.words[BELL_IN] = bells
        self._record_bytes_max = self._out.record_bytes_max
        self._message_bytes_max = message_bytes_max
        self._whole = bytearray()
        """Slices of a large message that is coming in."""
        self.slices: list[tuple[bytes, memoryview]] = []
        """Parts of a large message that wait for room: nothing else may go before them."""

    def fileno(self) -> int:
        """The bell to sleep on, behind `arm`. Of the side that serves it is an eventfd, which shows each signal as an
        edge; the client's pipe is readable when there are signals, or the worker has ended."""
        return self.words[BELL_IN]

    @property
    def end_fileno(self) -> int:
        """The socket: readable when the peer has ended. A client may leave it alone, as its pipe ends too."""
        return self._socket.fileno()

    def close(self) -> None:
        """End it. The memory goes with the last reference."""
        bells = self.words[BELL_OUT], self.words[BELL_IN]
        self.words[BELL_OUT] = self.words[BELL_IN] = -1
        for bell in bells:
            if bell >= 0:
                os.close(bell)
        self._socket.close()

    # ------------------------------------------------------------ out

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Append one message of byte buffers; False if there is no room, and nothing was sent.

        Of a large one the rest may go later, with `flush`. Raises DataLoss for a damaged ring.
        """
        if self.slices and not self.flush():
            return False
        sizes = [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]
        lead = _LEADS[len(sizes)].pack(len(sizes), *sizes)
        size = len(lead) + sum(sizes)
        if size <= _SMALL_BYTES:
            # bytes objects go in with one kernel call, which is worth the copy
            parts = list(map(bytes, parts))
        if size <= self._record_bytes_max:
            if not self._push(lead, *parts):
                return False
        else:
            self.slices = self._slices(b"".join((lead, *parts)))
            self._flush()
        _ring_peer(self.row)
        return True

    def flush(self) -> bool:
        """Send on what is left of a large message; whether nothing is left."""
        if self.slices and self._flush():
            _ring_peer(self.row)
        return not self.slices

    def wait_no_more(self) -> None:
        """Say that nothing waits for room, since the last complaint was made."""
        self.words[WAITS] = 0

    def _flush(self) -> int:
        done = 0
        for lead, piece in self.slices:
            if not self._push(lead, piece):
                break
            done += 1
        del self.slices[:done]
        return done

    def _slices(self, whole: bytes) -> list[tuple[bytes, memoryview]]:
        room = self._record_bytes_max - _WORD_BYTES
        view = memoryview(whole)
        starts = range(0, len(view), room)
        return [
            (_WORD.pack(_MORE if start + room < len(view) else _END), view[start : start + room])
            for start in starts
        ]

    def _push(self, *parts: Buffer) -> bool:
        if self._out.try_push(*parts):
            return True
        _ask_room(self.row)
        return self._out.try_push(*parts)

    # ------------------------------------------------------------ in

    @property
    def readable(self) -> bool:
        """Whether a record waits."""
        return self._in.readable

    def receive(self) -> list[Any] | None:
        """The oldest message, copied, or None: bytes, or memoryviews of one that came in slices. Raises DataLoss if the
        peer wrote nonsense."""
        inbound = self._in
        while True:
            record = inbound.pop(_SMALL_BYTES)
            if record is not None:
                message = self._take(record)
            else:
                shown = inbound.peek()
                if shown is None:
                    return None
                message = self._take(shown)
                inbound.release()
            _answer_room(self.row)
            if message is not None:
                return message

    def _take(self, record: bytes | memoryview) -> list[Any] | None:
        """A copy of the message in a record; None if it is a slice and more are to come."""
        if len(record) < _WORD_BYTES:
            raise DataLoss(f"a record of {len(record)} bytes has no lead")
        (count,) = _WORD.unpack_from(record)
        if count < _MORE:
            parts = _split(record, count)
            # a view shows what the peer may write to yet
            return parts if type(record) is bytes else list(map(bytes, parts))
        self._whole += record[_WORD_BYTES:]
        if len(self._whole) > self._message_bytes_max:
            raise DataLoss(f"a message is over the limit of {self._message_bytes_max} bytes")
        if count == _MORE:
            return None
        whole, self._whole = memoryview(self._whole), bytearray()
        return _split(whole, _WORD.unpack_from(whole)[0] if len(whole) >= _WORD_BYTES else 0)

    def arm(self) -> bool:
        """Ask the peer to signal what it sends. False if there is something already."""
        return bool(_arm(self.row))

    def hear(self) -> bool:
        """For the client: take the signals that came. False: the worker is gone, and nothing will
        come any more behind what the ring holds."""
        return bool(_hear(self.row) != ENDED)


def _split(image: bytes | memoryview, count: int) -> list[Any]:
    """The parts of a message, as they lie in `image`. The lead is read once: `image` may change under our eyes."""
    start = _WORD_BYTES * (1 + count)
    if not 0 < count <= PARTS_MAX or len(image) < start:
        raise DataLoss(f"a message of {count} parts in {len(image)} bytes cannot be")
    _, *sizes = _LEADS[count].unpack(bytes(image[:start]))
    if start + sum(sizes) != len(image):
        raise DataLoss(f"parts of {sum(sizes)} bytes do not fill a message of {len(image)}")
    parts = []
    for size in sizes:
        parts.append(image[start : start + size])
        start += size
    return parts
