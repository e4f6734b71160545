"""In which order spare files are used."""

from __future__ import annotations

import time

import pytest

from danube_fast.wal.spares import SparePool

SEGMENT_BYTES = 1024 * 1024


def wait_for(pool: SparePool, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(pool) < count:
        assert time.monotonic() < deadline, f"{len(pool)} of {count} spares after 60 s"
        time.sleep(0.01)


def test_what_nobody_needs_is_removed_in_the_background(tmp_path):
    paths = [tmp_path / f"used-{number}" for number in range(5)]
    for path in paths:
        path.write_bytes(bytes(SEGMENT_BYTES))
    pool = SparePool(tmp_path, SEGMENT_BYTES, 1)
    try:
        for path in paths:
            pool.give(path, SEGMENT_BYTES)
        assert not any(path.exists() for path in paths), "they have other names at once"
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) > 2:  # a spare and the reserve
            assert time.monotonic() < deadline, sorted(tmp_path.iterdir())
            time.sleep(0.01)
        assert pool.bytes_on_disk == SEGMENT_BYTES
    finally:
        pool.stop()


def test_what_is_not_removed_yet_makes_room_when_the_disk_is_full(tmp_path, monkeypatch):
    pool = SparePool(tmp_path, SEGMENT_BYTES, 0)
    monkeypatch.setattr(pool, "refill", lambda: None)  # the background has no time
    doomed = tmp_path / "used"
    doomed.write_bytes(bytes(SEGMENT_BYTES))
    pool.give(doomed, SEGMENT_BYTES)
    allocate = pool.allocate

    def full_while_it_stands(byte_count):
        if any(path.suffix == ".tmp" for path in tmp_path.iterdir()):
            raise OSError(28, "No space left on device")
        return allocate(byte_count)

    monkeypatch.setattr(pool, "allocate", full_while_it_stands)
    path, size = pool.take()
    assert path.stat().st_size == size == SEGMENT_BYTES
    (tmp_path / "another").write_bytes(b"")
    monkeypatch.setattr(pool, "allocate", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        pool.take()


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
        assert [pool.take()[0].read_bytes()[:1] for _ in range(3)] == [b"B", b"A", b"\0"]
    finally:
        pool.stop()


def test_files_grow_with_what_the_log_holds(tmp_path):
    pool = SparePool(tmp_path, 64 * SEGMENT_BYTES, 0, start_bytes=2 * SEGMENT_BYTES)
    held, sizes = 0, []
    for _ in range(6):
        pool.expect(held)
        path, size = pool.take()
        assert path.stat().st_size == size
        path.unlink()
        held += size
        sizes.append(size // SEGMENT_BYTES)
    assert sizes == [2, 2, 16, 64, 64, 64]


def test_a_spare_that_is_too_small_waits_for_its_turn(tmp_path):
    pool = SparePool(tmp_path, 8 * SEGMENT_BYTES, 2, start_bytes=SEGMENT_BYTES)
    for number in range(2):
        path = tmp_path / f"used-{number}"
        path.write_bytes(bytes(SEGMENT_BYTES))
        pool.give(path, SEGMENT_BYTES)
    assert [pool.take(3 * SEGMENT_BYTES)[1] for _ in range(2)] == [4 * SEGMENT_BYTES] * 2
    assert pool.take(9 * SEGMENT_BYTES)[1] == 9 * SEGMENT_BYTES, "what must stand together"
    assert [pool.take()[0].name for _ in range(2)] == ["spare-1.seg", "spare-0.seg"]


def test_spares_of_sizes_that_fit_are_kept_by_the_next_start(tmp_path):
    for number, size in enumerate((SEGMENT_BYTES // 2, SEGMENT_BYTES, 4 * SEGMENT_BYTES)):
        (tmp_path / f"spare-{number}.seg").write_bytes(bytes(size))
    (tmp_path / "spare-7.seg").write_bytes(bytes(16 * SEGMENT_BYTES))
    pool = SparePool(tmp_path, 8 * SEGMENT_BYTES, 3, start_bytes=SEGMENT_BYTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spare-1.seg", "spare-2.seg"]
    assert pool.bytes_on_disk == 5 * SEGMENT_BYTES
