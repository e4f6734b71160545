"""The broker's ROUTER socket: bind, drain, send without ever blocking.

Identities are chosen by the server: ZeroMQ gives a peer that names none a 5-byte identity that
begins with a zero byte, and a peer cannot claim such a name. Anybody who brings his own is ignored.
Written and read by the worker's loop only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from danube_fast.errors import Unavailable

__all__ = ["PeerGone", "Server", "WouldBlock"]

BACKLOG = 4096
"""Connections that may wait to be accepted; ZeroMQ's 100 collapses under 1,000 at once."""
HIGH_WATER_MARK = 1000
"""ZeroMQ messages queued per peer and direction; flow control by bytes lies above it."""
PART_BYTES_MAX_SLACK = 1024 * 1024
PARTS_MAX = 64
"""Parts of one message that are looked at; a longer message is dropped."""


class PeerGone(Exception):
    """The peer's connection is closed."""


class WouldBlock(Exception):
    """The peer's queue is full; try again when it has taken something."""


class Server:
    """One ROUTER on tcp and ipc."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        message_bytes_max: int,
        handshake_timeout_ms: int,
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.HANDSHAKE_IVL, handshake_timeout_ms)
        socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max + PART_BYTES_MAX_SLACK)
        self.socket = socket
        self.drained = False
        """The last `receive` took everything that was there."""

    def bind(self, host: str, port: int, ipc_endpoint: str) -> int:
        """Listen on tcp (`port` 0: chosen by the system) and on ipc; returns the tcp port.

        Raises Unavailable when the address is taken.
        """
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
            bound = self.socket.getsockopt(zmq.LAST_ENDPOINT)
            if ipc_endpoint:
                self.socket.bind(ipc_endpoint)
        except zmq.ZMQError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error}; choose another port with --listen, or "
                "stop what uses this one"
            ) from error
        text = bound.decode() if isinstance(bound, bytes) else str(bound)
        return int(text.rstrip("\0").rsplit(":", 1)[1])

    def receive(self, limit: int) -> Iterator[tuple[bytes, list[zmq.Frame]]]:
        """Up to `limit` waiting messages as (identity, parts). Never blocks."""
        receive = self.socket.recv_multipart
        self.drained = False
        for _ in range(limit):
            try:
                parts = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.drained = True
                return
            identity = parts[0].bytes
            if identity[:1] == b"\0" and 2 <= len(parts) <= PARTS_MAX:
                yield identity, parts[1:]

    def send(self, identity: bytes, parts: list[bytes | zmq.Frame]) -> None:
        """Queue one message for a peer. Raises PeerGone or WouldBlock; then nothing was sent."""
        flags = zmq.NOBLOCK
        last = len(parts) - 1
        try:
            self.socket.send(identity, flags | zmq.SNDMORE)
            for i, part in enumerate(parts):
                more = zmq.SNDMORE if i < last else 0
                self.socket.send(part, flags | more, copy=isinstance(part, bytes))
        except zmq.Again as error:
            raise WouldBlock from error
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK):
                raise PeerGone from error
            raise

    def close(self) -> None:
        """Close the socket; what was queued is dropped."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.close(linger=0)
