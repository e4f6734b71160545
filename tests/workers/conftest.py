"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.shard_rig import Rig, Shifted
from tests.workers.small_segments import SEGMENT_BYTES


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


@pytest.fixture
def start(rigs: Callable[..., Rig]) -> Callable[..., Rig]:
    def made(**settings: Any) -> Rig:
        rig = rigs(
            **{
                "segment_bytes": SEGMENT_BYTES, "session_timeout_ms": 3_600_000,
                "tail_bytes_max": 0, "retention_seconds_min": 1, **settings,
            }
        )  # fmt: skip
        rig.worker.state.clock = rig.boot.clock = Shifted(rig.boot.clock)
        return rig

    return made
