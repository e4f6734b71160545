"""The store in memory does what every store does."""

from __future__ import annotations

import pytest

from danube_fast.clock import SystemClock
from danube_fast.history.stores.memory import MemoryStore
from tests.history.conformance import Conformance


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


class TestMemoryStore(Conformance):
    pass
