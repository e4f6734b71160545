"""The sync thread: one Python thread that runs one kernel without the GIL for as long as it lives.

The worker's loop queues (file descriptor, position) pairs; the kernel takes all that is there, does
one fdatasync per run of equal descriptors, and publishes how far the log is durable. An entry may
carry a small group, too, which the kernel writes and makes durable in one call (decision 45). The end of a quiet one
wakes no one, unless it failed.

      worker's loop                                   sync thread (nogil kernel)
      store entry, tail (release), eventfd  ------->  read(eventfd) ... tail (acquire)
                                                      fdatasync(fd), or a durable pwritev2(fd)
      synced (acquire)  <---------------------------  synced (release), write(wake_fd)

Who writes what: TAIL, STOP and the entries the loop; HEAD, SYNCED, COUNT, ERRNO and FAULT the
kernel; RESET is written by the loop only while the kernel has nothing queued and stands still.

A failed sync publishes errno and the position; from then on entries are dropped unsynced (on Linux
a second fdatasync would answer "fine" for pages that were lost) until the loop resets the fault.
All system calls go through libc's symbols, so a preloaded library can stand in for the disk.
"""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np

from danube_fast.clock import MICROSECOND_NS
from danube_fast.errors import Internal
from danube_fast.frame.kernel import direct, external, kernel
from danube_fast.frame.memory import load_i64, store_u64
from danube_fast.frame.system import clock_ns, errno_now, pwritev2, read, write
from danube_fast.ring.atomics import load_acquire, load_relaxed, store_release

__all__ = ["SyncThread", "fault_of", "queue_sync", "queue_write", "synced_of"]

_LINE = 128
_AT_TAIL = 0
_AT_HEAD = _LINE
_AT_SYNCED = 2 * _LINE
_AT_ERRNO = 3 * _LINE
_AT_FAULT = 3 * _LINE + 8
_AT_STOP = 4 * _LINE
_AT_SCRATCH = 5 * _LINE
_AT_TIMES = 6 * _LINE
_TIMES_WORDS = 28  # HISTOGRAM_WORDS of ring/counters.py
_AT_ENTRIES = 8 * _LINE
_ENTRY_BYTES = 64
_AT_POSITION, _AT_VECTOR, _AT_SIZE, _AT_PLACE, _AT_FLAGS, _AT_QUIET = 8, 16, 24, 32, 40, 48
"""Words of an entry behind its descriptor: the vector of one buffer, whose size is 0 if there is nothing to write."""
_ENTRIES = 1024  # power of two; more than the groups that one slow sync can cover
_ENTRY_MASK = _ENTRIES - 1
_WORD_BYTES = 8
_EINTR, _EIO = errno.EINTR, errno.EIO

_FULL_WAIT_SECONDS = 0.0005
_DRAIN_WAIT_SECONDS = 30.0

_fdatasync = external("fdatasync", "int32(int64)")


@kernel("int64(int64)")
def _fdatasync_once(fd: int) -> int:
    """0, or the errno with which fdatasync failed. An interrupted call is made again."""
    while _fdatasync(fd) != 0:
        fault = errno_now()
        if fault != _EINTR:
            return fault
    return 0


@kernel("int64(int64,int64)")
def _write_durably(entry: int, fd: int) -> int:
    """0, or the errno with which the write of an entry's group failed. What a short write has left is written, too."""
    place, left = load_i64(entry + _AT_PLACE), load_i64(entry + _AT_SIZE)
    flags = load_i64(entry + _AT_FLAGS)
    while left > 0:
        done = pwritev2(fd, entry + _AT_VECTOR, 1, place, flags)
        if done == 0:
            return _EIO
        if done < 0:
            fault = errno_now()
            if fault != _EINTR:
                return fault
            continue
        place, left = place + done, left - done
        store_u64(entry + _AT_VECTOR, load_i64(entry + _AT_VECTOR) + done)
        store_u64(entry + _AT_SIZE, left)
    return 0


@kernel("void(int64,int64)")
def _note_time(memory: int, took_ns: int) -> None:
    """Enter one sync into the histogram: the bucket is the number of bits of its microseconds."""
    left = took_ns // MICROSECOND_NS
    bucket = 0
    while left > 0 and bucket < _TIMES_WORDS - 2:
        left >>= 1
        bucket += 1
    word = memory + _AT_TIMES + bucket * _WORD_BYTES
    store_u64(word, load_i64(word) + 1)
    total = memory + _AT_TIMES + (_TIMES_WORDS - 1) * _WORD_BYTES
    store_u64(total, load_i64(total) + took_ns)


