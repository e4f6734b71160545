"""The lock on a log's folder: one process at a time.

An flock, so the kernel lets go of it when the holder dies, however it dies. The file holds the
holder's pid only to be named in the refusal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from danube_fast.errors import FailedPrecondition
from danube_fast.wal.layout import LOCK_NAME

__all__ = ["LogLock"]

_POLL_SECONDS = 0.02
_PID_BYTES = 32


class LogLock:
    """Held from construction to `release`. Raises FailedPrecondition naming the holder's pid."""

    def __init__(self, directory: Path, timeout_ms: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(directory / LOCK_NAME, flags, 0o600)
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self._fd, _PID_BYTES, 0).decode(errors="replace").strip()
                    os.close(self._fd)
                    raise FailedPrecondition(
                        f"log {directory} is in use by process {holder or 'unknown'}; stop that "
                        "broker first, or give this one another --data-dir"
                    ) from None
                time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):  # a full disk: the pid is only there to be named
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next one in."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
