"""Duplex: messages of several parts between two processes of one host, over two rings and a socket.

    client                      one sealed memfd                       worker
      send(parts)  -->  | ring up    lead, part, part ... |  -->  receive(): copies
      receive()    <--  | ring down  lead, part, part ... |  <--  send(parts)

      socket: a byte wakes the other side when it sleeps; the end of it is the end of that side

A message is one record: u32 count, count x u32 size, then the parts back to back. One that is too
large for a record goes as several, each behind a lead of MORE, the last behind END; they are what
its one record would have been, in slices.

Neither side trusts the other. Everything is copied before it is looked at and each length is read
once, so a peer that scribbles gets DataLoss on its own rings. The signals go through the socket: of
an eventfd both would have the same open file, and one could make the other's writes block.

Who finds no room says so in the ring with a new number; the reader answers each number with one
signal, as soon as half the ring is free.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from danube_fast.errors import DataLoss
from danube_fast.frame.kernel import direct, kernel
from danube_fast.ring import layout
from danube_fast.ring.atomics import fence, load_relaxed, store_seq_cst
from danube_fast.ring.doorbell import Doorbell
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
_SIGNALS_MAX = 4096
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_SMALL_BYTES = 16 * 1024
_PAGE_BYTES = mmap.PAGESIZE


@kernel("int64(int64,int64)")
def _ask_room(word: int, number: int) -> int:
    """Say that there was no room, and look again. Its fence pairs with the one in _room_asked."""
    store_seq_cst(word, number)
    fence()
    return number


@kernel("int64(int64)")
def _room_asked(word: int) -> int:
    """The number of the newest complaint, 0 = none. Behind the release of a record."""
    fence()
    return load_relaxed(word)


_ask = direct(_ask_room)
_asked = direct(_room_asked)


def _half_bytes(capacity_bytes: int) -> int:
    """One ring and what fills its last page."""
    return -(-layout.ring_bytes(capacity_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def duplex_bytes(capacity_bytes: int) -> int:
    """Memory for two rings of that capacity."""
    return 2 * _half_bytes(capacity_bytes)


class _SocketBell(Doorbell):
    """A doorbell whose signals are bytes in a socket."""

    __slots__ = ("_socket",)

    def __init__(self, sock: socket.socket, word_address: int) -> None:
        super().__init__(sock.fileno(), word_address)
        self._socket = sock

    def ring_always(self) -> None:
        try:
            self._socket.send(b"\1", _SEND_FLAGS)
        except OSError:
            return  # a full socket has woken its reader already; a closed one tells its end to `hear`


class Duplex:
    """One side of such a connection. One thread at a time."""

    __slots__ = (
        "_ask_word",
        "_asked_word",
        "_in",
        "_left",
        "_message_bytes_max",
        "_out",
        "_own_bell",
        "_peer_bell",
        "_record_bytes_max",
        "_room_number",
        "_room_told",
        "_socket",
        "_whole",
    )  # fmt: skip

    def __init__(
        self, memory: mmap.mmap, sock: socket.socket, capacity_bytes: int, *,
        serves: bool, message_bytes_max: int,
    ) -> None:  # fmt: skip
        """Over `memory` of `duplex_bytes(capacity_bytes)` whose two rings exist.

        The side that `serves` reads the first ring and writes the second. Raises DataLoss or
        FailedPrecondition if the rings are not there.
        """
        half = _half_bytes(capacity_bytes)
        view = memoryview(memory)
        rings = SpscRing.attach(view[:half]), SpscRing.attach(view[half : 2 * half])
        self._in, self._out = rings if serves else rings[::-1]
        self._socket = sock
        self._own_bell = _SocketBell(sock, self._in.address + layout.AT_READER_SLEEPING)
        self._peer_bell = _SocketBell(sock, self._out.address + layout.AT_READER_SLEEPING)
        self._asked_word = self._in.address + layout.AT_ROOM_ASKED
        self._ask_word = self._out.address + layout.AT_ROOM_ASKED
        self._room_told = self._room_number = 0
        self._record_bytes_max = self._out.record_bytes_max
        self._message_bytes_max = message_bytes_max
        self._whole = bytearray()
        """Slices of a large message that is coming in."""
        self._left: list[tuple[bytes, memoryview]] = []
        """Slices of one that is going out."""

    def fileno(self) -> int:
        """The socket: readable when the peer signals or ends, if `arm` was called before."""
        return self._socket.fileno()

    def close(self) -> None:
        """End it. The memory goes with the last reference."""
        self._socket.close()

    # ------------------------------------------------------------ out

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Append one message of byte buffers; False if there is no room, and nothing was sent.

        Of a large one the rest may go later, with `flush`. Raises DataLoss for a damaged ring.
        """
        if self._left and not self.flush():
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
            self._left = self._slices(b"".join((lead, *parts)))
            self._flush()
        self._peer_bell.ring()
        return True

    def flush(self) -> bool:
        """Send on what is left of a large message; whether nothing is left."""
        if self._left and self._flush():
            self._peer_bell.ring()
        return not self._left

    def _flush(self) -> int:
        done = 0
        for lead, piece in self._left:
            if not self._push(lead, piece):
                break
            done += 1
        del self._left[:done]
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
        self._room_number += 1
        _ask(self._ask_word, self._room_number)
        return self._out.try_push(*parts)

    # ------------------------------------------------------------ in

    @property
    def readable(self) -> bool:
        """Whether a record waits."""
        return self._in.readable

    def receive(self) -> list[bytes] | None:
        """The oldest message, copied, or None. Raises DataLoss if the peer wrote nonsense."""
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
            number = _asked(self._asked_word)
            if number != self._room_told:
                self._tell_room(number)
            if message is not None:
                return message

    def _take(self, record: bytes | memoryview) -> list[bytes] | None:
        """A copy of the message in a record; None if it is a slice and more are to come."""
        if len(record) < _WORD_BYTES:
            raise DataLoss(f"a record of {len(record)} bytes has no lead")
        (count,) = _WORD.unpack_from(record)
        if count < _MORE:
            return _split(record, count)
        self._whole += record[_WORD_BYTES:]
        if len(self._whole) > self._message_bytes_max:
            raise DataLoss(f"a message is over the limit of {self._message_bytes_max} bytes")
        if count == _MORE:
            return None
        whole, self._whole = memoryview(self._whole), bytearray()
        return _split(whole, _WORD.unpack_from(whole)[0] if len(whole) >= _WORD_BYTES else 0)

    def _tell_room(self, number: int) -> None:
        if 2 * self._in.used_bytes <= self._in.capacity_bytes:
            self._room_told = number
            self._own_bell.ring_always()

    def arm(self) -> bool:
        """Ask the peer to signal what it sends. False if there is something already."""
        self._own_bell.prepare_sleep()
        if self._in.readable:
            self._own_bell.cancel_sleep()
            return False
        return True

    def hear(self) -> bool:
        """Take the signals that came. False: the peer is gone, and nothing will come any more
        behind what the ring holds."""
        try:
            return bool(self._socket.recv(_SIGNALS_MAX, _DONT_WAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False


def _split(image: bytes | memoryview, count: int) -> list[bytes]:
    """The parts of a message. The lead is read once: `image` may change under our eyes."""
    start = _WORD_BYTES * (1 + count)
    if not 0 < count <= PARTS_MAX or len(image) < start:
        raise DataLoss(f"a message of {count} parts in {len(image)} bytes cannot be")
    _, *sizes = _LEADS[count].unpack(bytes(image[:start]))
    if start + sum(sizes) != len(image):
        raise DataLoss(f"parts of {sum(sizes)} bytes do not fill a message of {len(image)}")
    parts = []
    for size in sizes:
        parts.append(bytes(image[start : start + size]))
        start += size
    return parts
