"""File descriptors of this process: how many there may be, what that allows, and a reserve.

    0 ... soft limit           connections, and whatever else comes
    soft limit ... hard limit  `keep_reserve` holds these back: files that `open_file` and `from_reserve` open

A crowd of clients can take every descriptor below the soft limit, as the transport takes connections by
itself. Files of the broker then come from the reserve: the soft limit goes up for the time of one `open`.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = [
    "DESCRIPTORS_NEEDED",
    "DESCRIPTORS_PER_RINGS",
    "DESCRIPTORS_WANTED",
    "IPC_DESCRIPTORS_MIN",
    "clients_allowed",
    "descriptor_limit",
    "from_reserve",
    "keep_reserve",
    "lowest_free_descriptor",
    "open_file",
    "raise_descriptor_limit",
]

DESCRIPTORS_WANTED = 65_536
DESCRIPTORS_NEEDED = 1024
"""With fewer, a broker serves a small crowd."""
IPC_DESCRIPTORS_MIN = 16_384
"""With fewer, clients of this host use tcp: ZeroMQ ends a process whose descriptors run out while it accepts an
ipc connection, and this many cannot be taken between two looks of `Server.mind_descriptors`."""
OWN_DESCRIPTORS = 64
OWN_DESCRIPTORS_PER_PROCESS = 8
"""Doorbells and mailboxes, segments, index, kernel and log of a process."""
DESCRIPTORS_PER_RINGS = 4
"""Of a worker for one client of shared memory: the map of the rings, a socket, a bell each way."""
CLIENTS_MIN = 16
DESCRIPTORS_RESERVED = 32
"""Held back by `keep_reserve` (of a small limit, an eighth); among a process's own above."""
_opening = threading.Lock()
T = TypeVar("T")


def descriptor_limit() -> int:
    """How many descriptors this process may have (`ulimit -n`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, if the system lets us; the limit from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return descriptor_limit()
    return descriptor_limit()


def lowest_free_descriptor() -> int:
    """The number that the next descriptor would get: about as many are in use. The limit, if all are."""
    try:
        free = os.dup(0)
    except OSError:
        return descriptor_limit()
    os.close(free)
    return free


def clients_allowed(limit: int, process_count: int) -> int:
    """How many clients a process may take so that the broker's own descriptors remain."""
    own = OWN_DESCRIPTORS + OWN_DESCRIPTORS_PER_PROCESS * process_count
    return max(limit - own, CLIENTS_MIN)


def keep_reserve() -> None:
    """Hold the last `DESCRIPTORS_RESERVED` descriptors back for `open_file`. For processes of the broker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (hard - min(DESCRIPTORS_RESERVED, hard // 8), hard)
        )


def open_file(path: str | Path, flags: int, mode: int = 0o600) -> int:
    """`os.open` that falls back on the reserve; also an `opener` for `open`. Raises OSError."""
    return from_reserve(lambda: os.open(path, flags, mode))


def from_reserve(action: Callable[[], T]) -> T:
    """Do what opens files for a moment, with descriptors of the reserve if there are no others: once more each time that one
    is missing. Raises what `action` raises."""
    try:
        return action()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with _opening:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            # one more at a time: another thread that accepts connections may be quicker to take it
            for limit in range(soft + 1, hard):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                try:
                    return action()
                except OSError as error:
                    if error.errno != errno.EMFILE:
                        raise
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return action()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
