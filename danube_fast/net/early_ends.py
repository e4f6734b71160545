"""Connections that end before their key is known: the kernel says where they came from, and how far they went.

ZeroMQ tells of a failure when the descriptor is closed. Netlink has it: to who listens, root or not, sock_diag tells of
each tcp socket that is destroyed, with both addresses and `tcp_info` (as `ss -E` shows them). How far a handshake went is
seen by what the broker has written:

    greeting, up to 64 bytes --HELLO is good--> 170 bytes of WELCOME --key--> ZAP is asked: READY or ERROR, 12 at least

So a socket with no more than 234 bytes written is one whose key nothing has asked about, whatever its peer has sent.
"""

from __future__ import annotations

import ctypes
import socket
import struct

from danube_fast.net.socket_filter import attach, ended_on_port

__all__ = ["COSTLY", "SILENT", "EarlyEnds"]

COSTLY, SILENT = 10, 1
"""What an end counts. A connection over which nothing came, like the probe of a load balancer, took no Curve25519."""
_WRITTEN_BYTES_MAX = 64 + 170
_READ_BYTES_MIN = 2
"""The end of what a peer sends counts as a byte, too."""
_SOCK_DIAG = 4
_SOL_NETLINK, _ADD_MEMBERSHIP, _NO_ENOBUFS = 270, 1, 5
_DESTROYED_IPV4, _DESTROYED_IPV6 = 1, 3
"""Groups of sock_diag: sockets of tcp."""
_MESSAGE_BYTES_MAX = 8192
_TAKEN_MAX = 4096
_ROOM_BYTES = 1 << 20
"""Room for what is told, as far as the kernel gives it: 1,280 bytes are for each end."""
_AT_LOCAL, _AT_PEER, _AT_ATTRIBUTES = 24, 40, 88
"""Behind the header of netlink, in struct inet_diag_msg and behind it."""
_ATTRIBUTE = struct.Struct("=HH")
_TCP_INFO = 2
_INFO_BYTES = 216
_READ, _WRITTEN = struct.Struct("=128xQ"), struct.Struct("=200xQQ")
"""In struct tcp_info: tcpi_bytes_received; tcpi_bytes_sent and tcpi_bytes_retrans, since Linux 4.19."""

# keeps the interpreter's lock: to wait for it after each message may take 5 ms
_recv = ctypes.PyDLL(None).recv
_recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_recv.restype = ctypes.c_ssize_t


class EarlyEnds:
    """Those of one listening port. While it is open, each socket of tcp on the host that ends costs the kernel 10 us."""

    def __init__(self, host: str, port: int) -> None:
        """`host`: a number; that of no address in particular stands for all of this host."""
        self._port, self._family = port, socket.AF_INET6 if ":" in host else socket.AF_INET
        packed = socket.inet_pton(self._family, host.partition("%")[0])
        self._size = len(packed)
        self._local = packed if any(packed) else b""
        """Others may have the port at another address of this host."""
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Begin to be told, if it is not open yet. Raises OSError."""
        if self._socket is not None:
            return
        made = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _SOCK_DIAG
        )
        try:
            attach(made, ended_on_port(self._port))
            made.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)  # who is told of too many misses some
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
            made.bind((0, 0))
            group = _DESTROYED_IPV6 if self._family == socket.AF_INET6 else _DESTROYED_IPV4
            made.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
        except BaseException:
            made.close()
            raise
        self._socket = made

    def close(self) -> None:
        """Be told no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def take(self) -> list[tuple[str, int]]:
        """Take what the kernel has told: address, and what the end counts."""
        found: list[tuple[str, int]] = []
        if self._socket is None:
            return found
        fd, room = self._socket.fileno(), ctypes.create_string_buffer(_MESSAGE_BYTES_MAX)
        for _ in range(_TAKEN_MAX):
            count = _recv(fd, room, _MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            if count <= 0:
                break
            message = room.raw[:count]
            weight = _weight_of(message) if message.startswith(self._local, _AT_LOCAL) else 0
            if weight:
                peer = message[_AT_PEER : _AT_PEER + self._size]
                found.append((socket.inet_ntop(self._family, peer), weight))
        return found


def _weight_of(message: bytes) -> int:
    """Read what an end counts; 0: the key was asked about, or the kernel does not say."""
    at = _AT_ATTRIBUTES
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _TCP_INFO and size >= _ATTRIBUTE.size + _INFO_BYTES:
            info = at + _ATTRIBUTE.size
            (read,) = _READ.unpack_from(message, info)
            written, again = _WRITTEN.unpack_from(message, info)
            if written - again > _WRITTEN_BYTES_MAX:
                return 0
            return COSTLY if read >= _READ_BYTES_MIN else SILENT
        at += max(size + 3 & ~3, _ATTRIBUTE.size)
    return 0
