"""What a broker takes of its disk before anything is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube_fast.config import Settings
from danube_fast.wal.layout import RESERVE_SEGMENT_BYTES
from tests.workers.broker import Broker, wait_until

EMPTY_BYTES_MAX = 64_000_000
BLOCK_BYTES = 512


def allocated_bytes(folder: Path) -> dict[str, int]:
    """Blocks that files have, bytes by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_blocks * BLOCK_BYTES for path in files}


@pytest.mark.parametrize("workers", [2, 4])
def test_an_empty_broker_takes_little_of_the_disk(tmp_path: Path, workers: int) -> None:
    data = tmp_path / "data"
    with Broker(data, fake="", workers=workers) as broker:
        broker.wait_ready()

        def is_at_rest() -> bool:
            spares = len(list(data.glob("logs/*/spare-*.seg")))
            reserves = len(list(data.glob("logs/*/reserve.seg")))
            return spares == workers * Settings().spare_segments and reserves == workers

        wait_until("spares and reserves of all logs", is_at_rest, 60)
        taken = allocated_bytes(data)
        assert sum(taken.values()) < EMPTY_BYTES_MAX, taken
        for log in range(workers):
            assert taken[f"logs/{log:04}/reserve.seg"] >= RESERVE_SEGMENT_BYTES
