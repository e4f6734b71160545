"""The listening socket of a worker's rings: taken again when another process had its name, and never short of words for a
client for whom no descriptor is left."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["NO_DESCRIPTORS", "RingListener", "is_alive"]

NO_DESCRIPTORS = errno.EMFILE, errno.ENFILE
_BACKLOG = 1024


class RingListener:
    """Listen at an abstract address, which every user of the host may have taken."""

    def __init__(self, address: bytes) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Given up to take, and refuse, a client for whom no descriptor is left."""
        self.is_open = False

    def fileno(self) -> int:
        """Readable when a client knocks, once it is open."""
        return self._socket.fileno()

    def open(self) -> bool:
        """Take the address and listen; False while another process has it. Raises OSError."""
        try:
            self._socket.bind(self._address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._socket.listen(_BACKLOG)
        self.is_open = True
        return True

    def accept_all(self, refuse: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
        """Take all that knock; `refuse` has the one for whom no descriptor is left, to tell and close it."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    self._refuse_one(refuse)
                return
            sock.setblocking(False)
            yield sock

    def _refuse_one(self, refuse: Callable[[socket.socket], None]) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
        with contextlib.suppress(OSError):
            sock, _ = self._socket.accept()
            refuse(sock)
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another thread took it; a client that knocks waits until one is free
            self._reserve = -1

    def close(self) -> None:
        """Give the address back."""
        self._socket.close()
        if self._reserve >= 0:
            os.close(self._reserve)


def is_alive(process_id: int) -> bool:
    """Whether a process runs. One that is being killed has no memory any more when its sockets are closed."""
    try:
        return not Path(f"/proc/{process_id}/statm").read_bytes().startswith(b"0 ")
    except OSError:
        return False
