"""How long the turns of a worker's loop take: a probe that a benchmark puts into the worker's process.

    sitecustomize.py, in a folder on PYTHONPATH --> install(): IdleStrategy is made by the worker's `start`
        --> `do_work` of that worker is timed from then on --> counts in a file that the benchmark maps

The broker has no such histogram, and needs none: the two readings of the clock are paid for here only. A bucket is
a sixteenth of a power of two wide, so that a ratio of two percentiles is known to 5 percent or so.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BUCKETS", "VARIABLE", "install", "percentile_us", "read_counts", "write_site"]

VARIABLE = "BENCH_TURNS_FOLDER"
WORKER = "danube_fast.workers.shard.worker"
PER_OCTAVE = 16
BUCKETS = 40 * PER_OCTAVE
"""Up to 2**40 ns, 18 minutes."""
_WORD_BYTES = 8


def write_site(folder: Path) -> None:
    """Make the module that every Python process imports which finds `folder` on its path."""
    text = f"from {__name__} import install\n\ninstall()\n"
    (folder / "sitecustomize.py").write_text(text)


def install() -> None:
    """Time the turns of this process, if it is a worker."""
    folder = os.environ.get(VARIABLE)
    if folder is None or WORKER not in sys.orig_argv:
        return
    from danube_fast.workers.process.idle import IdleStrategy

    made = IdleStrategy.__init__

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        worker = sys._getframe(1).f_locals["self"]  # its module is __main__: found by no import
        _time_turns(type(worker), Path(folder))

    IdleStrategy.__init__ = make  # type: ignore[method-assign]


def _time_turns(kind: Any, folder: Path) -> None:
    counts = _map(folder / str(os.getpid()))
    do_work, clock, log2 = kind.do_work, time.perf_counter_ns, math.log2

    def timed(self: Any, **options: Any) -> Any:
        began = clock()
        work = do_work(self, **options)
        counts[min(int(log2(clock() - began) * PER_OCTAVE), BUCKETS - 1)] += 1
        return work

    kind.do_work = timed


def _map(path: Path) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, BUCKETS * _WORD_BYTES)
        return memoryview(mmap.mmap(fd, 0)).cast("q")
    finally:
        os.close(fd)


def read_counts(folder: Path) -> Any:
    """Sum up what all workers have counted so far: turns by bucket."""
    total = np.zeros(BUCKETS, np.int64)
    for path in folder.iterdir():
        if path.name.isdecimal():
            total += np.fromfile(path, np.int64)
    return total


def percentile_us(counts: Any, percent: float) -> float:
    """The upper end of the bucket with a percentile."""
    ends = np.cumsum(counts)
    bucket = int(np.searchsorted(ends, ends[-1] * percent / 100))
    return float(2.0 ** ((bucket + 1) / PER_OCTAVE) / 1000)
