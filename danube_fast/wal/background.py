"""Background work of a log, beside its worker's loop: syncs, and jobs that take their time.

The shipped `Background` has a sync thread for each log and a thread for each job. A simulation passes
another one, whose syncs and jobs end when its seed says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Protocol

from danube_fast.wal.sync import SyncThread

__all__ = ["Background", "Job", "StartWork", "Sync", "give_way"]

GENTLE_NICE = 10
"""Beside a thread that is not nice, one that is gets about a tenth of a processor."""


class Sync(Protocol):
    """A sync thread as its log sees it; see `SyncThread` for what each does."""

    @property
    def synced_position(self) -> int:
        """All below is durable."""
        ...

    @property
    def backlog(self) -> int:
        """Entries that are queued or under way."""
        ...

    @property
    def times(self) -> list[int]:
        """How long syncs took: the words of `Histogram.SYNC` (ring/counters.py)."""
        ...

    @property
    def fault(self) -> tuple[int, int] | None:
        """(errno, position) of a failed sync that was not reset."""
        ...

    def start(self, synced_position: int) -> None:
        """Begin; all below is durable already."""
        ...

    def push(self, fd: int, position: int, *, quiet: bool = False) -> None:
        """Queue a sync of `fd`, whose end wakes the worker unless it is `quiet`."""
        ...

    def drain(self) -> None:
        """Wait until nothing is queued."""
        ...

    def wait(self, position: int, seconds: float) -> bool:
        """Wait until all below `position` is durable or a sync fails."""
        ...

    def reset(self) -> None:
        """Forget a fault."""
        ...

    def stop(self) -> bool:
        """Sync what is queued and end."""
        ...


class Job(Protocol):
    """Something that was started; a thread is one."""

    def is_alive(self) -> bool:
        """Whether it still goes on."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most."""
        ...


class StartWork(Protocol):
    """Start work beside a loop, and wake the loop then."""

    def __call__(self, work: Callable[[], None], *, is_gentle: bool = False) -> None:
        """Start it. `is_gentle`: all else that wants the processor comes first."""
        ...


class Background:
    """Threads."""

    def make_sync(self, wake_fd: int) -> Sync:
        """The sync thread of one log, not started; it writes to the eventfd `wake_fd` behind syncs that
        are not quiet."""
        return SyncThread(wake_fd)

    def start(self, name: str, work: Callable[[], None]) -> Job:
        """Do `work` beside the loop."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def make_fetch(self, wake_fd: int) -> StartWork:
        """Return what does work beside the loop and then writes to the eventfd `wake_fd`."""

        def start(work: Callable[[], None], *, is_gentle: bool = False) -> None:
            wake = -1
            with contextlib.suppress(
                OSError
            ):  # without a descriptor the loop looks by itself, later
                wake = os.dup(wake_fd)  # its own: the loop may end before

            def fetch() -> None:
                if is_gentle:
                    give_way()
                work()
                if wake >= 0:
                    os.eventfd_write(wake, 1)
                    os.close(wake)

            self.start("log-fetch", fetch)

        return start

    def read_cached(self, fd: int, view: memoryview, place: int) -> bool:
        """Read into `view` what is in the page cache; whether that was all. Raises OSError."""
        try:
            return os.preadv(fd, [view], place, os.RWF_NOWAIT) == len(view)
        except BlockingIOError:
            return False
        except OSError as fault:
            if fault.errno != errno.EOPNOTSUPP:
                raise
            return os.preadv(fd, [view], place) == len(view)  # tmpfs, which never waits, and others

    def pause(self, stop: threading.Event, seconds: float) -> None:
        """Let a job rest, unless it is told to stop."""
        stop.wait(seconds)


def give_way() -> None:
    """Let this thread, which cannot take it back, get the processor behind all others of the host."""
    with contextlib.suppress(OSError):  # it works even so
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GENTLE_NICE)
