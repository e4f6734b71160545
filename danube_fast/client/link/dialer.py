"""How a connection gets its port: rings where they may be, a ZeroMQ socket otherwise.

A connection that had rings waits a while for new ones when the worker ends, as it is about to come back; one
that never had them goes to ZeroMQ at once.

A broker that has to prove itself (`trust.py`) is asked to with every port: by CURVE over tcp, by the kernel's word on
this host.
"""

from __future__ import annotations

import enum

import zmq

from danube_fast.client.link.guarded_port import GuardedPort
from danube_fast.client.link.handshakes import HandshakeWatch
from danube_fast.client.link.ring_port import RingPort
from danube_fast.client.link.trust import Trust
from danube_fast.client.values.limits import HANDSHAKE_LOOK_NS, RINGS_WAIT_NS
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from danube_fast.net.port import Port
from danube_fast.ring.handover import knock

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

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rings: Rings,
        clock: Clock,
        trust: Trust,
    ) -> None:
        self._context = context
        self._rings = rings
        self._clock = clock
        self._trust = trust
        self._watch = HandshakeWatch()
        self._refusal: DanubeError | None = None
        """Why the last port was not opened, when another attempt has no hope."""
        self.tcp = ""
        """Endpoint where there are no rings; empty: the same one."""
        self._wait_until_ns = 0
        """Until then only rings will do."""

    def open(self, endpoint: str) -> Port | RingPort | None:
        """Open a port; None while rings are not to be had and nothing else will do, or `verdict` says why not.

        Raises Unavailable for an endpoint that makes no sense, or without descriptors.
        """
        try:
            if self._rings is not Rings.NEVER:
                try:
                    port = RingPort.dial(endpoint, self._trust.users)
                except PermissionDenied:
                    # over tcp the broker proves itself by its key; without one it is known by its user only
                    is_known_by_user = self._trust.is_secured and not self.tcp
                    if is_known_by_user or self._rings is Rings.REQUIRED:
                        raise
                    # a broker of another user has no rings for this one
                    self._rings = Rings.NEVER
                    return self._open_socket(endpoint)
                waits = self._clock.monotonic_ns() < self._wait_until_ns
                if port is not None or waits or self._rings is Rings.REQUIRED:
                    return port
            return self._open_socket(endpoint)
        except PermissionDenied as error:
            self._refusal = error.with_traceback(None)
            return None

    def next_look_ns(self, limit_ns: int) -> int:
        """Return when to ask for a verdict, before that time at the latest."""
        if self._refusal is not None:
            return self._clock.monotonic_ns()
        if self._watch.is_open:
            return min(limit_ns, self._clock.monotonic_ns() + HANDSHAKE_LOOK_NS)
        return limit_ns

    def verdict(self, now_ns: int) -> DanubeError | None:
        """Return why there is no hope of a handshake; None while there is."""
        return self._refusal or self._watch.verdict(now_ns)

    def settle(self) -> None:
        """Note that the handshake over the last port is done, or given up; before that is closed."""
        self._watch.detach()

    def lost(self, port: RingPort | GuardedPort, *, was_open: bool) -> DanubeError | None:
        """Note that a port has ended or was refused; why there is no hope, None if `open` may be tried again."""
        if isinstance(port, GuardedPort):
            return port.lost if isinstance(port.lost, PermissionDenied) else None
        if was_open:
            self._wait_until_ns = self._clock.monotonic_ns() + RINGS_WAIT_NS
        if port.refused:
            if self._rings is Rings.REQUIRED:
                return Unavailable(f"{port.lost}; use transport='auto', or 'zmq'")
            self._rings = Rings.NEVER
        return None

    def _open_socket(self, endpoint: str) -> Port | None:
        """Open a socket; None if it would be guarded, and nothing listens there just now."""
        endpoint = self.tcp or endpoint
        trust, is_ipc = self._trust, endpoint.startswith("ipc://")
        is_guarded = is_ipc and trust.is_secured
        is_curve = bool(trust.server_key) and not is_ipc
        if is_curve and not endpoint.startswith("tcp://"):
            raise PermissionDenied(
                f"{endpoint} is an endpoint of neither tcp nor ipc, over which this broker cannot prove "
                "its server_key; check what the broker advertises"
            )
        if is_guarded and not knock(endpoint, trust.users):
            return None
        socket = self._new_socket()
        if is_guarded:
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            if is_curve:
                socket.setsockopt_string(zmq.CURVE_SERVERKEY, trust.server_key)
                socket.setsockopt_string(zmq.CURVE_PUBLICKEY, trust.public)
                socket.setsockopt_string(zmq.CURVE_SECRETKEY, trust.secret)
                self._watch.attach(socket, endpoint)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._watch.detach()
            socket.close(0)
            raise Unavailable(f"cannot connect to {endpoint} ({error}); check it") from error
        return GuardedPort(socket, endpoint, trust.users) if is_guarded else Port(socket)

    def _new_socket(self) -> zmq.Socket[bytes]:
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
        return socket
