"""Messages made before the clock starts: random bytes in memory that all processes of a run share.

    memfd:  | number 0, random bytes | number 1, random bytes | ...     message_bytes each

A message opens with its number (u64, little-endian), so whoever receives it knows which bytes it
should have, on whatever topic and in whatever order it came. Nothing compresses. A producer cuts
`bytes` objects of its own out of it; no object and no list is sent twice, but in a run that moves more
than memory holds: that sends its lists in turn, far more of them than any cache of the processor holds.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from danube_fast.errors import InvalidArgument, ResourceExhausted
from danube_fast.frame.kernel import address_of

__all__ = ["LIST_MESSAGES", "NUMBER_BYTES", "Payloads", "create_payloads"]

NUMBER_BYTES = 8
LIST_MESSAGES = 10_000
"""Messages in one list of `send_many`."""
CHUNK_BYTES = 64 * 1024 * 1024
SEED = 7
MEMORY_SHARE = 4
"""A run may fill one fourth of the memory with payloads; both ends hold objects of them besides."""


def create_payloads(count: int, message_bytes: int) -> int:
    """A memfd with `count` messages. Raises InvalidArgument, ResourceExhausted."""
    if message_bytes < NUMBER_BYTES:
        raise InvalidArgument(
            f"--message-bytes {message_bytes} is too small: the harness numbers each message, so "
            f"take at least {NUMBER_BYTES}"
        )
    total = count * message_bytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > memory // MEMORY_SHARE:
        raise ResourceExhausted(
            f"{count} messages of {message_bytes} B are prepared in memory before the clock starts, "
            f"and {total / 1e9:.1f} GB are more than a fourth of this machine's; take fewer"
        )
    source = np.random.Generator(np.random.SFC64(SEED))
    fd = os.memfd_create("danube-fast-bench", os.MFD_CLOEXEC)
    step = max(1, CHUNK_BYTES // message_bytes)
    for start in range(0, count, step):
        some = min(step, count - start)
        content = bytearray(source.bytes(some * message_bytes))
        rows = np.frombuffer(content, np.uint8).reshape(some, message_bytes)
        numbers = np.arange(start, start + some, dtype="<u8")
        rows[:, :NUMBER_BYTES] = numbers.view(np.uint8).reshape(some, NUMBER_BYTES)
        _write_all(fd, memoryview(content))
    return fd


def _write_all(fd: int, content: memoryview) -> None:
    while content:
        content = content[os.write(fd, content) :]


class Payloads:
    """The messages of a run, mapped into this process."""

    def __init__(self, fd: int, message_bytes: int) -> None:
        size = os.fstat(fd).st_size
        self.message_bytes = message_bytes
        self.count = size // message_bytes
        self._map = mmap.mmap(
            fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        )
        self.address = address_of(self._map)

    def __getitem__(self, number: int) -> bytes:
        start = number * self.message_bytes
        return self._map[start : start + self.message_bytes]

    def cut(self, start: int = 0, step: int = 1, stop: int | None = None) -> list[bytes]:
        """Messages `start`, `start + step`, ... as objects of their own."""
        content, size = self._map, self.message_bytes
        end = self.count if stop is None else min(stop, self.count)
        return [content[at * size : at * size + size] for at in range(start, end, step)]

    def lists(self, start: int = 0, step: int = 1, list_messages: int = LIST_MESSAGES) -> list[Any]:
        """The same as lists for `send_many`."""
        span = step * list_messages
        return [self.cut(first, step, first + span) for first in range(start, self.count, span)]
