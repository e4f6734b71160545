"""A connection's port over shared memory: what `net.port.Port` is for a ZeroMQ socket.

    dial --> waits for its rings --> open --> lost (the worker ended, or refused)

What is sent before the rings are there, or while they are full, waits in a queue: windows and credit
bound it. The descriptor is readable only for a reader that has found the ring empty, so a `receive_head` that
finds nothing arms it, or the leader does before it sleeps.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Collection
from typing import Any

from danube_fast.errors import DanubeError, Unavailable
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.handover import Refused, dial, take

__all__ = ["RingPort"]

_MESSAGE_BYTES_MAX = 1 << 30
"""Nothing that a broker sends is larger; its own limits are lower."""


class RingPort:
    """Rings to one worker. One thread at a time."""

    __slots__ = ("_duplex", "_queue", "_rest", "_socket", "arms", "free_row", "lost", "more")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._duplex: Duplex | None = None
        self._queue: deque[tuple[Any, ...]] = deque()
        self._rest: list[Any] = []
        self.arms = True
        """Whether a `receive_head` that finds nothing asks the worker for a signal; False: a leader does."""
        self.more = False
        """Parts follow the one that `receive_head` gave."""
        self.lost: DanubeError | None = None
        """Why nothing comes or goes any more."""
        self.free_row = 0
        """Address of the words of the rings, if nothing waits for room in them; or 0."""

    @classmethod
    def dial(cls, ipc_endpoint: str, users: Collection[int] | None = None) -> RingPort | None:
        """Ask the worker at that endpoint for rings; None if it does not listen just now. Raises PermissionDenied if
        it belongs to none of these users."""
        sock = dial(ipc_endpoint, users)
        return None if sock is None else cls(sock)

    def fileno(self) -> int:
        """Return the descriptor to sleep on, once `receive_head` has found nothing: another one as soon as the rings
        are there."""
        return self._socket.fileno() if self._duplex is None else self._duplex.fileno()

    @property
    def refused(self) -> bool:
        """The worker lives and gives no rings to this client."""
        return isinstance(self.lost, Refused)

    def readable(self) -> bool:
        """Whether a message waits."""
        return self._duplex is not None and self.lost is None and self._duplex.readable

    @property
    def has_room(self) -> bool:
        """Whether nothing waits for room."""
        return not self._queue

    @property
    def duplex(self) -> Duplex | None:
        """The rings, while they are there."""
        return self._duplex if self.lost is None else None

    # ------------------------------------------------------------ in

    def receive_head(self) -> bytes | memoryview | None:
        """Return the first part of the next message, if there is one."""
        if self.lost is not None:
            return None
        try:
            message = self._receive()
        except DanubeError as error:
            self._lose(error)
            return None
        if message is None:
            return None
        head: bytes | memoryview
        head, *self._rest = message
        self.more = bool(self._rest)
        return head

    def _receive(self) -> list[Any] | None:
        duplex = self._duplex
        if duplex is None:
            duplex = self._duplex = take(self._socket, _MESSAGE_BYTES_MAX)
            if duplex is None:
                return None
            self._note_room(duplex)
        while True:
            message = duplex.receive()
            if message is not None:
                return message
            here = duplex.hear()
            self._send_queued(duplex)
            if not (self.arms or duplex.readable) or duplex.arm():
                if not here:
                    raise Unavailable("the worker ended")
                return None

    def receive_rest(self) -> list[memoryview]:
        """Return the parts behind the head."""
        rest, self._rest = self._rest, []
        self.more = False
        return [memoryview(part) for part in rest]

    # ------------------------------------------------------------ out

    def post(self, *parts: Any) -> None:
        """Send a copy of one message, now or when there is room."""
        if self.lost is not None:
            return
        duplex = self._duplex
        if duplex is None or self._queue:
            self._queue.append(tuple(bytes(part) for part in parts))
            if duplex is not None:
                self._send_queued(duplex)
            return
        try:
            if not duplex.send(parts):
                self._queue.append(tuple(bytes(part) for part in parts))
            self._note_room(duplex)
        except DanubeError as error:
            self._lose(error)

    def _lose(self, error: DanubeError) -> None:
        """Note that nothing comes or goes any more. Without its traceback, which would keep this object, and the
        rings."""
        self.lost, self.free_row = error.with_traceback(None), 0

    def _note_room(self, duplex: Duplex) -> None:
        self.free_row = 0 if self._queue or duplex.slices else duplex.row

    def _send_queued(self, duplex: Duplex) -> None:
        queue = self._queue
        while queue and duplex.send(queue[0]):
            queue.popleft()
        if duplex.flush() and not queue:
            duplex.wait_no_more()
        self._note_room(duplex)

    def close(self, linger_ms: int) -> None:
        """End the connection. What is in the ring is still read by the worker."""
        if self.lost is None:
            self.lost = Unavailable("the connection was closed")
        self._queue.clear()
        self.free_row = 0
        duplex, self._duplex = self._duplex, None
        if duplex is not None:
            duplex.close()
        self._socket.close()