@kernel("int64(int64,int64,int64)")
def _sync_batch(memory: int, head: int, tail: int) -> int:
    """Sync entries [head, tail); neighbours with one descriptor share a call, unless one has a group to write. 1 if the
    loop is to be woken."""
    wakes = 0
    for index in range(head, tail):
        entry = memory + _AT_ENTRIES + (index & _ENTRY_MASK) * _ENTRY_BYTES
        fd = load_i64(entry)
        if load_i64(entry + _AT_QUIET) == 0:
            wakes = 1
        if index + 1 < tail:
            following = memory + _AT_ENTRIES + ((index + 1) & _ENTRY_MASK) * _ENTRY_BYTES
            writes = load_i64(entry + _AT_SIZE) != 0 or load_i64(following + _AT_SIZE) != 0
            if load_i64(following) == fd and not writes:
                continue
        if load_relaxed(memory + _AT_ERRNO) != 0:
            continue
        began_ns = clock_ns(memory + _AT_SCRATCH)
        has_group = load_i64(entry + _AT_SIZE) != 0
        fault = _write_durably(entry, fd) if has_group else _fdatasync_once(fd)
        took_ns = clock_ns(memory + _AT_SCRATCH) - began_ns
        position = load_i64(entry + _AT_POSITION)
        if fault != 0:
            store_u64(memory + _AT_FAULT, position)
            store_release(memory + _AT_ERRNO, fault)
            wakes = 1
            continue
        _note_time(memory, took_ns)
        if position > load_relaxed(memory + _AT_SYNCED):
            store_release(memory + _AT_SYNCED, position)
    return wakes


@kernel("int64(int64,int64,int64)", nogil=True)
def _sync_loop(memory: int, event_fd: int, wake_fd: int) -> int:
    """Run until STOP is set and the queue is empty: 0, or the errno of a failed read."""
    scratch = memory + _AT_SCRATCH
    while True:
        # Acquire pairs with the release in _push: the entries are visible before the tail.
        tail = load_acquire(memory + _AT_TAIL)
        head = load_relaxed(memory + _AT_HEAD)
        if head == tail:
            if load_acquire(memory + _AT_STOP) != 0:
                return 0
            if read(event_fd, scratch, _WORD_BYTES) < 0:
                fault = errno_now()
                if fault != _EINTR:
                    return fault
            continue
        wakes = _sync_batch(memory, head, tail)
        store_release(memory + _AT_HEAD, tail)
        if wakes != 0 and wake_fd >= 0:
            store_u64(scratch, 1)
            write(wake_fd, scratch, _WORD_BYTES)


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64)")
def _push(
    memory: int, fd: int, position: int, address: int, size: int, place: int, flags: int, quiet: int
) -> int:
    """Queue one entry, with `size` bytes to write, 0: none; 1, or 0 if the queue is full."""
    tail = load_relaxed(memory + _AT_TAIL)
    if tail - load_acquire(memory + _AT_HEAD) >= _ENTRIES:
        return 0
    entry = memory + _AT_ENTRIES + (tail & _ENTRY_MASK) * _ENTRY_BYTES
    store_u64(entry, fd)
    store_u64(entry + _AT_POSITION, position)
    store_u64(entry + _AT_VECTOR, address)
    store_u64(entry + _AT_SIZE, size)
    store_u64(entry + _AT_PLACE, place)
    store_u64(entry + _AT_FLAGS, flags)
    store_u64(entry + _AT_QUIET, quiet)
    store_release(memory + _AT_TAIL, tail + 1)
    return 1


@kernel("int64(int64,int64,int64,int64,int64)")
def queue_sync(memory: int, event_fd: int, fd: int, position: int, scratch: int) -> int:
    """Queue a sync and wake the thread: 1, or 0 if the queue is full."""
    if _push(memory, fd, position, 0, 0, 0, 0, 0) == 0:
        return 0
    store_u64(scratch, 1)
    write(event_fd, scratch, _WORD_BYTES)
    return 1


@kernel("int64(int64,int64,int64,int64,int64,int64,int64)")
def queue_write(
    memory: int, event_fd: int, fd: int, flags: int, position: int, vector: int, place: int
) -> int:
    """Let the thread write a group at `place` of a file, with a call that makes it durable, up to `position`: 1, or 0 if
    the queue is full. All before it must be durable. The buffer of `vector`, which is scratch then, stays as it is until
    the queue is empty."""
    address, size = load_i64(vector), load_i64(vector + _WORD_BYTES)
    if _push(memory, fd, position, address, size, place, flags, 0) == 0:
        return 0
    store_u64(vector, 1)
    write(event_fd, vector, _WORD_BYTES)
    return 1


@kernel("int64(int64)")
def synced_of(memory: int) -> int:
    """All below that position is durable. An acquire load."""
    return load_acquire(memory + _AT_SYNCED)


