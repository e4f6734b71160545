"""Checks of `doctor` on this host: one function per question, each with its advice.

Everything is read from /proc and /sys below `root`, so that a test can show them another machine.
"""

from __future__ import annotations

import enum
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from danube_fast.cli.output import bytes_text
from danube_fast.descriptors import DESCRIPTORS_NEEDED, DESCRIPTORS_WANTED
from danube_fast.interpreter import is_free_threaded

__all__ = ["Finding", "Verdict", "examine"]

GIB = 1024**3
CORES_MIN = 2
MEMORY_BYTES_MIN = 2 * GIB
FREE_BYTES_MIN = 10 * GIB
FREE_BYTES_NEEDED = 1 * GIB
PYTHON_MIN = (3, 11)
SYNC_PROBES = 15
SYNC_SECONDS_MAX = 2.0
SYNC_SLOW_MS = 5.0
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen")
# A network file system's locks and syncs do not promise what the log needs.
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "fuse.s3fs")


class Verdict(enum.StrEnum):
    """How it stands."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(NamedTuple):
    """One answer: what was looked at, how it stands, what was seen, what to change."""

    check: str
    verdict: Verdict
    seen: str
    advice: str = ""
    section: str = ""
    """Heading of tuning.md that says more."""


def examine(data_dir: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Ask every question about this host, for a broker with this data directory."""
    place = _existing(Path(data_dir).absolute())
    checks: list[Callable[[], Finding]] = [
        _python,
        _cores,
        lambda: _memory(root),
        lambda: _disk(place),
        lambda: _file_system(place, root),
        lambda: _sync_time(place),
        _descriptors,
        lambda: _clock(root),
        _memfd,
        _kernels,
    ]
    for check in checks:
        yield check()


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _python() -> Finding:
    seen = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    if sys.version_info < PYTHON_MIN:
        return Finding("python", Verdict.FAILURE, seen, "use Python 3.11 or newer")
    if sys.platform != "linux":
        return Finding("python", Verdict.FAILURE, f"{seen}, {sys.platform}", "use Linux")
    if is_free_threaded():
        advice = "use the ordinary build of the same version: kernels rely on the GIL"
        return Finding("python", Verdict.FAILURE, f"{seen}, free-threaded", advice)
    if platform.python_implementation() != "CPython":
        advice = "use ordinary CPython: others pack messages without kernels, much slower"
        return Finding("python", Verdict.WARNING, seen, advice)
    return Finding("python", Verdict.OK, seen)


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    seen = f"{count} usable"
    if count < CORES_MIN:
        advice = "give it two cores or more; with one, broker and clients take turns"
        return Finding("cores", Verdict.WARNING, seen, advice, "Workers and cores")
    return Finding("cores", Verdict.OK, seen)


def _memory(root: Path) -> Finding:
    fields = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        fields[name] = rest.split()[0] if rest.split() else "0"
    available = int(fields.get("MemAvailable", "0")) * 1024
    limit = "".join(_lines(root / "sys/fs/cgroup/memory.max")).strip()
    if limit.isdecimal():
        available = min(available, int(limit))
    seen = f"{bytes_text(available)} available"
    if available < MEMORY_BYTES_MIN:
        advice = "free some, or lower tail_bytes_max and memory_topic_bytes_max"
        return Finding("memory", Verdict.WARNING, seen, advice, "Memory")
    return Finding("memory", Verdict.OK, seen)


def _disk(place: Path) -> Finding:
    usage = os.statvfs(place)
    free = usage.f_bavail * usage.f_frsize
    seen = f"{bytes_text(free)} free at {place}"
    advice = "free some, choose another --data-dir, or set wal_bytes_max"
    if not os.access(place, os.W_OK):
        return Finding("disk", Verdict.FAILURE, f"{place} cannot be written", "choose --data-dir")
    if free < FREE_BYTES_NEEDED:
        return Finding("disk", Verdict.FAILURE, seen, advice, "Disk")
    if free < FREE_BYTES_MIN:
        return Finding("disk", Verdict.WARNING, seen, advice, "Disk")
    return Finding("disk", Verdict.OK, seen)


