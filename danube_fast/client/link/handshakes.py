"""Why a CURVE connection does not come about: libzmq tells it to a socket's monitor only.

    the key is not registered     FAILED_AUTH 400       once, then libzmq gives up
    the broker has another key    FAILED_NO_DETAIL      with every attempt, as the broker closes without a word
    the broker has no CURVE       FAILED_PROTOCOL       once, then libzmq gives up
    nothing listens               CLOSED                with every attempt
    the broker fails to check it  FAILED_AUTH 500       no verdict: that passes
    a stopped process listens     nothing               the same

A refused key is a verdict at once. A broker that ends in the middle of a handshake looks like one with another key,
so such failures are a verdict only when they go on for a while and nothing else is seen meanwhile.
"""

from __future__ import annotations

import struct

import zmq

from danube_fast.client.values.limits import HANDSHAKE_VERDICT_NS
from danube_fast.errors import DanubeError, PermissionDenied

__all__ = ["HandshakeWatch"]

_EVENT = struct.Struct("=Hi")
_ENDED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
"""Events behind which failures are counted anew."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_NOT_REGISTERED = 400
_FAILURES_MIN = 2
_EVENTS_MAX = 1000
"""Read in one look."""


class HandshakeWatch:
    """Reads the monitors of one connection's sockets, one after the other, until a handshake is done."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._endpoint = ""
        self._failures = 0
        self._since_ns = 0
        """When the first of them was seen."""

    @property
    def is_open(self) -> bool:
        """Whether a monitor is to be read."""
        return self._monitor is not None

    def attach(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Watch a socket, before it connects. Raises ZMQError."""
        if endpoint != self._endpoint:
            self._endpoint, self._failures = endpoint, 0
        self._monitor = socket.get_monitor_socket(_ENDED | _FAILED | _REFUSED)
        self._socket = socket

    def detach(self) -> None:
        """Close the monitor, while the socket is open."""
        socket, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        if socket is not None and not socket.closed:
            socket.disable_monitor()
        if monitor is not None:
            monitor.close(0)

    def verdict(self, now_ns: int) -> DanubeError | None:
        """Read the monitor; why there is no hope, None while there is."""
        for _ in range(_EVENTS_MAX):
            if self._monitor is None:
                return None
            try:
                content, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, value = _EVENT.unpack(content)
            if not event & _REFUSED:
                self._count(event, now_ns)
            elif value == _NOT_REGISTERED:
                return PermissionDenied(
                    f"this key is not registered with the broker at {self._endpoint} (or expired); have "
                    "the public key of key_file= registered there"
                )
        if self._failures < _FAILURES_MIN or now_ns - self._since_ns < HANDSHAKE_VERDICT_NS:
            return None
        return PermissionDenied(
            f"wrong server key, or the broker at {self._endpoint} does not speak CURVE; compare "
            "server_key= with the key that the broker shows"
        )

    def _count(self, event: int, now_ns: int) -> None:
        if event & _ENDED:
            self._failures = 0
            return
        if not self._failures:
            self._since_ns = now_ns
        self._failures += 1
