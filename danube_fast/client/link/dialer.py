"""How a connection gets its port: rings where they may be, a ZeroMQ socket otherwise.

A connection that had rings waits a while for new ones when the worker ends, as it is about to come back; one
that never had them goes to ZeroMQ at once.
"""

from __future__ import annotations

import enum

import zmq

from danube_fast.client.link.ring_port import RingPort
from danube_fast.client.values.limits import RINGS_WAIT_NS
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.net.port import Port

__all__ = ["Dialer", "Rings"]

_RECONNECT_MS = 25
_RECONNECT_MS_MAX = 50
"""While a worker is away its clients ask again so often: what was due meanwhile comes so much later."""
_HANDSHAKE_MS_MAX = 5000


class Rings(enum.Enum):
    """Whether a connection goes through shared memory."""

    NEVER = 1
    PREFERRED = 2
    REQUIRED = 3


class Dialer:
    """Opens the ports of one connection, one after the other."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], rings: Rings, clock: Clock) -> None:
        self._context = context
        self._rings = rings
        self._clock = clock
        self._wait_until_ns = 0
        """Until then only rings will do."""

    def open(self, endpoint: str) -> Port | RingPort | None:
        """Open a port; None while rings are not to be had and nothing else will do.

        Raises Unavailable for an endpoint that makes no sense, or without descriptors.
        """
        if self._rings is not Rings.NEVER:
            port = RingPort.dial(endpoint)
            waits = self._clock.monotonic_ns() < self._wait_until_ns
            if port is not None or waits or self._rings is Rings.REQUIRED:
                return port
        return self._open_socket(endpoint)

    def lost(self, port: RingPort, *, was_open: bool) -> DanubeError | None:
        """Note that rings ended or were refused; why there is no hope, None if `open` may be tried again."""
        if was_open:
            self._wait_until_ns = self._clock.monotonic_ns() + RINGS_WAIT_NS
        if port.refused:
            if self._rings is Rings.REQUIRED:
                return Unavailable(f"{port.lost}; use transport='auto', or 'zmq'")
            self._rings = Rings.NEVER
        return None

    def _open_socket(self, endpoint: str) -> Port:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unavailable(
                f"no more sockets in this process ({error}); close clients, or raise `ulimit -n`"
            ) from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS_MAX)
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise Unavailable(f"cannot connect to {endpoint} ({error}); check it") from error
        return Port(socket)
