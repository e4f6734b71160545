"""What the disk does without a broker: groups of one size, each written and synced before the next one.

    file     | group | group | ... | group |      allocated and written once before the clock starts
    writes     0 ->    1 ->          n - 1 -> 0   pwrite, fdatasync, and around again

The file is written before, so no group has to wait for the file system to allocate: segments of a log
that are used again are in the same state. This is the least that a log with groups of that size can do.
"""

from __future__ import annotations

import os
import time
from typing import Any

from danube_fast.bench.load.member import Link
from danube_fast.errors import ResourceExhausted

__all__ = ["FILE_BYTES", "write_groups"]

FILE_BYTES = 1024 * 1024 * 1024
"""As large as eight segments: the writes of a long run go around in it."""


def write_groups(link: Link, options: dict[str, Any]) -> None:
    """Write `total_bytes` in groups of `group_bytes` into the new file `path`, which goes at the end."""
    path, group_bytes, total_bytes = (options[x] for x in ("path", "group_bytes", "total_bytes"))
    group = os.urandom(group_bytes)
    groups = -(-total_bytes // group_bytes)
    places = min(groups, max(1, FILE_BYTES // group_bytes))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, places * group_bytes)
            for place in range(places):
                _write_all(fd, group, place * group_bytes)
            os.fdatasync(fd)
            link.ready()
            began = time.monotonic()
            for number in range(groups):
                _write_all(fd, group, number % places * group_bytes)
                os.fdatasync(fd)
            seconds = time.monotonic() - began
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as fault:
        raise ResourceExhausted(
            f"the bare writes beside the broker failed: {fault}; see that the disk has room and is sound"
        ) from None
    link.say({"groups": groups, "bytes_per_s": groups * group_bytes / seconds})
    link.hear()


def _write_all(fd: int, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