@kernel("int64(int64)")
def fault_of(memory: int) -> int:
    """Reason why a sync failed, 0 if none has."""
    return load_acquire(memory + _AT_ERRNO)


@kernel("int64(int64)")
def _load(address: int) -> int:
    return load_acquire(address)


@kernel("void(int64,int64)")
def _store(address: int, value: int) -> None:
    store_release(address, value)


_call_push = direct(_push)
_call_load = direct(_load)
_call_store = direct(_store)


class SyncThread:
    """Owns the queue, the thread and the eventfd. Used by one thread, the worker's loop."""

    def __init__(self, wake_fd: int) -> None:
        size = _AT_ENTRIES + _ENTRIES * _ENTRY_BYTES
        self._memory = np.zeros(size + _LINE, dtype=np.uint8)
        base = int(self._memory.ctypes.data)
        self._address = base + -base % _LINE
        self._synced_address = self._address + _AT_SYNCED
        self._errno_address = self._address + _AT_ERRNO
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake_fd = wake_fd
        self._thread: threading.Thread | None = None

    def start(self, synced_position: int) -> None:
        """Start the thread; all below `synced_position` is durable already."""
        _call_store(self._synced_address, synced_position)
        self._thread = threading.Thread(target=self._run, name="wal-sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _sync_loop(self._address, self._event_fd, self._wake_fd)

    @property
    def queue(self) -> tuple[int, int]:
        """Address of the queue, and the eventfd that wakes the thread: for `queue_sync`."""
        return self._address, self._event_fd

    @property
    def synced_position(self) -> int:
        """All below is durable. An acquire load."""
        return _call_load(self._synced_address)  # type: ignore[no-any-return]

    @property
    def backlog(self) -> int:
        """Entries that are queued or under way."""
        tail = _call_load(self._address + _AT_TAIL)
        return tail - _call_load(self._address + _AT_HEAD)  # type: ignore[no-any-return]

    @property
    def times(self) -> list[int]:
        """How long syncs took that succeeded: the words of `Histogram.SYNC`."""
        start = self._address + _AT_TIMES - int(self._memory.ctypes.data)
        words = self._memory[start:][: _TIMES_WORDS * _WORD_BYTES].view(np.int64)
        return [int(word) for word in words]

    @property
    def fault(self) -> tuple[int, int] | None:
        """(errno, position that was to be synced) of a failed sync that was not reset."""
        code = _call_load(self._errno_address)
        return (code, _call_load(self._address + _AT_FAULT)) if code else None

    def push(self, fd: int, position: int, *, quiet: bool = False) -> None:
        """Queue a sync of `fd` that makes everything below `position` durable (0: nothing); `quiet`: the loop is not to
        be woken by its end.

        Waits while the queue is full: the disk is then more than 1,000 groups behind.
        Raises Internal if the thread is gone.
        """
        while not _call_push(self._address, fd, position, 0, 0, 0, 0, quiet):
            if self._thread is None or not self._thread.is_alive():
                raise Internal("the log's sync thread is gone; restart the broker")
            time.sleep(_FULL_WAIT_SECONDS)
        os.eventfd_write(self._event_fd, 1)

    def drain(self) -> None:
        """Wait until nothing is queued. Raises Internal after 30 s."""
        deadline = time.monotonic() + _DRAIN_WAIT_SECONDS
        while _call_load(self._address + _AT_HEAD) != _call_load(self._address + _AT_TAIL):
            if self._thread is None or not self._thread.is_alive():
                raise Internal("the log's sync thread is gone; restart the broker")
            if time.monotonic() > deadline:
                raise Internal(
                    f"the disk did not finish a sync in {_DRAIN_WAIT_SECONDS:.0f} s; check it"
                )
            time.sleep(_FULL_WAIT_SECONDS)

    def wait(self, position: int, seconds: float) -> bool:
        """Wait until all below `position` is durable or a sync fails; False when the time is up."""
        deadline = time.monotonic() + seconds
        while self.synced_position < position and self.fault is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_FULL_WAIT_SECONDS)
        return True

    def reset(self) -> None:
        """Forget a fault. Drains first, so nothing queued before can count as synced later."""
        self.drain()
        _call_store(self._address + _AT_FAULT, 0)
        _call_store(self._errno_address, 0)

    def stop(self, timeout_seconds: float = _DRAIN_WAIT_SECONDS) -> bool:
        """Sync what is queued, end the thread, close the eventfd. False if it did not end in time."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _call_store(self._address + _AT_STOP, 1)
            os.eventfd_write(self._event_fd, 1)
            thread.join(timeout_seconds)
            if thread.is_alive():
                return False
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
        return True
