"""Cost of a record in a shared-memory ring: pushed and popped in one process, 100 B and 64 KiB."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from danube_fast.ring.layout import ring_bytes
from danube_fast.ring.spsc import SpscRing

CAPACITY_BYTES = 8 * 1024 * 1024
FULL, TINY = 4 * 1024 * 1024, 256 * 1024  # bytes in one round


@pytest.mark.parametrize("record_bytes", [100, 64 * 1024])
def test_push_and_pop(benchmark: Any, full_size: bool, record_bytes: int) -> None:
    memory = np.zeros(ring_bytes(CAPACITY_BYTES), dtype=np.uint8)
    ring = SpscRing.create(memory, CAPACITY_BYTES)
    count = (FULL if full_size else TINY) // record_bytes
    source = random.Random(1)
    records = [source.randbytes(record_bytes) for _ in range(count)]
    kept: list[bytes | None] = []

    def run() -> None:
        assert all(map(ring.try_push, records))
        kept[:] = [ring.pop() for _ in records]

    benchmark(run)
    assert kept == records
    if benchmark.stats:
        benchmark.extra_info["ns_per_record"] = benchmark.stats.stats.min * 1e9 / count


def test_push_and_pop_one(benchmark: Any) -> None:
    memory = np.zeros(ring_bytes(4096), dtype=np.uint8)
    ring = SpscRing.create(memory, 4096)
    record = random.Random(1).randbytes(100)

    def run() -> bytes | None:
        ring.try_push(record)
        return ring.pop()

    assert benchmark(run) == record
