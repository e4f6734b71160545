"""File descriptors of this process: how many there may be, and what that allows."""

from __future__ import annotations

import os
import resource
import sys

__all__ = [
    "DESCRIPTORS_NEEDED",
    "DESCRIPTORS_WANTED",
    "IPC_DESCRIPTORS_MIN",
    "clients_allowed",
    "descriptor_limit",
    "lowest_free_descriptor",
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
CLIENTS_MIN = 16


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
