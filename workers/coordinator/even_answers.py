"""Answers of lists, at whole quarters of a second behind their questions.

    list of names --> the authorizer of another package is asked about each that roles show --> held until then --> answer

Without that authorizer answers go at once: roles are asked in microseconds. With it each name takes as long as a question,
and the time of the answer would tell a name that is hidden from one that is missing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count

from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.errors import ResourceExhausted
from danube_fast.net import protocol
from danube_fast.workers.process.mailbox import NEVER_NS

__all__ = ["EvenAnswers"]

STEP_NS = 250 * MILLISECOND_NS
"""Some hundred questions fit in."""
HELD_OF_ONE_MAX = 100
"""Of one session."""


class EvenAnswers:
    """Hold answers back. Used by the coordinator's loop only."""

    def __init__(
        self, clock: Clock, reply: Callable[[int, protocol.ServerCommand], object], *, holds: bool
    ) -> None:
        """`reply` answers a session by its number; without `holds` it does so at once."""
        self._clock, self._reply, self._holds = clock, reply, holds
        self._held: list[tuple[int, int, int, protocol.ServerCommand]] = []
        """A heap of: when, a running number, the session's number, the answer."""
        self._of_one: Counter[int] = Counter()
        self._numbers = count()

    def reply(self, number: int, answer: protocol.Result | protocol.Error, began_ns: int) -> None:
        """Answer session `number` what it has asked at `began_ns`."""
        if not self._holds:
            self._reply(number, answer)
            return
        if self._of_one[number] >= HELD_OF_ONE_MAX:
            text = f"{HELD_OF_ONE_MAX} lists of this client are under way; wait for one of them"
            self._reply(number, protocol.Error(answer.request, ResourceExhausted.code, text))
            return
        steps = (self._clock.monotonic_ns() - began_ns) // STEP_NS + 1
        self._of_one[number] += 1
        heapq.heappush(
            self._held, (began_ns + steps * STEP_NS, next(self._numbers), number, answer)
        )

    def do_work(self, now_ns: int) -> int:
        """Send what is due; how many answers."""
        sent = 0
        while self._held and self._held[0][0] <= now_ns:
            _, _, number, answer = heapq.heappop(self._held)
            self._of_one[number] -= 1
            if not self._of_one[number]:
                del self._of_one[number]
            self._reply(number, answer)
            sent += 1
        return sent

    def next_deadline_ns(self) -> int:
        """When `do_work` must run again at the latest."""
        return self._held[0][0] if self._held else NEVER_NS
