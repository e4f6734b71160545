"""Kernels over libzmq's own functions: one part in, one part out, without pyzmq's face.

`FUNCTIONS` is the address of a table of their addresses, which each kernel is given, so none is compiled in. Nothing
here blocks; a call that a signal has interrupted is made again.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from zmq.backend.cython import _zmq

from danube_fast.errors import Internal
from danube_fast.frame.kernel import intrinsic, kernel
from danube_fast.frame.memory import load_i64, memory_copy, store_u64

__all__ = [
    "FUNCTIONS",
    "MESSAGE_BYTES",
    "MORE_SHIFT",
    "SIZE_MASK",
    "close_message",
    "data_of",
    "get_events",
    "open_message",
    "receive_into",
    "send_copy",
    "send_message",
    "take_content",
]

MESSAGE_BYTES = 64
"""Size of zmq_msg_t, a part of libzmq's ABI."""
MORE_SHIFT = 40
SIZE_MASK = (1 << MORE_SHIFT) - 1
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_EINTR = errno.EINTR
_TRIES = 100
"""Signals that a call outlasts. In a forked child libzmq says EINTR for ever."""

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
FUNCTIONS: int = _functions.ctypes.data
"""Of the table."""


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


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _call(table: int, name: int, a: int, b: int, c: int, d: int) -> int:
    """Call a function, again where a signal has interrupted it: what it returns, or minus its errno."""
    fault = 0
    for _ in range(_TRIES):
        result = call_int(load_i64(table + name), a, b, c, d)
        if result >= 0:
            return result
        fault = -call_int(load_i64(table + _ERRNO), 0, 0, 0, 0)
        if fault != -_EINTR:
            break
    return fault


@kernel("int64(int64,int64)")
def data_of(table: int, message: int) -> int:
    """Where the content of a zmq_msg_t lies."""
    return call_word(load_i64(table + _DATA), message, 0, 0, 0)


@kernel("int64(int64,int64,int64,int64)")
def take_content(table: int, message: int, target: int, size: int) -> int:
    """Copy the content of a zmq_msg_t and give it back."""
    memory_copy(target, data_of(table, message), size)
    call_int(load_i64(table + _CLOSE), message, 0, 0, 0)
    return size


@kernel("int64(int64,int64,int64,int64)")
def receive_into(table: int, socket: int, message: int, capacity: int) -> int:
    """Receive one part behind the zmq_msg_t at `message`: its size and, above that, whether more
    follows; or minus an errno. A part larger than `capacity` stays in `message` for `take_content`."""
    call_int(load_i64(table + _INIT), message, 0, 0, 0)
    size = _call(table, _RECV, message, socket, _NOBLOCK, 0)
    if size < 0:
        return size
    more = call_int(load_i64(table + _MORE), message, 0, 0, 0)
    if size <= capacity:
        take_content(table, message, message + MESSAGE_BYTES, size)
    return (more << MORE_SHIFT) | size


@kernel("int64(int64,int64,int64,int64,int64)")
def send_copy(table: int, socket: int, data: int, size: int, flags: int) -> int:
    """Send a copy of a part; minus an errno if that failed."""
    return _call(table, _SEND, socket, data, size, flags)


@kernel("int64(int64,int64,int64)")
def open_message(table: int, message: int, size: int) -> int:
    """Make a zmq_msg_t of that size: where its content goes, or 0 if there is no memory."""
    if call_int(load_i64(table + _INIT_SIZE), message, size, 0, 0) != 0:
        return 0
    return data_of(table, message)


@kernel("int64(int64,int64)")
def close_message(table: int, message: int) -> int:
    """Give a zmq_msg_t back."""
    return call_int(load_i64(table + _CLOSE), message, 0, 0, 0)


@kernel("int64(int64,int64,int64,int64)")
def send_message(table: int, socket: int, message: int, flags: int) -> int:
    """Send a zmq_msg_t, which is empty then; minus an errno if that failed."""
    return _call(table, _MSG_SEND, message, socket, flags, 0)


@kernel("int64(int64,int64,int64)")
def get_events(table: int, socket: int, place: int) -> int:
    """ZMQ_EVENTS, or minus an errno. `place` has room for two words."""
    store_u64(place, 0)
    store_u64(place + 8, 4)
    found = _call(table, _GETSOCKOPT, socket, _EVENTS, place, place + 8)
    return load_i64(place) if found >= 0 else found
