"""Fixtures of several files: brokers with a store for history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL
from tests.delivery.s3_rig import give_credentials, proxied
from tests.history.faulty_proxy import FaultyProxy
from tests.history.s3_servers import BUCKET, plain_client, seaweed_server


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder that is to be the store."""
    return tmp_path / "store"


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    """A broker with that store."""
    with Broker(workers=2, store=f"file://{store}", **SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a SeaweedFS of these tests alone, with a bucket."""
    with seaweed_server(tmp_path_factory.mktemp("seaweed")) as endpoint:
        plain_client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint


@pytest.fixture
def proxy(seaweed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """A proxy before it that fails when told, and credentials in the environment."""
    give_credentials(monkeypatch, tmp_path)
    with proxied(seaweed) as running:
        yield running
