"""Memory that several processes share: anonymous files (memfd) whose size is sealed; eventfds and pipes for signals.

Nothing here needs a kernel, so the supervisor can make every region without importing numba, and
hand the descriptors to its children with `pass_fds`. A sealed memfd can neither shrink nor grow:
a peer that misbehaves cannot turn an access into SIGBUS. Nothing is left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from danube_fast.errors import InvalidArgument
from danube_fast.ring import layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "HUGE_PAGE_BYTES",
    "address_of_memory",
    "create_eventfd",
    "create_memfd",
    "create_pipe",
    "format_ring",
    "map_fd",
    "signal_eventfd",
    "words_of",
    "write_ring_header",
]

HUGE_PAGE_BYTES = 2 * 1024 * 1024


def create_memfd(name: str, byte_count: int) -> int:
    """A new zero-filled memfd of exactly `byte_count` bytes; its size is sealed for ever.

    The descriptor is closed on exec; name it in `pass_fds` to hand it on. The caller closes it.
    """
    if byte_count <= 0:
        raise InvalidArgument(f"memory {name!r} must have at least 1 byte, not {byte_count}")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, byte_count)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_fd(fd: int, *, huge: bool = False) -> mmap.mmap:
    """Map all of `fd`, shared and writable. The map outlives the descriptor.

    If `huge`, what this process touches first becomes pages of 2 MiB, where the kernel's
    `shmem_enabled` allows that; it then places the map so that they fit.
    """
    memory = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED)
    if huge:
        # a kernel that knows none refuses, and ordinary pages do as well
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of_memory(memory: Buffer) -> int:
    """Address of the first byte of writable memory. The caller keeps the memory alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def words_of(memory: Buffer) -> memoryview:
    """`memory` as signed 64-bit words.

    CPython reads and writes such an aligned word with one machine access, so no reader ever sees
    half a value. It orders nothing: what belongs together stands in one word, or goes through
    `ring/atomics.py`.
    """
    view = memoryview(memory).cast("B")
    return view[: len(view) // layout.WORD_BYTES * layout.WORD_BYTES].cast("q")


def write_ring_header(memory: Buffer, capacity_bytes: int) -> None:
    """Write every word of a ring's header except the version word, which becomes 0.

    Raises InvalidArgument if the capacity is no power of two in range or the memory is too small.
    """
    smallest, largest = layout.RING_CAPACITY_BYTES_MIN, layout.RING_CAPACITY_BYTES_MAX
    power_of_two = capacity_bytes > 0 and capacity_bytes & (capacity_bytes - 1) == 0
    if not power_of_two or not smallest <= capacity_bytes <= largest:
        raise InvalidArgument(
            f"ring capacity {capacity_bytes} is not a power of two between {smallest} and {largest}"
        )
    available_bytes = memoryview(memory).nbytes
    if available_bytes < layout.ring_bytes(capacity_bytes):
        raise InvalidArgument(
            f"a ring of {capacity_bytes} bytes needs {layout.ring_bytes(capacity_bytes)} bytes of "
            f"memory, not {available_bytes}; size it with ring_bytes()"
        )
    words = words_of(memory)
    for index in range(layout.RING_HEADER_BYTES // layout.WORD_BYTES):
        words[index] = 0
    words[layout.AT_CAPACITY // layout.WORD_BYTES] = capacity_bytes


def format_ring(memory: Buffer, capacity_bytes: int) -> None:
    """Make an empty ring in `memory` before any other process has it.

    For a creator without kernels. Starting a process (or sending the descriptor) orders these
    stores before anything the receiver reads. Raises as `write_ring_header`.
    """
    write_ring_header(memory, capacity_bytes)
    words_of(memory)[layout.AT_VERSION // layout.WORD_BYTES] = layout.RING_VERSION_WORD


def create_eventfd() -> int:
    """A new eventfd: non-blocking, closed on exec; name it in `pass_fds`. The caller closes it."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def create_pipe() -> tuple[int, int]:
    """A new pipe of one page, for signals: its end to read and its end to write, non-blocking and closed on exec.
    The caller closes both."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # a user has few pages for pipes; one that stays larger does as well
    with contextlib.suppress(OSError):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
    return reader, writer


def signal_eventfd(fd: int) -> None:
    """Wake the process that polls `fd`, asleep or not. One that is full already is awake already."""
    try:
        os.eventfd_write(fd, 1)
    except BlockingIOError:
        return
