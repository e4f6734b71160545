"""When a consumer rests: nothing was taken, and nothing was worked on, for a whole ack timeout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from danube_fast.client.consume.frames import Frames
from danube_fast.client.consume.in_progress import InProgress
from danube_fast.client.consume.leases import EXTENSIONS_PER_TIMEOUT, Leases

TIMEOUT_MS = 1500
TICK_NS = TIMEOUT_MS * 1_000_000 // EXTENSIONS_PER_TIMEOUT


def leases_of(type_name: str, rests: list[bool]) -> tuple[Leases, Any]:
    """Leases where a frame waits, and what is in progress; `rests` grows when the consumer rests."""
    pump: Any = SimpleNamespace(
        clock=SimpleNamespace(monotonic_ns=lambda: 0), arm=lambda *_: None, disarm=lambda *_: None
    )
    attachment = Mock(tracks=False, generation=0)
    delivery: Any = SimpleNamespace(
        attachment=attachment, generation=0, base_offset=0, end_offset=9
    )
    frames, in_progress = Frames(), InProgress(pump)
    frames.queue.append(delivery)
    rest = lambda: rests.append(True)  # noqa: E731
    return Leases(type_name, pump, frames, in_progress, rest), in_progress


@pytest.mark.parametrize("ticks_of_work", [0, 1, 9])
def test_the_wait_for_the_application_begins_when_it_has_finished_its_work(
    ticks_of_work: int,
) -> None:
    rests: list[bool] = []
    leases, in_progress = leases_of("shared", rests)
    leases.subscribed(TIMEOUT_MS)
    leases.on_time(now_ns := TICK_NS)
    in_progress.add(attachment := Mock(generation=0), 0, 5)
    for _ in range(ticks_of_work):
        leases.on_time(now_ns := now_ns + TICK_NS)
    in_progress.remove(attachment, 0, 5)
    for _ in range(EXTENSIONS_PER_TIMEOUT - 1):
        leases.on_time(now_ns := now_ns + TICK_NS)
        assert not rests, "it has had less than a timeout to take more"
    leases.on_time(now_ns + TICK_NS)
    assert rests == [True]


def test_an_exclusive_consumer_does_not_rest() -> None:
    rests: list[bool] = []
    leases, _ = leases_of("exclusive", rests)
    leases.subscribed(TIMEOUT_MS)
    for tick in range(1, 4 * EXTENSIONS_PER_TIMEOUT):
        leases.on_time(tick * TICK_NS)
    assert not rests
