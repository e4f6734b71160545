"""A ZeroMQ socket as the hot paths use it: kernels over libzmq's own functions.

    receive_head()   the first part of a message, or None   (one call, no exception, no lock given up)
    receive_rest()   the parts behind it, as bytes, large ones as Frames
    send(), send_more()   one part, copied; with send_more another follows
    give()           a `Part`, whose memory ZeroMQ takes
    post()           a whole message

pyzmq turns every option and flag into an enum, raises an exception for an empty socket, and gives up
the interpreter's lock for every part, which threads of one process then fight for. For a message of
100 bytes that is several times the work of ZeroMQ. Large parts, which must not be copied, still go through
pyzmq: they are its Frames. Nothing here ever blocks.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from zmq import backend
from zmq.backend.cython import _zmq

from danube_fast.errors import Internal
from danube_fast.frame.kernel import address_of, direct, intrinsic, kernel
from danube_fast.frame.memory import load_i64, memory_copy, store_u64

__all__ = ["SEND_LAST", "SEND_MORE", "Part", "Port", "send_part"]

SEND_LAST = int(zmq.NOBLOCK)
SEND_MORE = SEND_LAST | int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_HEAD_BYTES = 16 * 1024
"""Room for a first part; a larger one is received in two steps."""
_SHARED_BYTES_MAX = 8192
"""Smaller parts lie in the buffer that libzmq has read them into, which has this size and is kept by each of
them: who keeps a message of 300 bytes would keep 8 KiB."""
_MESSAGE_BYTES = 64
"""Size of zmq_msg_t, a part of libzmq's ABI."""
_MORE_SHIFT = 40
_SIZE_MASK = (1 << _MORE_SHIFT) - 1
_EAGAIN, _EINTR = errno.EAGAIN, errno.EINTR
_TRIES = 100
"""Signals that a call outlasts. In a forked child libzmq says EINTR for ever."""

_base: Any = backend.Socket
send_part: Callable[..., Any] = _base.send
"""send_part(socket, data, flags, copy): pyzmq's own, for Frames."""
_receive_part: Callable[..., Any] = _base.recv

_NAMES = (
    "zmq_msg_init", "zmq_msg_recv", "zmq_msg_data", "zmq_msg_more", "zmq_msg_close", "zmq_send",
    "zmq_getsockopt", "zmq_errno", "zmq_msg_init_size", "zmq_msg_send",
)  # fmt: skip
_INIT, _RECV, _DATA, _MORE, _CLOSE, _SEND, _GETSOCKOPT, _ERRNO, _INIT_SIZE, _MSG_SEND = range(
    0, 8 * len(_NAMES), 8
)


def _addresses() -> Any:
    """Where libzmq's functions are, int64 each. Raises Internal if pyzmq hides them."""
    try:
        # a library's symbols are also looked for in those that it was linked with
        library = ctypes.CDLL(_zmq.__file__)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _NAMES]
    except (AttributeError, OSError) as error:
        raise Internal(
            f"this build of pyzmq hides libzmq ({error}); install a wheel: "
            "pip install --force-reinstall --only-binary :all: pyzmq"
        ) from error
    return np.array(found, np.int64)


_functions = _addresses()
_table: int = _functions.ctypes.data


def _make_call(name: str, bits: int) -> Any:
    """The intrinsic `name(function, a, b, c, d)`: call C at an address, which returns `bits` bits.

    Arguments that the function does not have stay in registers that it does not read.
    """

    def call(typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        from llvmlite import ir
        from numba import types

        wide = ir.IntType(64)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(bits), [wide] * 4)
            called = builder.inttoptr(values[0], kind.as_pointer())
            result = builder.call(called, values[1:])
            return result if bits == 64 else builder.sext(result, wide)

        return types.int64(*[types.int64] * 5), generate

    call.__name__ = name
    return intrinsic(call)


call_int: Callable[[int, int, int, int, int], int] = _make_call("call_int", 32)
call_word: Callable[[int, int, int, int, int], int] = _make_call("call_word", 64)


@kernel("int64(int64)")
def _fault(table: int) -> int:
    """Minus the errno of the call that has just failed."""
    return -call_int(load_i64(table + _ERRNO), 0, 0, 0, 0)


@kernel("int64(int64,int64,int64,int64)")
def _take(table: int, message: int, target: int, size: int) -> int:
    """Copy the content of a zmq_msg_t and give it back."""
    memory_copy(target, call_word(load_i64(table + _DATA), message, 0, 0, 0), size)
    call_int(load_i64(table + _CLOSE), message, 0, 0, 0)
    return size


@kernel("int64(int64,int64,int64,int64)")
def _receive_head(table: int, socket: int, message: int, capacity: int) -> int:
    """Receive one part behind the zmq_msg_t at `message`: its size and, above that, whether more
    follows; or minus an errno. A part larger than `capacity` stays in `message` for `_take`."""
    call_int(load_i64(table + _INIT), message, 0, 0, 0)
    size = -1
    for _ in range(_TRIES):
        size = call_int(load_i64(table + _RECV), message, socket, _NOBLOCK, 0)
        if size >= 0 or _fault(table) != -_EINTR:
            break
    if size < 0:
        return _fault(table)
    more = call_int(load_i64(table + _MORE), message, 0, 0, 0)
    if size <= capacity:
        _take(table, message, message + _MESSAGE_BYTES, size)
    return (more << _MORE_SHIFT) | size


