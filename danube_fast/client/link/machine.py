"""The machine that a client runs on: time, sockets, a thread, names.

A simulation passes a `Machine` of its own; everything else of the client is the same there.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from danube_fast.client.link.context import release_context, take_context
from danube_fast.client.link.dialer import Dialer, Rings
from danube_fast.client.link.trust import Trust
from danube_fast.clock import Clock, SystemClock
from danube_fast.net.host import host_id

if TYPE_CHECKING:
    from danube_fast.client.link.timers import TimerThread

__all__ = ["Machine"]


class Machine:
    """The machine as it is, for one client. Close it."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self._context = take_context()

    def close(self) -> None:
        """Give the context back, when all sockets are closed."""
        release_context(self._context)

    def make_dialer(self, rings: Rings, trust: Trust) -> Dialer:
        """Return what opens the ports of one connection."""
        return Dialer(self._context, rings, self.clock, trust)

    def start(self, timers: TimerThread) -> None:
        """Serve deadlines from now on."""
        timers.start()

    def new_name(self, beginning: str) -> str:
        """Return a name that no other client has."""
        return f"{beginning}-{secrets.token_hex(4)}"

    def host_id(self) -> str:
        """Return an id that is the same for all processes of one host."""
        return host_id()

    def process_id(self) -> int:
        """Return the id of the client's process."""
        return os.getpid()
