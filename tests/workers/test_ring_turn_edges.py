"""Turns of kernels over rings at the edges: who may be served by them, credit, names, room in rings, changes between turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.ring_client import fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import Publisher, expected, warmed
from tests.workers.shard_rig import Rig


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


@pytest.mark.parametrize("consumer", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_consumer_whose_number_is_too_large_for_kernels_is_served(
    rig: Rig, consumer: int
) -> None:
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    warmed(rig, publisher)
    client = ring_client(rig)
    client.subscribe(1, consumer_id=consumer)
    client.receive(1)
    publisher.post(5)
    publisher.finish()
    publisher.post(5)
    publisher.finish()
    rig.turn(lambda: client.pump() or len(client.delivered) == 10, "deliveries")
    assert {number for number, _ in client.delivered} == {consumer}
    assert client.receive(10) == expected(1, 11)
