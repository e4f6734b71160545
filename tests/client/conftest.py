from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.testing import Broker


def _fake_broker_module() -> Any:
    name = "danube_fast_tests_fake_broker"
    if name not in sys.modules:
        path = Path(__file__).with_name("fake_broker.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def broker() -> Iterator[Any]:
    broker = _fake_broker_module().FakeBroker()
    yield broker
    broker.close()


@pytest.fixture
def client(broker: Any) -> Iterator[danube_fast.Client]:
    client = danube_fast.connect(broker.url, name="test", timeout=60)
    yield client
    client.close()


@pytest.fixture(scope="session")
def real() -> Iterator[Broker]:
    """A broker in processes of its own, for all tests that need one."""
    with Broker(workers=2) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    """A topic's name that no other test uses."""
    return f"/default/{secrets.token_hex(8)}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    """A secured broker and its sign-on port, in threads."""
    from tests.client.sign_on_site import Site

    site = Site(tmp_path / "tls")
    yield site
    site.close()
