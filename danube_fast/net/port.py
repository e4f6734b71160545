"""A ZeroMQ socket as the hot paths use it: kernels over libzmq's own functions.

    receive_head()   the first part of a message, or None   (one call, no exception, no lock given up)
    receive_rest()   the parts behind it, as bytes, large ones as Frames
    row              for kernels that send or receive whole messages (`port_row.py`)
    send(), send_more()   one part, copied; with send_more another follows
    give()           a `Part`, whose memory ZeroMQ takes
    post()           a whole message

pyzmq turns every option and flag into an enum, raises an exception for an empty socket, and gives up
the interpreter's lock for every part, which threads of one process then fight for. For a message of
100 bytes that is several times the work of ZeroMQ. Large parts, which must not be copied, still go through
pyzmq: they are its Frames. Nothing here ever blocks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import zmq
from zmq import backend

from danube_fast.frame.kernel import address_of, direct
from danube_fast.net.port_kernels import (
    FUNCTIONS,
    MESSAGE_BYTES,
    SIZE_MASK,
    close_message,
    open_message,
    send_copy,
    send_message,
    take_content,
)
from danube_fast.net.port_row import (
    BODY_FOUND,
    CONTENT,
    HEAD,
    HEAD_BYTES,
    HEAD_FOUND,
    IS_SMALL,
    NOTHING,
    ROW_BYTES,
    SMALL_BYTES_MAX,
    SOCKET,
    TABLE,
    WORD_BYTES,
    drop_in_hand,
    find_events,
    receive_next,
    take_body,
)

__all__ = ["SEND_LAST", "SEND_MORE", "Part", "Port", "send_part", "take_rest"]

SEND_LAST = int(zmq.NOBLOCK)
SEND_MORE = SEND_LAST | int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)
_SHARED_BYTES_MAX = 8192
"""Smaller parts lie in the buffer that libzmq has read them into, which has this size and is kept by each of
them: who keeps a message of 300 bytes would keep 8 KiB."""
_EAGAIN = errno.EAGAIN

_base: Any = backend.Socket
send_part: Callable[..., Any] = _base.send
"""send_part(socket, data, flags, copy): pyzmq's own, for Frames."""
_receive_part: Callable[..., Any] = _base.recv

_head, _body = direct(receive_next), direct(take_body)
take_rest = direct(take_content)
"""take_rest(table, message, target, size): copy what was too large for `receive_into`."""
_give = direct(send_copy)
_events, _drop = direct(find_events), direct(drop_in_hand)
_BODY_WORD, _SMALL_WORD, _SOCKET_WORD = (
    BODY_FOUND // WORD_BYTES,
    IS_SMALL // WORD_BYTES,
    SOCKET // WORD_BYTES,
)
_open, _close, _give_part = direct(open_message), direct(close_message), direct(send_message)


class Part:
    """Memory of `len()` bytes at `address`, to be written and then sent without a copy, once."""

    __slots__ = ("_size", "address", "message")

    def __init__(self, size: int) -> None:
        """Raises MemoryError."""
        self._size = size
        self.message = bytearray(MESSAGE_BYTES)
        """The zmq_msg_t."""
        self.address: int = _open(FUNCTIONS, address_of(self.message), size)
        if not self.address:
            raise MemoryError(f"no memory for a part of {size} bytes")

    def __len__(self) -> int:
        return self._size

    def __del__(self) -> None:
        if self.address:
            _close(FUNCTIONS, address_of(self.message))


def _error_of(sent: int) -> zmq.ZMQError:
    """The error of a send that failed, from minus its errno."""
    return zmq.Again() if sent == -_EAGAIN else zmq.ZMQError(-sent)


