"""The row of a port: what kernels need that send and receive whole messages, and a message in hand.

    +-------+--------+------------+------------+-----------+--------+-----+------+------+--------------
    | TABLE | SOCKET | HEAD_FOUND | BODY_FOUND | IS_SMALL  | EVENTS | OUT | BODY | HEAD | CONTENT, of HEAD
    +-------+--------+------------+------------+-----------+--------+-----+------+------+--------------

A socket has no peek: a part that was received is taken. So what a kernel has taken and leaves to Python stays in hand,
and is what `Port.receive_head` and `receive_rest` give next. Written by the thread that uses the port.
"""

from __future__ import annotations

import zmq

from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import load_i64, store_u64
from danube_fast.net.port_kernels import (
    MESSAGE_BYTES,
    close_message,
    data_of,
    get_events,
    receive_into,
    send_copy,
    take_content,
)

__all__ = [
    "BODY_FOUND",
    "CONTENT",
    "HEAD",
    "HEAD_BYTES",
    "HEAD_FOUND",
    "IS_SMALL",
    "NOTHING",
    "OUT",
    "READABLE",
    "ROW_BYTES",
    "SMALL_BYTES_MAX",
    "SOCKET",
    "TABLE",
    "WORD_BYTES",
    "drop_body",
    "drop_in_hand",
    "find_body",
    "find_events",
    "keep_head",
    "receive_body",
    "receive_next",
    "send_pair",
    "take_body",
]

WORD_BYTES = 8
TABLE, SOCKET, HEAD_FOUND, BODY_FOUND, IS_SMALL, _EVENTS = range(0, 6 * WORD_BYTES, WORD_BYTES)
OUT = _EVENTS + 2 * WORD_BYTES
"""Scratch for a command that is sent."""
_OUT_BYTES = 2 * WORD_BYTES
_BODY = OUT + _OUT_BYTES
HEAD = _BODY + MESSAGE_BYTES
CONTENT = HEAD + MESSAGE_BYTES
HEAD_BYTES = 16 * 1024
"""Room for a first part; a larger one stays in its zmq_msg_t."""
ROW_BYTES = CONTENT + HEAD_BYTES
NOTHING = -1
"""In HEAD_FOUND and BODY_FOUND: no such part is in hand."""
SMALL_BYTES_MAX = 32 * 1024
"""A body of so many bytes is copied in less time than it takes to make a Frame of it."""
READABLE = 1
"""Of `send_pair`: sent, and something can be read."""
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_POLL_BOTH = _POLLIN | _POLLOUT
_SEND_LAST = int(zmq.NOBLOCK)
_SEND_MORE = _SEND_LAST | int(zmq.SNDMORE)


@kernel("int64(int64)")
def receive_next(row: int) -> int:
    """The first part of the next message, in hand or out of the socket, as `receive_into` says it."""
    found = load_i64(row + HEAD_FOUND)
    if found != NOTHING:
        store_u64(row + HEAD_FOUND, NOTHING)
        return found
    return receive_into(load_i64(row + TABLE), load_i64(row + SOCKET), row + HEAD, HEAD_BYTES)


@kernel("int64(int64,int64)")
def keep_head(row: int, found: int) -> int:
    """Leave a first part in hand."""
    store_u64(row + HEAD_FOUND, found)
    return found


@kernel("int64(int64)")
def receive_body(row: int) -> int:
    """Receive the part behind a first part, which is in hand then: what `receive_into` says."""
    found = receive_into(load_i64(row + TABLE), load_i64(row + SOCKET), row + _BODY, NOTHING)
    if found >= 0:
        store_u64(row + BODY_FOUND, found)
    return found


@kernel("int64(int64)")
def find_body(row: int) -> int:
    """Where the body in hand lies."""
    return data_of(load_i64(row + TABLE), row + _BODY)


@kernel("int64(int64)")
def drop_body(row: int) -> int:
    """Give the memory of the body in hand back."""
    store_u64(row + BODY_FOUND, NOTHING)
    return close_message(load_i64(row + TABLE), row + _BODY)


@kernel("int64(int64,int64,int64)")
def take_body(row: int, target: int, size: int) -> int:
    """Copy the body in hand and give its memory back."""
    store_u64(row + BODY_FOUND, NOTHING)
    return take_content(load_i64(row + TABLE), row + _BODY, target, size)


@kernel("int64(int64)")
def drop_in_hand(row: int) -> int:
    """Forget what is in hand, and give its memory back."""
    if load_i64(row + BODY_FOUND) != NOTHING:
        drop_body(row)
    if load_i64(row + HEAD_FOUND) != NOTHING:
        store_u64(row + HEAD_FOUND, NOTHING)
        # one that was copied is empty by now, which may be closed again
        close_message(load_i64(row + TABLE), row + HEAD)
    return 0


@kernel("int64(int64)")
def find_events(row: int) -> int:
    """ZMQ_EVENTS, with POLLIN while a message is in hand; or minus an errno."""
    events = get_events(load_i64(row + TABLE), load_i64(row + SOCKET), row + _EVENTS)
    return events | _POLLIN if events >= 0 and load_i64(row + HEAD_FOUND) != NOTHING else events


@kernel("int64(int64,int64,int64,int64)")
def send_pair(row: int, head_bytes: int, body: int, body_bytes: int) -> int:
    """Send the command in OUT and a copy of its body: 0, READABLE if a look is due, as sending may have swallowed the
    descriptor's edge, of a message or of the end of a connection that is not made anew; less than 0 if neither was sent,
    for libzmq drops a message that has no second part."""
    table, socket = load_i64(row + TABLE), load_i64(row + SOCKET)
    sent = send_copy(table, socket, row + OUT, head_bytes, _SEND_MORE)
    if sent >= 0:
        sent = send_copy(table, socket, body, body_bytes, _SEND_LAST)
    if sent < 0:
        return sent
    events = find_events(row)
    return 0 if events >= 0 and events & _POLL_BOTH == _POLLOUT else READABLE
