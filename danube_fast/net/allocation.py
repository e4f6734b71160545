"""Keep the memory of freed messages, so that the next message of that size costs no page faults.

ZeroMQ allocates every message with malloc. glibc gives blocks of 128 KiB and more, and the top of
its heap, back to the kernel as soon as they are free; a stream of large frames then faults every
page of every frame in again, which costs more than copying it (55 against 27 ns per message of 100
bytes, one hop, frames of 128 KiB). Two thresholds of malloc decide about that.

The price is that a process keeps up to `TRIM_BYTES` of freed memory per arena. DANUBE_MALLOC=default
leaves malloc alone; so does any C library that does not know mallopt.
"""

from __future__ import annotations

import ctypes
import functools
import os

__all__ = ["MMAP_BYTES", "TRIM_BYTES", "keep_freed_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MMAP_BYTES = 4 * 1024 * 1024
"""Blocks from this size on are still mapped and unmapped one by one."""
TRIM_BYTES = 64 * 1024 * 1024
"""Freed memory at the end of a heap that is kept."""


@functools.cache
def keep_freed_memory() -> bool:
    """Set the thresholds of this process, once. False where they cannot be set."""
    if os.environ.get("DANUBE_MALLOC") == "default":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    done = mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
    return bool(done)