@kernel("int64(int64,int64,int64,int64,int64)")
def _send(table: int, socket: int, data: int, size: int, flags: int) -> int:
    """Send a copy of a part; minus an errno if that failed."""
    sent = -1
    for _ in range(_TRIES):
        sent = call_int(load_i64(table + _SEND), socket, data, size, flags)
        if sent >= 0 or _fault(table) != -_EINTR:
            break
    return sent if sent >= 0 else _fault(table)


@kernel("int64(int64,int64,int64)")
def _open_part(table: int, message: int, size: int) -> int:
    """Make a zmq_msg_t of that size: where its content goes, or 0 if there is no memory."""
    if call_int(load_i64(table + _INIT_SIZE), message, size, 0, 0) != 0:
        return 0
    return call_word(load_i64(table + _DATA), message, 0, 0, 0)


@kernel("int64(int64,int64)")
def _close_part(table: int, message: int) -> int:
    return call_int(load_i64(table + _CLOSE), message, 0, 0, 0)


@kernel("int64(int64,int64,int64,int64)")
def _send_part(table: int, socket: int, message: int, flags: int) -> int:
    """Send a zmq_msg_t, which is empty then; minus an errno if that failed."""
    sent = -1
    for _ in range(_TRIES):
        sent = call_int(load_i64(table + _MSG_SEND), message, socket, flags, 0)
        if sent >= 0 or _fault(table) != -_EINTR:
            break
    return sent if sent >= 0 else _fault(table)


@kernel("int64(int64,int64,int64)")
def _get_events(table: int, socket: int, place: int) -> int:
    """ZMQ_EVENTS, or minus an errno. `place` has room for two words."""
    store_u64(place, 0)
    store_u64(place + 8, 4)
    if call_int(load_i64(table + _GETSOCKOPT), socket, _EVENTS, place, place + 8) < 0:
        return _fault(table)
    return load_i64(place)


_head = direct(_receive_head)
_rest = direct(_take)
_give = direct(_send)
_events = direct(_get_events)
_open, _close, _give_part = direct(_open_part), direct(_close_part), direct(_send_part)


class Part:
    """Memory of `len()` bytes at `address`, to be written and then sent without a copy, once."""

    __slots__ = ("_size", "address", "message")

    def __init__(self, size: int) -> None:
        """Raises MemoryError."""
        self._size = size
        self.message = bytearray(_MESSAGE_BYTES)
        """The zmq_msg_t."""
        self.address: int = _open(_table, address_of(self.message), size)
        if not self.address:
            raise MemoryError(f"no memory for a part of {size} bytes")

    def __len__(self) -> int:
        return self._size

    def __del__(self) -> None:
        if self.address:
            _close(_table, address_of(self.message))


def _error_of(sent: int) -> zmq.ZMQError:
    """The error of a send that failed, from minus its errno."""
    return zmq.Again() if sent == -_EAGAIN else zmq.ZMQError(-sent)


class Port:
    """A socket and its scratch memory. One thread at a time."""

    has_room = True
    """ZeroMQ queues what it is given; windows and credit bound that."""

    __slots__ = ("_handle", "_memory", "_message", "_view", "more", "socket")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._handle: int = socket.underlying
        self._memory = bytearray(_MESSAGE_BYTES + _HEAD_BYTES)
        self._message = address_of(self._memory)
        self._view = memoryview(self._memory)[_MESSAGE_BYTES:]
        self.more = False
        """Parts follow the one that `receive_head` gave."""

    def fileno(self) -> int:
        """The edge-triggered descriptor to sleep on, whenever nothing is `readable`."""
        return int(self.socket.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether a message waits. It also does what ZeroMQ's descriptor was raised for."""
        events: int = _events(_table, self._own_handle(), self._message)
        if events < 0:
            raise zmq.ZMQError(-events)
        return events & _POLLIN != 0

    def _own_handle(self) -> int:
        if not self._handle:
            raise zmq.ZMQError(errno.ENOTSOCK)
        return self._handle

    def receive_head(self) -> memoryview | None:
        """The next part if there is one; valid until the next call. Raises ZMQError."""
        found: int = _head(_table, self._handle or self._own_handle(), self._message, _HEAD_BYTES)
        if found < 0:
            if found == -_EAGAIN:
                return None
            raise zmq.ZMQError(-found)
        self.more = found > _SIZE_MASK
        size = found & _SIZE_MASK
        if size <= _HEAD_BYTES:
            return self._view[:size]
        large = bytearray(size)
        _rest(_table, self._message, address_of(large), size)
        return memoryview(large)

    def receive_rest(self) -> list[zmq.Frame | bytes]:
        """The parts behind the head, large ones not copied."""
        parts: list[zmq.Frame | bytes] = []
        more = self.more
        while more:
            part = _receive_part(self.socket, _NOBLOCK, False)
            parts.append(part if len(part) > _SHARED_BYTES_MAX else part.bytes)
            more = part.more
        self.more = False
        return parts

    def send(self, data: Any, flags: int = SEND_LAST) -> None:
        """Send a copy of a buffer. Raises ZMQError, `zmq.Again` if the queue is full."""
        handle = self._handle or self._own_handle()
        sent: int = _give(_table, handle, address_of(data), len(data), flags)
        if sent < 0:
            raise _error_of(sent)

    def give(self, part: Part, flags: int = SEND_LAST) -> None:
        """Send a part, whose memory is ZeroMQ's then. Raises as `send`; then it still is the part's."""
        handle = self._handle or self._own_handle()
        sent: int = _give_part(_table, handle, address_of(part.message), flags)
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
        self._handle = 0
        self.socket.close(linger_ms)
