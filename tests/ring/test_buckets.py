"""Token buckets: a rate holds over time, whoever draws on it and however late he looks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from danube_fast.errors import ResourceExhausted
from danube_fast.ring import buckets
from danube_fast.ring.buckets import BURST_NS, Bucket, BucketTable

SECOND = 1_000_000_000


@pytest.fixture
def table() -> Iterator[BucketTable]:
    made = BucketTable.create()
    yield made
    made.close()


def test_two_keys_in_one_place_have_two_rows(table: BucketTable) -> None:
    first, second = table.address(5), table.address(5 + buckets.BUCKET_ROWS)
    assert first != second
    assert table.address(5) == first
    assert table.address(5 + buckets.BUCKET_ROWS) == second


def test_a_full_table_says_so(table: BucketTable, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in range(1, buckets.PROBES_MAX + 1):
        table.address(7 + key * buckets.BUCKET_ROWS)
    with pytest.raises(ResourceExhausted, match="restart the broker"):
        table.address(7 + (buckets.PROBES_MAX + 1) * buckets.BUCKET_ROWS)


@pytest.mark.parametrize("rate", [1, 3, 100, 1000, 250_000])
def test_sixty_seconds_of_two_workers_give_sixty_seconds_worth(
    table: BucketTable, rate: int
) -> None:
    """Both look at random times, seldom enough that much is there when they do."""
    draw = random.Random(rate)
    row = table.address(1)
    workers = [Bucket(row, rate, 0), Bucket(row, rate, 0)]
    now, end, taken = SECOND, 61 * SECOND, 0
    while now < end:
        worker = draw.choice(workers)
        if worker.wait_ns(now) == 0:
            count = worker.room(now, 100)
            worker.take(now, count, 0)
            taken += count
        now += draw.randrange(1_000_000, 100_000_000)
    assert taken == pytest.approx(60 * rate, rel=0.02, abs=2)


def test_what_is_owed_is_waited_for(table: BucketTable) -> None:
    bucket = Bucket(table.address(1), 0, 1000)
    bucket.take(SECOND, 1, 5000)
    assert bucket.wait_ns(SECOND) == 5 * SECOND - BURST_NS
    assert bucket.wait_ns(6 * SECOND) == 0


def test_no_more_bytes_go_at_once_than_the_burst_has(table: BucketTable) -> None:
    bucket = Bucket(table.address(1), 0, 100_000)
    burst = 100_000 * BURST_NS // SECOND
    assert bucket.room(SECOND, 10) == burst // 10
    assert bucket.room(SECOND, 0) == burst
    bucket.take(SECOND, 1, burst - 100)
    assert bucket.room(SECOND, 10) == 10
    assert bucket.room(SECOND, 1000) == 1, "a message that is more goes alone"
    both = Bucket(table.address(2), 100, 100_000)
    assert both.room(SECOND, 10) == 100 * BURST_NS // SECOND
    assert both.room(SECOND, 10_000) == 2


def test_idleness_is_not_saved_up(table: BucketTable) -> None:
    bucket = Bucket(table.address(1), 100, 0)
    bucket.take(SECOND, 1, 0)
    later = 1000 * SECOND
    assert bucket.room(later, 1 << 20) == 100 * BURST_NS // SECOND
