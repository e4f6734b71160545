"""Where a process of the broker sleeps: on its ROUTER and on its doorbell."""

from __future__ import annotations

import select

from danube_fast.net.server import Server
from danube_fast.workers.mailbox import Mailbox

__all__ = ["Sleeper"]


class Sleeper:
    """Used by the loop of its process only. Bind the server before."""

    def __init__(self, server: Server, mailbox: Mailbox) -> None:
        self._server = server
        self._mailbox = mailbox
        self._bell = mailbox.fileno()
        self._poll = select.poll()
        self._poll.register(server.fileno(), select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    def sleep(self, timeout_ms: int) -> None:
        """Sleep until a client or a peer has something to say, or the time is up."""
        # ZeroMQ raises its descriptor once for several messages: look before each sleep
        if self._mailbox.prepare_sleep() and not self._server.readable():
            events = self._poll.poll(timeout_ms)
            self._mailbox.silent = all(fd != self._bell for fd, _ in events)
