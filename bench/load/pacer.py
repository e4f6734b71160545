"""An even pace: sleeps with a timer slack of 1 ns and spins the last 100 microseconds."""

from __future__ import annotations

import ctypes
import time

__all__ = ["Pacer"]

PR_SET_TIMERSLACK = 29
TIMER_SLACK_NS = 1
SPIN_NS = 100_000


class Pacer:
    """Says when message `number` of an open loop is due. Made in the thread that waits."""

    def __init__(self, rate: float) -> None:
        self._interval_ns = 1e9 / rate
        self._began_ns = 0
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)

    def start(self) -> int:
        """Message 0 is due now; that time (CLOCK_MONOTONIC, ns)."""
        self._began_ns = time.monotonic_ns()
        return self._began_ns

    def due_ns(self, number: int) -> int:
        """When a message is due."""
        return self._began_ns + int(number * self._interval_ns)

    def wait(self, number: int) -> int:
        """Wait until a message is due; when that was. Returns at once when it is late."""
        due_ns = self.due_ns(number)
        left_ns = due_ns - SPIN_NS - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        while time.monotonic_ns() < due_ns:
            pass
        return due_ns
