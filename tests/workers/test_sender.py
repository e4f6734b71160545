"""How many parts of an object are sent at the same time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.config import MIB
from danube_fast.history.objects import OutgoingPart
from danube_fast.history.stores.store import Upload
from danube_fast.workers.process.tasks import Fork, Join, Running
from danube_fast.workers.uploader.sender import IN_FLIGHT_BYTES, IN_FLIGHT_MAX, Sender


def parts_at_once(part_bytes: int) -> int:
    """Parts of that size that are begun before one is waited for."""
    store: Any = SimpleNamespace()
    sender = Sender(store, "key", SimpleNamespace(), Upload("key", "id"))  # type: ignore[arg-type]
    data = memoryview(bytes(part_bytes))
    for number in range(1, 100):
        task = sender.send(OutgoingPart(number, 0, data))
        step = next(task)
        if isinstance(step, Join):
            return number - 1
        assert isinstance(step, Fork)
        step.task.close()
        with pytest.raises(StopIteration):
            task.send(Running(step.task))
    raise AssertionError("none is ever waited for")


def test_parts_on_their_way_are_bounded_by_number_and_bytes() -> None:
    assert parts_at_once(8 * MIB) == IN_FLIGHT_MAX == 4
    assert parts_at_once(40 * MIB) == 2
    assert parts_at_once(64 * MIB) == 1
    assert parts_at_once(IN_FLIGHT_BYTES + 1) == 1
