"""In which order spare files are used."""

from __future__ import annotations

import time

from danube_fast.wal.spares import SparePool

SEGMENT_BYTES = 1024 * 1024


def wait_for(pool: SparePool, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(pool) < count:
        assert time.monotonic() < deadline, f"{len(pool)} of {count} spares after 30 s"
        time.sleep(0.01)


def test_the_segment_that_was_recycled_last_is_taken_first_and_zeros_last(tmp_path):
    used = [tmp_path / f"used-{number}" for number in range(2)]
    for number, path in enumerate(used):
        path.write_bytes(bytes([65 + number]) * SEGMENT_BYTES)
    pool = SparePool(tmp_path, SEGMENT_BYTES, 3)
    for path in used:
        pool.give(path, SEGMENT_BYTES)
    pool.refill()
    try:
        wait_for(pool, 3)
        assert [pool.take().read_bytes()[:1] for _ in range(3)] == [b"B", b"A", b"\0"]
    finally:
        pool.stop()
