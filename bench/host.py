"""What the kernel tells about processes and the machine, from /proc."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

__all__ = ["cpu_seconds", "machine", "memory_bytes", "read_bytes", "written_bytes"]

KIB = 1024


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that all threads of these processes have used; those that have gone count nothing."""
    total_ns = 0
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                total_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
            except OSError:
                continue
    return total_ns / 1e9


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
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / KIB**3
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
