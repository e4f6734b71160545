"""Fixtures of several files: brokers with a store for history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder that is to be the store."""
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """A broker with that store."""
    with Broker(workers=2, store=f"file://{store}", **SMALL) as running:
        yield running
