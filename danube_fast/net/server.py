"""The broker's ROUTER socket: bind, drain, send without ever blocking.

Identities are chosen by the server: ZeroMQ gives a peer that names none a 5-byte identity, a zero byte and 32 bits that
count up from a random beginning, and a peer cannot claim one that is in use. A peer that brings a name of another kind is ignored.
Written and read by the worker's loop only.

With `proves` ZeroMQ asks a `ZapThread` about every connection, on tcp behind CURVE, on ipc by the peer's user; whom it
does not admit sends nothing. The first messages of a connection, until its sender is known, are handed out with the proof.
The thread names connections, too, so that a client cannot ask for the name of another; one that has a name of another kind
is ignored, and cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from danube_fast.descriptors import descriptor_limit, lowest_free_descriptor
from danube_fast.errors import Internal, Unavailable
from danube_fast.net.connection_guard import ConnectionGuard
from danube_fast.net.listener import Listener
from danube_fast.net.port import SEND_LAST, SEND_MORE, Part, Port, send_part
from danube_fast.net.session import ROUTED, Sessions
from danube_fast.net.zap import DOMAIN, NAME_BYTES

__all__ = ["PeerGone", "Server", "WouldBlock"]

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)

BACKLOG = 4096
"""Connections that may wait to be accepted; ZeroMQ's 100 collapses under 1,000 at once."""
HIGH_WATER_MARK = 1000
"""ZeroMQ messages queued per peer and direction; flow control by bytes lies above it."""
BIND_DESCRIPTORS = 16
"""Of a server that listens on tcp and ipc, and of its guard, with room for the first clients."""
PART_BYTES_MAX_SLACK = 1024 * 1024
PARTS_MAX = 64
"""Parts of one message that are looked at; a longer message is dropped."""
_ADDRESS = "Peer-Address"
"""Where a peer is: an IP address; on ipc its user, group and process."""
_USER_ID = "User-Id"
"""What the ZapThread said of a connection, as libzmq names it. A peer cannot: what a handshake claims under this name
does not replace it."""


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
        curve_secret: str = "",
        proves: bool = False,
    ) -> None:
        """`curve_secret`: the secret key of the broker, Z85, with which tcp is encrypted. `proves`: a `ZapThread` of the
        same context says who may connect, and has started before `bind`; without a key no client on tcp may."""
        # ZeroMQ draws the first name that ROUTER gives from libc, which begins alike in every process otherwise; a peer
        # that asks for the next one would end this process, as libzmq 4.3 takes that for a fault of its own
        _libc.srand(int.from_bytes(os.urandom(4)))
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.HANDSHAKE_IVL, handshake_timeout_ms)
        socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max + PART_BYTES_MAX_SLACK)
        if proves:
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket = socket
        self.proves = proves
        self.guard: ConnectionGuard | None = None
        """Bounds what connections cost, from `bind` to `close`; None: nothing does."""
        self._curve_secret = curve_secret
        self._listener: Listener | None = None
        """What listens on tcp behind CURVE, in the kernel, however often the key changes."""
        self._tcp_endpoint = ""
        self.proof = ""
        """Of the message that `receive` has just given, until it is asked for the next one: what its connection has
        proved; empty if the sender is known, or nothing is to be proved."""
        self.address = ""
        """Of the same message, where its sender is; empty likewise."""
        self.introduces = proves
        """Whether messages of peers without a session are handed out with the address of their sender."""
        self.is_known: Callable[[bytes], bool] = lambda identity: True
        """Whether a peer has a session, so that its messages need no proof; asked if `looks_at_senders`."""
        self._ipc_endpoint = ""
        self._ipc_is_open = False
        self.ipc_is_taken = False
        """Whether another process has the name on ipc; it is taken again once it is free."""
        self._port = Port(socket)
        self._held: tuple[bytes, Any, list[Any], bool] | None = None
        self._rests = False
        self.drained = False
        """The last `receive` took everything that was there."""

    @property
    def looks_at_senders(self) -> bool:
        """Whether commands of peers without a session are received with what ZeroMQ says of them, so not by kernels."""
        return self.proves or self.introduces or self.guard is not None

    def follow(
        self, sessions: Sessions, drained: Callable[[], int], wake: Callable[[], None]
    ) -> None:
        """Know peers by these sessions. `drained`, `wake`: see `ConnectionGuard.follow`."""
        self.is_known = sessions.knows
        if self.guard is not None:
            self.guard.follow(sessions.heard_ns, drained, wake)

    @property
    def handle(self) -> int:
        """Address of the socket, for kernels."""
        return int(self.socket.underlying)

    def readable(self) -> bool:
        """Whether a message waits. It also does what ZeroMQ's descriptor was raised for."""
        return self._held is not None or self._port.readable()

    def fileno(self) -> int:
        """The descriptor to sleep on, whenever nothing is `readable`."""
        return int(self.socket.getsockopt(zmq.FD))

    def bind(self, host: str, port: int, ipc_endpoint: str) -> int:
        """Listen on tcp (`port` 0: chosen by the system) and on ipc; returns the tcp port.

        An ipc name that another process has is waited for: any user of the host may take it while a worker is down, and
        clients have tcp meanwhile. Raises Unavailable when the tcp address is taken, or descriptors are.
        """
        left = descriptor_limit() - lowest_free_descriptor()
        if left < BIND_DESCRIPTORS:  # ZeroMQ ends the process if it has none for a socket
            raise Unavailable(
                f"cannot listen on {host}:{port}: {left} file descriptors are left, and {BIND_DESCRIPTORS} are needed; "
                "raise `ulimit -n`"
            )
        if self.guard is not None:
            self.guard.start()
        try:
            bound = self._bind_tcp(host, port)
        except (OSError, zmq.ZMQError) as error:
            if self.guard is not None:
                self.guard.stop()  # nothing else closes a server that was never bound
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error}; choose another port with --listen, or "
                "stop what uses this one"
            ) from error
        self._ipc_endpoint = ipc_endpoint
        if ipc_endpoint and not self._bind_ipc():
            _log.warning(
                "another process listens at %s: there are no ipc connections until it ends",
                ipc_endpoint,
            )
        return int(bound.rsplit(":", 1)[1])

    def _bind_tcp(self, host: str, port: int) -> str:
        """Listen on tcp, behind CURVE if there is a key; returns the endpoint. Raises OSError, ZMQError."""
        if not self._curve_secret:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
            return self._last_endpoint()
        self._listener = Listener(host, port, BACKLOG)
        if self.guard is not None:
            self.guard.failed.drop, self.guard.failed.ends = (
                self._listener.drop,
                self._listener.ends(),
            )
        return self._bind_curve(self._listener, self._listener.duplicate())

    def _bind_curve(self, listener: Listener, duplicate: int) -> str:
        """Accept connections of the listening socket behind CURVE; returns the endpoint. An endpoint keeps the mechanism
        that it was bound with; the next one, which is ipc, has none. `duplicate` is closed with it. Raises ZMQError."""
        bound = self.socket
        bound.setsockopt(zmq.CURVE_SECRETKEY, self._curve_secret.encode())
        bound.setsockopt(zmq.CURVE_SERVER, 1)
        bound.setsockopt(zmq.USE_FD, duplicate)
        try:
            bound.bind(listener.endpoint)
        finally:
            bound.setsockopt(zmq.USE_FD, -1)
            bound.setsockopt(zmq.CURVE_SERVER, 0)
        self._tcp_endpoint = self._last_endpoint()
        return self._tcp_endpoint

    def rekey(self, curve_secret: str) -> None:
        """Have another secret key on tcp from now on. Connections there end, and clients make new ones: those that wait
        meanwhile are not refused, as the kernel listens on. Raises Internal."""
        if self._curve_secret == curve_secret and self._tcp_endpoint:
            return
        listener = self._listener
        if listener is None:
            raise Internal("a key is given to a socket that does not listen; this is a bug")
        try:
            # first: without a descriptor the key before stays in use
            duplicate = listener.duplicate()
            if self._tcp_endpoint:
                endpoint, self._tcp_endpoint = self._tcp_endpoint, ""
                self.socket.unbind(endpoint)
            self._curve_secret = curve_secret
            self._bind_curve(listener, duplicate)
        except (OSError, zmq.ZMQError) as error:
            raise Internal(f"tcp clients cannot come in behind the new key: {error}") from error

    def _last_endpoint(self) -> str:
        bound = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        return (bound.decode() if isinstance(bound, bytes) else str(bound)).rstrip("\0")

    def _bind_ipc(self) -> bool:
        """Listen on ipc; False while the name is taken."""
        try:
            self.socket.bind(self._ipc_endpoint)
        except zmq.ZMQError as error:
            self.ipc_is_taken = error.errno == zmq.EADDRINUSE
            return False
        self._ipc_is_open, self.ipc_is_taken = True, False
        return True

    def mind_descriptors(self) -> None:
        """Take no new ipc connections while half of the descriptors are in use; call it often.

        ZeroMQ ends the process if it has none left for an ipc connection. For tcp it tries until there
        is one, and a client that does not finish the handshake in time is dropped. To close the ipc
        endpoint ends its connections; their clients come back once it is open again.
        """
        if not self._ipc_endpoint:
            return
        limit = descriptor_limit()
        used = lowest_free_descriptor()
        if self._ipc_is_open and used > limit // 2:
            self._ipc_is_open = False
            _log.warning(
                "%d of %d file descriptors are in use: no new ipc connections until fewer are; "
                "raise `ulimit -n`", used, limit,
            )  # fmt: skip
            with contextlib.suppress(zmq.ZMQError):
                self.socket.unbind(self._ipc_endpoint)
        elif not self._ipc_is_open and used < limit // 8 * 3:
            self._bind_ipc()  # the address is free again a moment later

    def receive(self, limit: int) -> Iterator[tuple[bytes, memoryview, list[zmq.Frame | bytes]]]:
        """Up to `limit` waiting messages: identity, command (valid until the next one), parts
        behind it. Never blocks."""
        port, looks = self._port, self.looks_at_senders
        if limit <= 0:
            return
        try:
            if self._held is not None:
                identity, command, parts, port.more = self._held
                self._held, self.drained, self.proof, self.address = None, False, "", ""
                if command is None:
                    command = self._receive_command(identity)
                parts += port.receive_rest()
                if self._is_named(identity) and len(parts) < PARTS_MAX:
                    yield identity, command, parts
                limit -= 1
            elif self._rests:
                self._rests = False
                return
            self.drained = False
            for _ in range(limit):
                head = port.receive_head()
                if head is None:
                    self.drained = True
                    return
                identity = bytes(head)
                command = self._receive_command(identity) if looks else port.receive_head()
                parts = port.receive_rest() if port.more else []
                if command is None or len(parts) >= PARTS_MAX:
                    continue
                if self._is_named(identity):
                    yield identity, command, parts
        finally:
            # the next command may come over rings, and nothing was proved there
            self.proof = self.address = ""

    def _is_named(self, identity: bytes) -> bool:
        """Whether a peer has the kind of name that it is to have."""
        return identity[:1] == ROUTED and (not self.proves or len(identity) == NAME_BYTES)

    def _receive_command(self, identity: bytes) -> memoryview | None:
        """The part behind the identity; of a sender without a session its proof and address too, and its connection for
        the guard."""
        self.proof = self.address = ""
        if not self.looks_at_senders or self.is_known(identity):
            return self._port.receive_head()
        frame = self._port.receive_frame()
        if self.introduces:
            self.address = _property_of(frame, _ADDRESS)
        if self.proves:
            self.proof = _property_of(frame, _USER_ID)  # nothing was proved: the proof is empty
        if self.guard is not None:
            with contextlib.suppress(KeyError, zmq.ZMQError):
                name = identity if self._is_named(identity) else b""
                self.guard.note_sender(int(frame.get(zmq.SRCFD)), name)
        return frame.buffer

    @property
    def holds(self) -> bool:
        """Whether a message that kernels have received is not handed out yet."""
        return self._held is not None

    def hold(self, identity: bytes, command: Any, parts: list[Any], *, more: bool) -> None:
        """Keep the message that kernels have begun to receive for the next `receive`, which goes first; `more` parts
        of it follow. `command` None: it is the first of those."""
        self._held = identity, command, parts, more

    def rest(self, *, drained: bool) -> None:
        """Let the next `receive` find nothing: kernels have just taken what there was, all of it or enough."""
        self._rests, self.drained = True, drained

    @staticmethod
    def room(size: int) -> Part:
        """Memory for a part that `send` does not copy. Raises MemoryError."""
        return Part(size)

    def send(self, identity: bytes, parts: list[bytes | zmq.Frame | Part]) -> None:
        """Queue one message for a peer. Raises PeerGone or WouldBlock; then nothing was sent."""
        port = self._port
        left = len(parts)
        try:
            port.send_more(identity)
            for part in parts:
                left -= 1
                if type(part) is bytes:
                    port.send(part, SEND_MORE if left else SEND_LAST)
                elif type(part) is Part:
                    port.give(part, SEND_MORE if left else SEND_LAST)
                else:
                    send_part(port.socket, part, SEND_MORE if left else SEND_LAST, False)
        except zmq.Again as error:
            raise WouldBlock from error
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK):
                raise PeerGone from error
            raise

    def close(self) -> None:
        """Close the socket; what was queued is dropped."""
        if self.guard is not None:
            self.guard.stop()
        with contextlib.suppress(zmq.ZMQError):
            self._port.close(0)
        if self._listener is not None:
            self._listener.close()


def _property_of(frame: zmq.Frame, name: str) -> str:
    """Read what ZeroMQ says of a message's connection; empty if it says nothing."""
    try:
        return str(frame.get(name))
    except (KeyError, zmq.ZMQError):
        return ""
