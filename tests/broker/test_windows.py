"""What a snapshot keeps of a producer's last batches, which tell a duplicate from a new message."""

from __future__ import annotations

import pytest

from danube_fast.broker.admission.layout import DEDUP_BATCHES, Mode
from danube_fast.broker.admission.tables import AdmissionTables

PARTITION, PRODUCER = 7, 11


def producer_of(tables: AdmissionTables) -> int:
    tables.add_partition(PARTITION, 0, Mode.LOGGED)
    return tables.add_producer(PARTITION, PRODUCER)


@pytest.mark.parametrize(
    "batches", [0, 1, DEDUP_BATCHES - 1, DEDUP_BATCHES, DEDUP_BATCHES + 1, 3 * DEDUP_BATCHES + 5]
)
def test_the_newest_batches_are_kept_oldest_first(batches: int) -> None:
    tables = AdmissionTables()
    slot = producer_of(tables)
    expected: list[int] = []
    for batch in range(batches):
        tables.remember(slot, 10 * batch, 10, 1000 + 10 * batch)
        expected += [10 * batch, 10, 1000 + 10 * batch]
    window = tables.window(slot)
    assert window == expected[-3 * DEDUP_BATCHES :]
    restored = AdmissionTables()
    again = producer_of(restored)
    restored.restore_window(again, window, 10 * batches)
    assert restored.window(again) == window
