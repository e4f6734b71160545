"""What the kernel tells about processes and the machine, from /proc."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "cpu_seconds",
    "descriptor_count",
    "is_running",
    "machine",
    "memory_bytes",
    "read_bytes",
    "thread_count",
    "written_bytes",
]

KIB = 1024
_PID_SHIFT, _ALL_THREADS = 3, 2
"""How Linux makes a clock id of a pid."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes with all threads that they ever had; those that have gone count
    nothing. By the clock of a process (`clock_getcpuclockid(3)`)."""
    total = 0.0
    for pid in pids:
        try:
            total += time.clock_gettime(~pid << _PID_SHIFT | _ALL_THREADS)
        except OSError:
            continue
    return total


def memory_bytes(pid: int, name: str) -> int:
    """A line of /proc/PID/status, such as VmRSS or RssAnon; 0 if the process has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    return 0


def read_bytes(pid: int) -> int:
    """Bytes that a process has read from files (rchar)."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    except OSError:
        return 0


def written_bytes(pid: int) -> int:
    """Bytes that a process has written to files (wchar)."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[3])
    except OSError:
        return 0


def descriptor_count(pid: int) -> int:
    """Open descriptors of a process; 0 if it has gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def thread_count(pid: int) -> int:
    """Threads of a process; 0 if it has gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def machine() -> str:
    """One sentence about this machine."""
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    kernel = platform.release().split("-")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / KIB**3
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Linux {kernel}, "
        f"Python {platform.python_version()}"
    )