class Port:
    """A socket and its scratch memory. One thread at a time."""

    has_room = True
    """ZeroMQ queues what it is given; windows and credit bound that."""

    __slots__ = ("_handle", "_memory", "_view", "_words", "free_row", "more", "row", "socket")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._handle: int = socket.underlying
        self._memory = bytearray(ROW_BYTES)
        self.row: int = address_of(self._memory)
        """Address of what `port_row.py` describes."""
        self.free_row = self.row
        """The same if kernels may send the next message there now; or 0."""
        self._view = memoryview(self._memory)[CONTENT:]
        self._words = memoryview(self._memory)[:HEAD].cast("q")
        for at, value in (
            (TABLE, FUNCTIONS),
            (SOCKET, self._handle),
            (HEAD_FOUND, NOTHING),
            (BODY_FOUND, NOTHING),
            (IS_SMALL, 1),
        ):
            self._words[at // WORD_BYTES] = value
        self.more = False
        """Parts follow the one that `receive_head` gave."""

    def fileno(self) -> int:
        """The edge-triggered descriptor to sleep on, whenever nothing is `readable`."""
        return int(self.socket.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether a message waits. It also does what ZeroMQ's descriptor was raised for."""
        events: int = _events(self.row)
        if events < 0:
            raise zmq.ZMQError(-events)
        return events & _POLLIN != 0

    def _own_handle(self) -> int:
        if not self._handle:
            raise zmq.ZMQError(errno.ENOTSOCK)
        return self._handle

    def receive_head(self) -> memoryview | None:
        """The next part if there is one; valid until the next call. Raises ZMQError."""
        found: int = _head(self.row)
        if found < 0:
            if found == -_EAGAIN:
                return None
            raise zmq.ZMQError(-found)
        self.more = found > SIZE_MASK
        size = found & SIZE_MASK
        if size <= HEAD_BYTES:
            return self._view[:size]
        large = bytearray(size)
        take_rest(FUNCTIONS, self.row + HEAD, address_of(large), size)
        return memoryview(large)

    def receive_frame(self) -> zmq.Frame:
        """The part that follows, with what ZeroMQ says of its sender, which a kernel's copy does not have. Raises
        ZMQError."""
        frame: zmq.Frame = _receive_part(self.socket, _NOBLOCK, False)
        self.more = frame.more
        return frame

    def receive_rest(self) -> list[Any]:
        """The parts behind the head, bytes, or Frames of large ones, which are not copied; a large one that was in hand
        is a memoryview."""
        parts: list[Any] = []
        more, words = self.more, self._words
        if (found := words[_BODY_WORD]) != NOTHING:
            parts.append(self._take_body(found & SIZE_MASK))
            more = found > SIZE_MASK
        while more:
            part = _receive_part(self.socket, _NOBLOCK, False)
            parts.append(part if len(part) > _SHARED_BYTES_MAX else part.bytes)
            more = part.more
        self.more = False
        words[_SMALL_WORD] = len(parts) == 1 and len(parts[0]) <= SMALL_BYTES_MAX
        return parts

    def _take_body(self, size: int) -> bytes | memoryview:
        """The body that a kernel has left in hand."""
        body = bytearray(size)
        _body(self.row, address_of(body), size)
        return bytes(body) if size <= _SHARED_BYTES_MAX else memoryview(body).toreadonly()

    def send(self, data: Any, flags: int = SEND_LAST) -> None:
        """Send a copy of a buffer. Raises ZMQError, `zmq.Again` if the queue is full."""
        handle = self._handle or self._own_handle()
        sent: int = _give(FUNCTIONS, handle, address_of(data), len(data), flags)
        if sent < 0:
            raise _error_of(sent)

    def give(self, part: Part, flags: int = SEND_LAST) -> None:
        """Send a part, whose memory is ZeroMQ's then. Raises as `send`; then it still is the part's."""
        handle = self._handle or self._own_handle()
        sent: int = _give_part(FUNCTIONS, handle, address_of(part.message), flags)
        if sent < 0:
            raise _error_of(sent)

    def post(self, *parts: Any) -> None:
        """Send a copy of one message of these parts. Raises as `send`."""
        for part in parts[:-1]:
            self.send(part, SEND_MORE)
        self.send(parts[-1])

    def send_more(self, data: Any) -> None:
        """Send with a part to follow."""
        self.send(data, SEND_MORE)

    def close(self, linger_ms: int) -> None:
        """Close the socket, which waits for so long to send what is queued."""
        self._handle = self._words[_SOCKET_WORD] = 0
        _drop(self.row)
        self.socket.close(linger_ms)
