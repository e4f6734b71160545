"""Ways to make a small group durable, and which of them a disk takes best (decision 45).

    fdatasync   a write by the worker, then fdatasync by the sync thread
    dsync       one write with RWF_DSYNC, by the sync thread
    direct      one write around the page cache, with O_DIRECT and O_DSYNC, by the sync thread

A probe writes blocks of 4 KiB behind each other into a file without a name, as a log does into a new segment.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import median

__all__ = ["DURABLE_BYTES_MAX", "PROBE_ROUNDS", "Way", "best_way", "choose_way", "probe_disk"]

DURABLE_BYTES_MAX = 64 * 1024
"""A larger group is written by the worker, so that the sync thread is free for others meanwhile."""
PROBE_ROUNDS = 8
PROBE_SECONDS_MAX = 0.05
BLOCK_BYTES = 4096
ONE_CALL_SHARE = 0.85
"""Of the time of both calls: with as much time for one, acks came no sooner, for the thread that was just woken has to do
the write, too."""
DIRECT_SHARE = 0.5
"""A write around the page cache has to be twice as fast: while it lasts nothing else can be written to its file, and what
it has written is read from the disk. It is where a disk has a volatile cache and can write through that (FUA)."""


class Way(enum.StrEnum):
    """How a group is made durable."""

    FDATASYNC = "fdatasync"
    DSYNC = "dsync"
    DIRECT = "direct"


_Write = Callable[[int], object]


def choose_way(directory: Path) -> Way:
    """How small groups in this folder are best made durable, by a probe; FDATASYNC if none can be made."""
    return best_way(probe_disk(directory))


def best_way(times: dict[Way, float]) -> Way:
    """The way to use, by what `probe_disk` found."""
    both, one, direct = (times.get(way, inf) for way in (Way.FDATASYNC, Way.DSYNC, Way.DIRECT))
    if direct < DIRECT_SHARE * min(both, one):
        return Way.DIRECT
    return Way.DSYNC if one < ONE_CALL_SHARE * both else Way.FDATASYNC


def probe_disk(
    directory: Path, rounds: int = PROBE_ROUNDS, seconds_max: float = PROBE_SECONDS_MAX
) -> dict[Way, float]:
    """Median microseconds of a durable write of 4 KiB, by way; a way that the file system does not know is left out.

    The ways take turns, `rounds` times, or until `seconds_max` are over. Empty if no file can be written there.
    """
    times: dict[Way, list[float]] = {}
    try:
        with (
            tempfile.TemporaryFile(dir=directory, buffering=0) as file,
            contextlib.ExitStack() as stack,
        ):
            writes = _open_ways(stack, file.fileno(), rounds)
            end = time.monotonic() + seconds_max
            for number in range(rounds):
                for place, (way, write) in enumerate(writes.items()):
                    began = time.perf_counter()
                    write((number * len(writes) + place) * BLOCK_BYTES)
                    times.setdefault(way, []).append((time.perf_counter() - began) * 1e6)
                if time.monotonic() > end:
                    break
    except OSError:
        return {}
    return {way: median(taken) for way, taken in times.items()}


def _open_ways(stack: contextlib.ExitStack, fd: int, rounds: int) -> dict[Way, _Write]:
    """Return what writes a block at a place of the file, by way; only those that work here. Raises OSError."""
    os.posix_fallocate(fd, 0, (rounds + 1) * len(Way) * BLOCK_BYTES)
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned, as O_DIRECT asks for
    stack.callback(block.close)
    block.write(b"\x5a" * BLOCK_BYTES)

    def write_and_sync(place: int) -> None:
        os.pwrite(fd, block, place)
        os.fdatasync(fd)

    def write_once(place: int) -> None:
        os.pwritev(fd, [block], place, os.RWF_DSYNC)

    writes: dict[Way, _Write] = {Way.FDATASYNC: write_and_sync, Way.DSYNC: write_once}
    with contextlib.suppress(OSError):
        direct = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
        stack.callback(os.close, direct)
        writes[Way.DIRECT] = lambda place: os.pwrite(direct, block, place)
    for place, (way, write) in enumerate([*writes.items()], rounds * len(Way)):
        try:
            write(place * BLOCK_BYTES)
        except OSError:
            del writes[way]
    return writes
