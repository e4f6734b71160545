"""When a consumer rests: nothing was taken, and nothing was worked on, for a whole ack timeout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consume.leases import EXTENSIONS_PER_TIMEOUT, Leases

TIMEOUT_MS = 1500
TICK_NS = TIMEOUT_MS * 1_000_000 // EXTENSIONS_PER_TIMEOUT


def an_inbox(type_name: str) -> tuple[Any, list[bool]]:
    """An inbox where something waits, and a list that grows when it rests."""
    rests: list[bool] = []
    pump = SimpleNamespace(
        clock=SimpleNamespace(monotonic_ns=lambda: 0), arm=lambda *_: None, disarm=lambda *_: None
    )
    attachment = Mock(tracks=False, generation=0)
    delivery = SimpleNamespace(attachment=attachment, generation=0, base_offset=0, end_offset=9)
    inbox = SimpleNamespace(
        pump=pump,
        type=type_name,
        place=(1, 0),
        hand=SimpleNamespace(here=None),
        queued=[delivery],
        holds=False,
    )
    inbox.rest = lambda: rests.append(True)
    return inbox, rests


@pytest.mark.parametrize("ticks_of_work", [0, 1, 9])
def test_the_wait_for_the_application_begins_when_it_has_finished_its_work(
    ticks_of_work: int,
) -> None:
    inbox, rests = an_inbox("shared")
    leases = Leases(cast("Inbox", inbox))
    leases.subscribed(TIMEOUT_MS)
    leases.on_time(now_ns := TICK_NS)
    inbox.holds = True
    for _ in range(ticks_of_work):
        leases.on_time(now_ns := now_ns + TICK_NS)
    inbox.holds = False
    for _ in range(EXTENSIONS_PER_TIMEOUT - 1):
        leases.on_time(now_ns := now_ns + TICK_NS)
        assert not rests, "it has had less than a timeout to take more"
    leases.on_time(now_ns + TICK_NS)
    assert rests == [True]


def test_an_exclusive_consumer_does_not_rest() -> None:
    inbox, rests = an_inbox("exclusive")
    leases = Leases(cast("Inbox", inbox))
    leases.subscribed(TIMEOUT_MS)
    for tick in range(1, 4 * EXTENSIONS_PER_TIMEOUT):
        leases.on_time(tick * TICK_NS)
    assert not rests
