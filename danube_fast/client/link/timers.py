"""The timer thread: one background thread per client that serves deadlines and nothing else.

Heartbeats, lingering batches, queued acks, repeated lookups, timeouts: each is armed on the pump
with a deadline. The timer thread sleeps until the earliest. A thread of the application that is busy
keeps its own deadlines (it sends its full batches itself), so when the timer thread wakes and finds
nothing due it backs off instead of waking again for every batch.

It never waits for the lock while another thread works under it, and never for a callback.
"""

from __future__ import annotations

import threading

from danube_fast.client.link.pump import Pump
from danube_fast.client.values.limits import TIMERS_IDLE_NS, TIMERS_QUIET_NS
from danube_fast.clock import MILLISECOND_NS

__all__ = ["TimerThread"]

_JOIN_SECONDS = 1.0


class TimerThread:
    """Thread that calls `on_time` of everything that is armed on a pump."""

    def __init__(self, pump: Pump, name: str) -> None:
        self._pump = pump
        # a lock used as a binary semaphore: sleeps with microsecond deadlines, needs no descriptor
        self._signal = threading.Lock()
        self._signal.acquire()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"danube-timers-{name}", daemon=True)
        pump.attach_timers(self._wake)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; without the lock."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _wake(self) -> None:
        try:
            self._signal.release()
        except RuntimeError:
            pass  # signalled already

    def _run(self) -> None:
        sleep_ns = 0
        while not self._stopping:
            signalled = self._signal.acquire(timeout=sleep_ns / 1e9)
            if self._stopping:
                return
            if not self._pump.lock.acquire(blocking=False):
                sleep_ns = MILLISECOND_NS
                continue
            try:
                sleep_ns = self.serve(signalled)
            finally:
                self._pump.lock.release()

    def serve(self, signalled: bool) -> int:
        """Under the lock: call what is due; return how long to sleep now, in nanoseconds."""
        pump = self._pump
        now = pump.clock.monotonic_ns()
        if pump.next_deadline_ns() <= now or not pump.armed:
            pump.try_drain()
        due = pump.take_due(now)
        has_news = False
        for timed, deadline_ns in due:
            if pump.armed.get(timed) == deadline_ns:  # unless one before it has changed that
                del pump.armed[timed]
                has_news |= timed.on_time(now) is not False
        if has_news or (
            due and pump.on_progress is not None
        ):  # an event loop never looks by itself
            pump.notify()
        if pump.callbacks:
            pump.run_callbacks()
        if self._stopping:
            return 0
        if not pump.armed:
            pump.timers_sleep_until(now + TIMERS_IDLE_NS)
            return TIMERS_IDLE_NS
        next_ns = pump.next_deadline_ns()
        if not due and not signalled and next_ns - now < TIMERS_QUIET_NS:
            pump.timers_sleep_until(0)
            return TIMERS_QUIET_NS
        pump.timers_sleep_until(next_ns)
        return max(0, next_ns - now)
