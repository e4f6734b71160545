"""System calls for kernels, through libc's symbols. Each answers as C does: -1, and the reason in `errno_now`.

An address that a call fills is memory of the caller. None of these is called while a peer could unmap it.
"""

from __future__ import annotations

import platform
import time

from danube_fast.clock import SECOND_NS
from danube_fast.frame.kernel import external, kernel
from danube_fast.frame.memory import load_i32, load_i64

__all__ = [
    "EPOLL_AT_DATA",
    "EPOLL_EVENT_BYTES",
    "clock_ns",
    "epoll_wait",
    "errno_now",
    "futex_wait",
    "futex_wake",
    "ppoll",
    "pwritev",
    "pwritev2",
    "read",
    "sched_yield",
    "wall_ns",
    "write",
]

WORD_BYTES = 8
_IS_PACKED = platform.machine() == "x86_64"
EPOLL_EVENT_BYTES = 12 if _IS_PACKED else 16
"""sizeof(struct epoll_event), which only x86-64 packs."""
EPOLL_AT_DATA = 4 if _IS_PACKED else 8

epoll_wait = external("epoll_wait", "int32(int32,int64,int32,int32)")
ppoll = external("ppoll", "int32(int64,int64,int64,int64)")
read = external("read", "int64(int64,int64,int64)")
sched_yield = external("sched_yield", "int32()")
write = external("write", "int64(int64,int64,int64)")
pwritev = external("pwritev", "int64(int32,int64,int32,int64)")
pwritev2 = external("pwritev2", "int64(int32,int64,int32,int64,int32)")
_syscall = external("syscall", "int64(int64,int64,int64,int64,int64,int64,int64)")
_errno_location = external("__errno_location", "int64()")
_clock_gettime = external("clock_gettime", "int32(int32,int64)")

_CLOCK_MONOTONIC, _CLOCK_REALTIME = time.CLOCK_MONOTONIC, time.CLOCK_REALTIME
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
"""Where it is not known the call fails with ENOSYS: a wait ends at once, and its caller looks again."""
_FUTEX_WAIT_PRIVATE = 128
_FUTEX_WAKE_PRIVATE = 129


@kernel("int64()")
def errno_now() -> int:
    """The reason why the last call of this thread failed."""
    code: int = load_i32(_errno_location())
    return code


@kernel("int64(int64)")
def clock_ns(scratch: int) -> int:
    """The monotonic clock, nanoseconds; `scratch` is room for two words."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch)
    return load_i64(scratch) * SECOND_NS + load_i64(scratch + WORD_BYTES)


@kernel("int64(int64)")
def wall_ns(scratch: int) -> int:
    """The wall clock, nanoseconds; `scratch` is room for two words."""
    _clock_gettime(_CLOCK_REALTIME, scratch)
    return load_i64(scratch) * SECOND_NS + load_i64(scratch + WORD_BYTES)


@kernel("int64(int64,int64,int64)")
def futex_wait(word: int, value: int, timeout: int) -> int:
    """Sleep while the low half of the word is `value`, for at most the timespec at `timeout`. Of one process."""
    result: int = _syscall(_SYS_FUTEX, word, _FUTEX_WAIT_PRIVATE, value, timeout, 0, 0)
    return result


@kernel("int64(int64)")
def futex_wake(word: int) -> int:
    """Wake the thread that sleeps on the word."""
    result: int = _syscall(_SYS_FUTEX, word, _FUTEX_WAKE_PRIVATE, 1, 0, 0, 0)
    return result
