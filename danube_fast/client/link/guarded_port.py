r"""A ZeroMQ socket over ipc to a broker that has to prove which user it runs as.

    PING, without a session --> any answer: libzmq adds whose process sent it --> what waits is sent
                                                                             \--> lost: a stranger listens there

Abstract names can be taken by every user of the host while a worker is down. So nothing but a PING goes out before the
kernel has said who is at the other end, and libzmq does not reconnect by itself: who listens then may be another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import zmq

from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from danube_fast.frame.kernel import direct
from danube_fast.net.port import Port
from danube_fast.net.port_row import find_events
from danube_fast.net.protocol import Ping, encode
from danube_fast.ring.handover import stranger_text

__all__ = ["GuardedPort"]

_find_events = direct(find_events)
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_POLL_BOTH = _POLLIN | _POLLOUT
_PEER = "Peer-Address"
_PEER_FIELDS = 3
"""`:user:group:process` at its end. Set by libzmq before the peer's own properties, which do not replace it."""


class GuardedPort(Port):
    """A connected DEALER whose peer is checked. One thread at a time."""

    __slots__ = ("_endpoint", "_queue", "_users", "lost")

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, users: Collection[int]) -> None:
        """Ask who is there."""
        super().__init__(socket)
        self.free_row = 0
        self._endpoint, self._users = endpoint, users
        self._queue: deque[tuple[bytes, ...]] | None = deque()
        """Waits until the peer is known, then None."""
        self.lost: DanubeError | None = None
        """Why nothing comes or goes any more."""
        self._send(encode(Ping(1)))

    def readable(self) -> bool:
        """Whether a message waits, or the end."""
        return self.lost is not None or self._events() != _POLLOUT

    def receive_head(self) -> memoryview | None:
        """Return the first part of the next message, if there is one and its sender may be trusted."""
        if self.lost is None and self._queue is not None:
            self._look()
        if self.lost is not None or self._queue is not None:
            return None
        return super().receive_head()

    def has_more(self) -> bool:
        """Whether a message waits after all; notes the end, when all that came has been received. To ask for events takes
        back what the descriptor was raised for, so that only this answer says that it will be raised again."""
        if self.lost is not None:
            return False
        events = self._events()
        if not events:
            self._end()
        return events & _POLLIN != 0

    def _look(self) -> None:
        """Read the answer to the PING, and send what waits for it."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        user = _user_of(frames[0])
        if user not in self._users:
            self.lost = PermissionDenied(stranger_text(self._endpoint, user, self._users))
            self._queue = None
            return
        queue, self._queue = self._queue, None
        self.free_row = self.row
        for parts in queue or ():
            self._send(*parts)

    def post(self, *parts: Any) -> None:
        """Send a copy of one message, now or when it is known who is there."""
        if self._queue is None:
            self._send(*parts)
        else:
            self._queue.append(tuple(bytes(part) for part in parts))

    def _send(self, *parts: Any) -> None:
        if self.lost is not None:
            return
        try:
            super().post(*parts)
        except zmq.Again:  # high-water marks are off: there is no connection any more
            self._end()

    def _events(self) -> int:
        """POLLIN while a message waits, POLLOUT while there is a connection, the only one of the socket."""
        events: int = _find_events(self.row)
        if events < 0:
            raise zmq.ZMQError(-events)
        return events & _POLL_BOTH

    def _end(self) -> None:
        self.lost, self.free_row = Unavailable("the worker ended"), 0


def _user_of(frame: zmq.Frame) -> int | None:
    """The user whose process sent that; None if the kernel did not say."""
    try:
        address = frame.get(_PEER)
    except zmq.ZMQError:
        return None
    fields = str(address).rsplit(":", _PEER_FIELDS)
    return int(fields[1]) if len(fields) > _PEER_FIELDS and fields[1].isdecimal() else None
