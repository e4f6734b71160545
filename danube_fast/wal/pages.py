"""Pages of a log in the system's page cache: those that no consumer reads any more are dropped.

Pages that are new to the process cost more to write into than those that were written before: the kernel
looks for free memory, and under a hypervisor the host backs it at its first use. Without this a log takes new ones for ever,
until none are free and the kernel looks for some to reclaim; with it the pages that are dropped are the next ones to be
written.
"""

from __future__ import annotations

import contextlib
import os

from danube_fast.wal.background import Background, Job
from danube_fast.wal.reader import LogReader
from danube_fast.wal.segment import Chain

__all__ = ["CachedPages"]


class CachedPages:
    """Drop pages of one log, in its order. Used by the worker's loop."""

    def __init__(self, chain: Chain, reader: LogReader, background: Background) -> None:
        self._chain, self._reader, self._background = chain, reader, background
        self.dropped_position = chain[-1].first_position if len(chain) else 0
        """All that is older was dropped once, or was there before the start; what is read again stays for the system to
        reclaim."""
        self._job: Job | None = None

    def drop(self, position: int) -> None:
        """Begin to drop the pages of all that is older than `position`, which must be durable: a page that is not on the
        disk yet stays. Reads of it go on, from the disk."""
        start = max(self.dropped_position, self._chain.oldest_position)
        if position <= start or (self._job is not None and self._job.is_alive()):
            return
        files = self._reader.files(start, position - start)
        self.dropped_position = position
        self._job = self._background.start("wal-pages", lambda: _drop(files))


def _drop(files: list[tuple[str, int, int]]) -> None:
    """Drop ranges of files; one that was removed meanwhile has none."""
    for path, place, byte_count in files:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, place, byte_count, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