def _file_system(place: Path, root: Path) -> Finding:
    """The type of the mount that holds the data directory: the longest mount point above it."""
    kind, best = "unknown", ""
    for line in _lines(root / "proc/self/mountinfo"):
        front, separator, back = line.partition(" - ")
        if not separator:
            continue
        mount = front.split()[4].encode().decode("unicode_escape")
        inside = mount == "/" or place == Path(mount) or Path(mount) in place.parents
        if inside and len(mount) >= len(best):
            kind, best = back.split()[0], mount
    seen = f"{kind} (mounted at {best or '?'})"
    if kind in NETWORK_FILE_SYSTEMS:
        advice = "use a local disk: locks and syncs over a network do not hold what fsync promises"
        return Finding("file system", Verdict.FAILURE, seen, advice, "Disk")
    if kind in ("tmpfs", "ramfs"):
        advice = "use a disk: here everything is gone after a restart of the host"
        return Finding("file system", Verdict.WARNING, seen, advice, "Disk")
    if kind == "overlay":
        advice = "mount a volume: data in a container's own layer goes with the container"
        return Finding("file system", Verdict.WARNING, seen, advice, "Disk")
    return Finding("file system", Verdict.OK, seen)


def _sync_time(place: Path) -> Finding:
    """How long a durable write of 4 KiB takes, in each way that there is, into a file without a name."""
    from danube_fast.wal.durable_writes import Way, best_way, probe_disk

    times = probe_disk(place, SYNC_PROBES, SYNC_SECONDS_MAX)
    if Way.FDATASYNC not in times:
        return Finding("sync", Verdict.WARNING, f"nothing can be written to {place} and synced")
    best = best_way(times)
    text = ", ".join(f"{way} {us / 1000:.2f}" for way, us in times.items())
    seen = f"{text} ms for 4 KiB (medians of {SYNC_PROBES}); `durable_writes` auto takes {best}"
    if times[best] / 1000 > SYNC_SLOW_MS:
        advice = "use a disk with a write cache that survives power loss, or durability os"
        return Finding("sync", Verdict.WARNING, seen, advice, "Durability")
    return Finding("sync", Verdict.OK, seen)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    most = "unlimited" if limit == sys.maxsize else f"at most {limit}"
    seen = f"{soft} (ulimit -n), {most} (ulimit -Hn)" if soft != hard else f"{most} (ulimit -n)"
    advice = f"raise the hard limit to {DESCRIPTORS_WANTED}; serve takes what the hard limit allows"
    if limit < DESCRIPTORS_NEEDED:
        return Finding("descriptors", Verdict.FAILURE, seen, advice, "Many clients")
    if limit < DESCRIPTORS_WANTED:
        return Finding("descriptors", Verdict.WARNING, seen, advice, "Many clients")
    return Finding("descriptors", Verdict.OK, seen)


def _clock(root: Path) -> Finding:
    folder = root / "sys/devices/system/clocksource/clocksource0"
    name = "".join(_lines(folder / "current_clocksource")).strip()
    if not name:
        return Finding("clock source", Verdict.OK, "not told by this host")
    if name not in GOOD_CLOCKS:
        advice = "each look at the time is a system call here; boot with clocksource=tsc if you can"
        return Finding("clock source", Verdict.WARNING, name, advice, "Workers and cores")
    return Finding("clock source", Verdict.OK, name)


def _memfd() -> Finding:
    """Rings live in anonymous memory: the size of /dev/shm, small in containers, does not matter."""
    try:
        os.close(os.memfd_create("danube-fast-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "allow memfd_create and pidfd_open (Linux 5.3 or newer, and no filter on them)"
        return Finding("shared memory", Verdict.FAILURE, str(error.strerror), advice)
    return Finding("shared memory", Verdict.OK, "memfd; /dev/shm is not needed")


def _kernels() -> Finding:
    from danube_fast.frame.image import is_built

    if is_built():
        return Finding("kernels", Verdict.OK, "compiled")
    advice = "nothing to do: the first serve compiles them, once, in about a minute"
    return Finding("kernels", Verdict.OK, "not compiled yet", advice)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
