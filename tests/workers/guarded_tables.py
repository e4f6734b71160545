"""A pytest plugin: tables that kernels index lie next to a page that may not be touched, so a wrong row is a SIGSEGV.

    python -m pytest -n 0 -p tests.workers.guarded_tables --tables=end tests/workers/test_ring_turn.py

    end     each table ends at a guard page; a job has rows for three links
    start   each begins behind one, so that row -1 is noticed
    holes   as `end`, and the rows of a job behind the first four taken ones, and behind the first four outlets, are
            pages of that kind; a turn takes four bundles and has four outlets then
    narrow  the same behind the first ones

Tables that grow begin with few rows, so that the last one is in use. The product is left as it is: its modules get
another `np`, and `bytearray`, to allocate with. Not for rings: `tests/ring/test_spsc.py` looks behind their ends.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest

from danube_fast.broker.admission import tables as admission_tables
from danube_fast.client.link import answers, deliveries, lookout
from danube_fast.ring import duplex, handover, spsc
from danube_fast.wal import sync
from danube_fast.workers.shard import routed_peers
from danube_fast.workers.shard.publish import outlets, ring_intake
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    AT_OUTLETS,
    AT_TAKEN,
    LINK_BYTES,
    OUTLET_BYTES,
    TAKEN_BYTES,
)
from tests.frame.guarded import PAGE_BYTES, Guarded

HOLE_ROWS = {"holes": 4, "narrow": 1}
"""Rows of a job that are no hole. Its links end with a page then, too."""
HOLE_BYTES = 4096
"""Pages larger than that do not fit between the rows of a job."""
PLACES = ("end", "start", *HOLE_ROWS)
ROWS_AT_FIRST, CELLS_AT_FIRST = {16: 1}, {64: 4}
"""Rows, or cells of the hash table, that the admission tables begin with, by those that they begin with otherwise."""
PARTITIONS_MAX = 77
"""Partitions that are looked up at first: an id that a random script uses for none stands behind the last one."""
RESULTS_MAX = 128
"""Frames of an open group where jobs have holes. When a group ends decides in which order different commands are
answered, so scripts that compare that order are not for those places."""
ANSWERS_MAX = 72
"""As many as a case of `test_lookout.py` may wait for."""
LINKS_MIN = 3
"""Clients of a random script."""
QUEUE_SLACK_BYTES = sync._LINE
"""The queue of syncs is aligned by its owner, which asks for so much more."""
Table = Any


def table(shape: int | tuple[int, ...], dtype: Any, *, place: str, slack_bytes: int = 0) -> Table:
    """An array of zeros that begins, or ends but for `slack_bytes`, at a guard page. The array keeps its memory."""
    byte_count = (
        math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    )
    memory = Guarded(max(byte_count - slack_bytes, 1))
    start = PAGE_BYTES
    if place != "start":
        start += memory.capacity_bytes - byte_count + slack_bytes
    flat: Table = np.frombuffer(memory.whole, np.uint8, byte_count, start)
    return flat.view(dtype).reshape(shape)


class GuardedNumpy:
    """numpy for one module: what it allocates is a guarded table."""

    def __init__(self, place: str, *, slack_bytes: int = 0) -> None:
        self._place, self._slack_bytes = place, slack_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Table:
        return self._made(shape, dtype)

    def full(self, count: int, value: int, dtype: Any) -> Table:
        made = self._made(count, dtype)
        made[...] = value
        return made

    def concatenate(self, parts: list[Table]) -> Table:
        whole = np.concatenate(parts)
        made = self._made(whole.shape, whole.dtype)
        made[...] = whole
        return made

    def _made(self, shape: tuple[int, ...], dtype: Any) -> Table:
        return table(shape, dtype, place=self._place, slack_bytes=self._slack_bytes)


class AdmissionNumpy(GuardedNumpy):
    """The same for tables that grow: they begin small."""

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Table:
        if isinstance(shape, int):
            return super().zeros(CELLS_AT_FIRST.get(shape, shape), dtype)
        rows, *columns = shape
        return super().zeros((ROWS_AT_FIRST.get(rows, rows), *columns), dtype)

    def full(self, count: int, value: int, dtype: Any) -> Table:
        return super().full(max(count, PARTITIONS_MAX), value, dtype)


class JobNumpy(GuardedNumpy):
    """The same for jobs with holes: behind so many rows a page begins."""

    def __init__(self, rows: int) -> None:
        super().__init__("end")
        self._rows = rows

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Table:
        assert isinstance(shape, int)
        byte_count = shape * np.dtype(dtype).itemsize
        first = -(AT_TAKEN + self._rows * TAKEN_BYTES) % PAGE_BYTES
        pages = -(-(first + byte_count) // PAGE_BYTES) * PAGE_BYTES
        whole = table(pages, np.uint8, place="end")
        return whole[first : first + byte_count].view(dtype)


def holes(job: int, rows: int) -> list[tuple[int, int]]:
    """Pages of a job that are rows which no turn uses: address and size."""
    found = []
    for start, stop in (
        (AT_TAKEN + rows * TAKEN_BYTES, AT_OUTLETS),
        (AT_OUTLETS + rows * OUTLET_BYTES, AT_LINKS),
    ):
        end = (job + stop) // PAGE_BYTES * PAGE_BYTES
        assert (job + start) % PAGE_BYTES == 0 and end > job + start
        found.append((job + start, end - job - start))
    return found


def protect(found: list[tuple[int, int]], kind: int) -> None:
    """Let pages be touched, or not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, byte_count in found:
        if libc.mprotect(address, byte_count, kind):
            raise OSError(ctypes.get_errno(), "mprotect failed")


def with_holes(rows: int) -> None:
    """Have jobs holes behind so many rows, which are open while a job moves."""
    grow = ring_intake.RingIntake._grow
    readable, none = 3, 0

    def grow_with_holes(self: Any, links: int) -> None:
        if hasattr(self, "_address"):
            protect(holes(self._address, rows), readable)
        grow(self, links)
        protect(holes(self._address, rows), none)

    set_up: Any = ring_intake.RingIntake
    set_up._grow = grow_with_holes
    admission_tables.AdmissionTables.__init__.__kwdefaults__["results_max"] = RESULTS_MAX
    links = (PAGE_BYTES - rows * OUTLET_BYTES) // LINK_BYTES
    named(ring_intake, np=JobNumpy(rows), TAKEN_MAX=rows, LINKS_MIN=links)
    named(outlets, OUTLETS_MAX=rows)


def named(module: Any, **values: Any) -> None:
    """Give a module other values for its names."""
    for name, value in values.items():
        setattr(module, name, value)


def install(place: str) -> None:
    """Have all tables guarded, those of objects that are made from now on."""
    for module in (duplex, handover, spsc, lookout, deliveries, answers, ring_intake, routed_peers):
        named(module, np=GuardedNumpy(place))
    named(sync, np=GuardedNumpy(place, slack_bytes=QUEUE_SLACK_BYTES))
    named(admission_tables, np=AdmissionNumpy(place))
    named(answers, ROWS=ANSWERS_MAX)
    named(
        ring_intake, LINKS_MIN=LINKS_MIN,
        bytearray=lambda count: table(count, np.uint8, place=place),
    )  # fmt: skip
    if place in HOLE_ROWS:
        with_holes(HOLE_ROWS[place])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tables", choices=PLACES, required=True, help="where the guard pages are")


def pytest_configure(config: pytest.Config) -> None:
    install(config.getoption("--tables"))
