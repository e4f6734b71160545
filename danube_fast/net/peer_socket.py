"""Read what the system knows of a connection that ZeroMQ has accepted, by its descriptor, and end it.

The descriptor is ZeroMQ's, which closes it whenever it likes, and another connection may have its number a moment later. So
a connection is told apart by its cookie, which the kernel never gives twice, and looked at through a copy before it is cut.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

__all__ = [
    "UNIX_STEP_BYTES",
    "bytes_received",
    "cookie_of",
    "cut",
    "host_of",
    "unread_bytes",
    "untaken_bytes",
]

_SO_COOKIE = 57
_COOKIE_BYTES = 8
_TCP_INFO_BYTES = 136
_AT_BYTES_RECEIVED = 128
"""In struct tcp_info of Linux, an ABI: tcpi_bytes_received."""
_FIONREAD = 0x541B
_SIOCOUTQ, _SIOCOUTQNSD = 0x5411, 0x894B
"""What waits in the kernel; what tcp has not sent yet, as the peer's window is full."""
UNIX_STEP_BYTES = 256 * 1024
"""Counted for a connection on ipc each time that bytes of it wait: nothing counts them all."""

# kept by each call, as both calls are shorter than to give the interpreter's lock up
_libc = ctypes.PyDLL(None, use_errno=True)
_getsockopt = _libc.getsockopt
_getsockopt.argtypes = [
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
]  # fmt: skip
_ioctl = _libc.ioctl
_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_shutdown = _libc.shutdown
_shutdown.argtypes = [ctypes.c_int, ctypes.c_int]

_room = ctypes.create_string_buffer(_TCP_INFO_BYTES)
_length = ctypes.c_uint32()
_room_at, _length_at = ctypes.addressof(_room), ctypes.addressof(_length)
_COUNT = struct.Struct("=Q")
_NUMBER = struct.Struct("=i")


def cookie_of(fd: int) -> int:
    """The number that this socket alone has; 0 if there is none. For one thread of a process, as all calls here."""
    _length.value = _COOKIE_BYTES
    if _getsockopt(fd, socket.SOL_SOCKET, _SO_COOKIE, _room_at, _length_at) != 0:
        return 0
    return int(_COUNT.unpack_from(_room)[0])


def bytes_received(fd: int) -> int | None:
    """Bytes that came over a tcp connection so far; None on another kind of socket; -1 if it is gone."""
    _length.value = _TCP_INFO_BYTES
    if _getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, _room_at, _length_at) != 0:
        return None if ctypes.get_errno() == errno.EOPNOTSUPP else -1
    return int(_COUNT.unpack_from(_room, _AT_BYTES_RECEIVED)[0])


def unread_bytes(fd: int) -> int:
    """Bytes that wait to be read; -1 if the connection is gone."""
    return -1 if _ioctl(fd, _FIONREAD, _room_at) != 0 else int(_NUMBER.unpack_from(_room)[0])


def untaken_bytes(fd: int) -> int:
    """Bytes that were sent and the peer's system (on ipc: the peer) has no room for; -1 if the connection is gone."""
    for request in (_SIOCOUTQNSD, _SIOCOUTQ):  # the first is of tcp alone
        if _ioctl(fd, request, _room_at) == 0:
            return int(_NUMBER.unpack_from(_room)[0])
    return -1


def cut(fd: int, cookie: int) -> bool:
    """End the connection that has this cookie, if the descriptor still is its own; ZeroMQ then closes it."""
    try:
        copy = os.dup(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            return False
        return cookie_of(fd) == cookie and _shutdown(fd, socket.SHUT_RDWR) == 0
    try:
        return cookie_of(copy) == cookie and _shutdown(copy, socket.SHUT_RDWR) == 0
    finally:
        os.close(copy)


def host_of(fd: int) -> str:
    """Where a connection comes from, without the port; "this host" on ipc, empty if it is gone."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            name = copy.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else "this host"
