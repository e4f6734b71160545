"""Why a CURVE connection does not come about: libzmq tells it to a socket's monitor only.

    the key is not registered     FAILED_AUTH 400       once, then libzmq gives up
    the broker has another key    FAILED_NO_DETAIL      with every attempt, as the broker closes without a word
    the broker has no CURVE       FAILED_PROTOCOL       once, then libzmq gives up
    nothing listens               CLOSED                with every attempt
    the broker asks for a key     FAILED_PROTOCOL       once, likewise; seen by a client without one
    the broker fails to check it  FAILED_AUTH 500       no verdict: that passes
    a stopped process listens     nothing               the same

A refused key is a verdict at once, and so is a missing one. A broker that ends in the middle of a handshake looks like one with another key,
so such failures are a verdict only when they go on for a while and nothing else is seen meanwhile. Of several keys
another one is tried with each failure.
"""

from __future__ import annotations

import enum
import struct

import zmq

from danube_fast.client.values.limits import HANDSHAKE_VERDICT_NS

__all__ = ["Handshake", "HandshakeWatch"]

_EVENT = struct.Struct("=Hi")
_ENDED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
"""Events behind which failures are counted anew."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_NOT_REGISTERED = 400
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_FAILURES_MIN = 2
_EVENTS_MAX = 1000
"""Read in one look."""


class Handshake(enum.Enum):
    """How a handshake stands."""

    PENDING = 1
    UNPROVED = 2
    """The broker has none of our keys, or no CURVE."""
    REFUSED = 3
    """The broker does not know this client's key."""
    KEYLESS = 4
    """The broker asks for a key, and this client has none."""


class HandshakeWatch:
    """Reads the monitors of one connection's sockets, one after the other, until a handshake is done."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._endpoint = ""
        self._has_key = False
        self.failures = 0
        """Handshakes with this endpoint that the broker has left, one behind the other."""
        self._since_ns = 0
        """When the first of them was seen."""
        self.is_undecided = False
        """Whether the broker could not say, when it was asked last, who may come in."""

    @property
    def is_open(self) -> bool:
        """Whether a monitor is to be read."""
        return self._monitor is not None

    def attach(self, socket: zmq.Socket[bytes], endpoint: str, *, has_key: bool) -> None:
        """Watch a socket, before it connects. Raises ZMQError."""
        self._has_key = has_key
        if endpoint != self._endpoint:
            self._endpoint, self.failures, self.is_undecided = endpoint, 0, False
        self._monitor = socket.get_monitor_socket(_ENDED | _FAILED | _REFUSED)
        self._socket = socket

    def forget(self) -> None:
        """Count failures anew: something has changed that they depended on."""
        self.failures = 0

    def detach(self) -> None:
        """Close the monitor, while the socket is open."""
        socket, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        if socket is not None and not socket.closed:
            socket.disable_monitor()
        if monitor is not None:
            monitor.close(0)

    def look(self, now_ns: int, keys: int = 1, verdict_ns: int = HANDSHAKE_VERDICT_NS) -> Handshake:
        """Read the monitor. `keys`: how many are tried in turn; `verdict_ns`: how long failures are none."""
        for _ in range(_EVENTS_MAX):
            if self._monitor is None:
                return Handshake.PENDING
            try:
                content, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, value = _EVENT.unpack(content)
            if not self._has_key:
                if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM:
                    return Handshake.KEYLESS
            elif not event & _REFUSED:
                self._count(event, now_ns)
            elif value == _NOT_REGISTERED:
                return Handshake.REFUSED
            else:
                self.is_undecided = True
        if self.failures < keys * _FAILURES_MIN or now_ns - self._since_ns < verdict_ns:
            return Handshake.PENDING
        return Handshake.UNPROVED

    def _count(self, event: int, now_ns: int) -> None:
        if event & _ENDED:
            self.failures, self.is_undecided = 0, False
            return
        if not self.failures:
            self._since_ns = now_ns
        self.failures += 1
