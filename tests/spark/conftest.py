"""A Spark session for all tests of a process, and a broker with history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.spark.session import spark_session
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL
from tests.spark.export_rig import FILE_SIZES


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A session on two processors, which tries a task twice."""
    settings = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}
    with spark_session("local[2,2]", settings=settings) as session:
        yield session


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is the store."""
    return tmp_path_factory.mktemp("history") / "store"


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of small topics make several files."""
    for name, size in zip(("FILE_BYTES_MIN", "FILE_BYTES"), FILE_SIZES, strict=True):
        monkeypatch.setattr(f"danube_fast.spark.export.job.{name}", size)


@pytest.fixture(scope="module")
def broker(store_folder: Path) -> Iterator[Broker]:
    """A broker with a store that is a folder."""
    with Broker(workers=2, store=f"file://{store_folder}", **SMALL) as running:
        yield running
