"""A listening tcp socket that outlives what accepts from it: ZeroMQ gets duplicates of its descriptor, one after the other.

Between two of them the kernel goes on to queue connections: no client is refused, and no other process takes the port.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Collection

from danube_fast.net.failed_handshakes import sources_filter

__all__ = ["Listener"]


_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_INSTRUCTION = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("@HP")
"""struct sock_filter and struct sock_fprog of Linux."""


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
        if not sources:
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
            return
        program = [_INSTRUCTION.pack(*each) for each in sources_filter(sources)]
        room = ctypes.create_string_buffer(b"".join(program))
        told = _PROGRAM.pack(len(program), ctypes.addressof(room))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)

    def close(self) -> None:
        """Give the port up, once nothing accepts from it."""
        self._socket.close()
