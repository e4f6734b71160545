"""Sleep of a process of the broker: until a client or another process wakes it."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable

from danube_fast.clock import Clock, spin
from danube_fast.workers.process.mailbox import Mailbox

__all__ = ["IdleStrategy"]


Poll = Callable[[int], list[tuple[int, int]]]
Wait = Callable[[int, Poll], list[tuple[int, int]]]


class IdleStrategy:
    """Sleep on the sockets of clients and on the doorbell. Used by the loop of its process only; bind the sockets
    before."""

    def __init__(
        self, filenos: Iterable[int], readable: Callable[[], bool], mailbox: Mailbox, clock: Clock,
        spin_us: int = 0, wait: Wait | None = None,
    ) -> None:  # fmt: skip
        """`wait`: how to sleep, from milliseconds and a poll of all descriptors; by default with that poll."""
        self._clock = clock
        self._spin_ns = spin_us * 1000
        self._readable, self._mailbox = readable, mailbox
        self._bell = mailbox.fileno()
        self._wait = wait or (lambda timeout_ms, poll: poll(timeout_ms))
        self._poll = select.poll()
        for fd in (*filenos, self._bell):
            self._poll.register(fd, select.POLLIN)

    def sleep(self, timeout_ms: int) -> bool:
        """Sleep until a client or a peer wakes the process, or the time is up. True if only a client did."""
        # ZeroMQ raises its descriptor once for several messages: look before each sleep
        if not self._mailbox.prepare_sleep() or self._readable():
            return False
        found = spin(self._clock, self._spin_ns, lambda: self._poll.poll(0))
        events = found or self._wait(timeout_ms, self._poll.poll)
        # a peer that died between push and ring is heard of when the time is up
        self._mailbox.silent = bool(events) and self._bell not in dict(events)
        return self._mailbox.silent
