"""ZeroMQ's own threads of this process, as the kernel shows them: whether they have gone on from what they were doing.

Linux names them ZMQbg/IO/0 and so on; `/proc/self/task/TID` tells whether a thread sleeps, and how long it has run.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["IoThreads"]

_TASKS = Path("/proc/self/task")
_PREFIX = "ZMQbg/IO/"
_LOOK_SECONDS = 0.0005
_LOOKS_MAX = 200
_STEP_NS = 100_000
"""Of running: a thread that has run so long twice has gone on. Once is not enough, as the kernel counts late."""
_STEPS = 2
_BLIND_SECONDS = 0.02
"""Waited where the kernel does not tell: behind 2 ms a few names in a hundred still came too early on a busy machine."""
_READ_BYTES = 1024


class _Thread:
    """One of them, by two open files."""

    def __init__(self, folder: Path) -> None:
        self._state_fd = os.open(folder / "stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._ran_fd = os.open(folder / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._state_fd)
            raise
        self._ran_ns = self._steps = 0

    def begin(self) -> None:
        """Begin to look."""
        self._ran_ns, self._steps = self._read_ran_ns(), 0

    def has_gone_on(self) -> bool:
        """Whether it sleeps, or has run long enough since `begin`. Raises OSError, ValueError, IndexError when it has
        ended."""
        state = os.pread(self._state_fd, _READ_BYTES, 0).rpartition(b") ")[2][:1]
        if state != b"R":
            return True
        ran_ns = self._read_ran_ns()
        if ran_ns >= self._ran_ns + _STEP_NS:
            self._ran_ns, self._steps = ran_ns, self._steps + 1
        return self._steps >= _STEPS

    def _read_ran_ns(self) -> int:
        return int(os.pread(self._ran_fd, _READ_BYTES, 0).split()[0])

    def close(self) -> None:
        """Close the files."""
        os.close(self._state_fd)
        os.close(self._ran_fd)


class IoThreads:
    """Those that there are when they are first waited for; a thread is named a moment after it was started."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []

    def _find(self) -> None:
        """Raises OSError where the kernel shows none."""
        for folder in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                if (folder / "comm").read_text().startswith(_PREFIX):
                    self._threads.append(_Thread(folder))
        if not self._threads:
            raise FileNotFoundError(f"no thread named {_PREFIX} is in {_TASKS}")

    def await_all(self) -> None:
        """Return when each thread has gone on from what it did at the call, after 0.5 ms at least and 100 ms at most;
        after 20 ms where the kernel shows none, or one has ended, and the others are found anew the next time."""
        try:
            self._await_all()
        except (OSError, ValueError, IndexError):
            self.close()
            time.sleep(_BLIND_SECONDS)

    def _await_all(self) -> None:
        if not self._threads:
            self._find()
        waiting = self._threads
        for thread in waiting:
            thread.begin()
        for _ in range(_LOOKS_MAX):
            time.sleep(_LOOK_SECONDS)
            waiting = [thread for thread in waiting if not thread.has_gone_on()]
            if not waiting:
                return

    def close(self) -> None:
        """Look no more."""
        while self._threads:
            self._threads.pop().close()
