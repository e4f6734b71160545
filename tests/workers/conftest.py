"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.shard_rig import Rig


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    started: list[Rig] = []

    def start(**settings: Any) -> Rig:
        rig = Rig(tmp_path / "data", **settings)
        started.append(rig)
        return rig

    yield start
    if started and not started[-1].context.closed:
        started[-1].stop()
