"""A listening tcp socket that outlives what accepts from it: ZeroMQ gets duplicates of its descriptor, one after the other.

Between two of them the kernel goes on to queue connections: no client is refused, and no other process takes the port.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

from danube_fast.net.early_ends import EarlyEnds
from danube_fast.net.socket_filter import attach, detach, sources_filter

__all__ = ["Listener"]


class Listener:
    """Hold a tcp port. Made listening, released by `close`."""

    def __init__(self, host: str, port: int, backlog: int) -> None:
        """`port` 0: the system chooses one. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("" if host == "*" else host, port))
            self._socket.listen(backlog)
            self._socket.setblocking(False)  # a thread of ZeroMQ must not wait in accept
        except BaseException:
            self._socket.close()
            raise

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ writes it."""
        host, port = self._socket.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def duplicate(self) -> int:
        """Duplicate the descriptor; the taker closes it. Raises OSError."""
        return os.dup(self._socket.fileno())

    def drop(self, sources: Collection[bytes]) -> None:
        """Have the kernel drop packets of new connections from these sources, and from no others; connections that are
        up are not met. Raises OSError."""
        if sources:
            attach(self._socket, sources_filter(sources))
        else:
            detach(self._socket)

    def ends(self) -> EarlyEnds:
        """Make what tells of connections to this port that have ended early; not open yet."""
        host, port = self._socket.getsockname()[:2]
        return EarlyEnds(host, port)

    def close(self) -> None:
        """Give the port up, once nothing accepts from it."""
        self._socket.close()
