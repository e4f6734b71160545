"""The heartbeat of a connection: the PING that went last, and whether the broker was heard since.

Its PONG has a row, as the ack of a `publish()` has one, so a leader that sleeps in its kernel takes it there, and no thread
of an idle client wakes up for it.
"""

from __future__ import annotations

from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.pump import Pump

__all__ = ["Heartbeat"]


class Heartbeat:
    """Watch over one connection. Under the pump's lock."""

    def __init__(self, pump: Pump, link: int) -> None:
        """`link`: the number of the connection's link."""
        self._pump, self._link = pump, link
        self._answer = Ticket()
        self._sent_ns = 0

    def silent_ns(self, now_ns: int, heard_ns: int) -> int:
        """Return for how long a heartbeat has gone unanswered; 0: something came behind it, or none was sent.
        `heard_ns`: when something came last, but for this answer."""
        if self._take() or heard_ns >= self._sent_ns:
            self._sent_ns = 0
        return now_ns - self._sent_ns if self._sent_ns else 0

    def beat(self, now_ns: int, request: int) -> None:
        """Note that one is sent with this request."""
        self._sent_ns = self._sent_ns or now_ns
        if not self._answer.row:
            self._pump.answers.expect(self._answer, self._link, request)

    def forget(self) -> None:
        """Wait for no answer any more: the connection begins anew, or has ended."""
        self._sent_ns = 0
        self._take()

    def _take(self) -> bool:
        """Take the row back; whether a kernel has answered it."""
        if not self._answer.row:
            return False
        was_answered = self._pump.answers.take(self._answer) is not None
        if not was_answered:
            self._pump.free_rows()
        return was_answered
