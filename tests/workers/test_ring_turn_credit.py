"""Credit of consumers that kernels deliver to in a turn over rings: it is good for as much as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from danube_fast.workers.shard.publish.turn_layout import OutletKind
from tests.workers.ring_client import fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import (
    DELIVERED_TOO,
    Publisher,
    expected,
    numbers,
    outlets_of,
    warmed,
    watch_served,
)
from tests.workers.shard_rig import Rig

CREDITS = {
    "exclusive": [(1 << 20, 5), (1 << 20, 3), (1, 1000), (1 << 20, 7)],
    "reader": [(1 << 20, 5), (1 << 20, 3), (1, 1000), (1 << 20, 7)],
    "shared": [(1 << 20, 5), (1 << 20, 3), (1, 1000), (1 << 20, 7)],
    "failover": [(1000, 100), (1, 1000), (999, 2), (1 << 20, 20)],
}
NAMES = {"exclusive": "s", "reader": "", "shared": "s", "failover": "s"}
"""Of subscriptions; readers have none."""


def deliveries(
    rig: Rig, kind: str, messages: int, partitions: tuple[int, ...], counts: list[int]
) -> list[list[int]]:
    """Grant and publish in turns; offsets that were delivered after each step."""
    publishers = []
    for partition in partitions:
        rig.assign(partition, durability="memory")
        publishers.append(Publisher(rig, partition))
    client = ring_client(rig)
    for partition in partitions:
        client.subscribe(partition, NAMES[kind], kind=kind, consumer_id=partition, credit=0)
    client.send(21, 1, 1 << 20, 4 * len(partitions) * messages)
    for publisher in publishers:
        publisher.post(messages=messages)
        publisher.finish()
        publisher.post(messages=messages)
        publisher.finish()
    rig.turn(lambda: len(numbers(client, 1)) == 2 * messages, "the first deliveries")
    counts.append(0)
    served = watch_served(rig)
    steps = []
    for credit in CREDITS[kind]:
        client.send(21, 1, *credit)
        for _ in range(3):
            for publisher in publishers:
                publisher.post(messages=messages)
                publisher.finish()
        for _ in range(5):
            rig.worker.do_work()
        steps.append([len(numbers(client, partition)) for partition in partitions])
    counts[-1] = served[OutletKind.MEMORY + DELIVERED_TOO]
    client.send(21, 1, 1 << 28, 1 << 28)
    for publisher in publishers:
        rig.turn(
            lambda p=publisher: len(numbers(client, p.partition)) == p.sent, "what was left"
        )  # fmt: skip
        got = numbers(client, publisher.partition)
        assert got == list(range(publisher.sent)), f"partition {publisher.partition}: {got}"
    return steps


@pytest.mark.parametrize("partitions", [(1,), (1, 2, 3)])
@pytest.mark.parametrize("messages", [1, 4])
@pytest.mark.parametrize("kind", ["exclusive", "reader", "shared", "failover"])
def test_credit_is_good_for_as_much_as_without_kernels(
    tmp_path: Path, kind: str, messages: int, partitions: tuple[int, ...]
) -> None:
    """Several partitions on one flow share its credit; which of them gets the last of it is left open."""
    found, counts = [], list[int]()
    for serves in (True, False):
        rig = Rig(tmp_path / str(serves), ipc_endpoint=fresh_endpoint())
        if not serves:
            outlets_of(rig)._outlet = lambda *_: None  # type: ignore[method-assign]
        try:
            found.append(deliveries(rig, kind, messages, partitions, counts))
        finally:
            rig.stop()
    if len(partitions) == 1:
        assert found[0] == found[1]
        assert counts[0] or messages > 1, "kernels delivered nothing"
    else:
        assert [sum(step) for step in found[0]] == [sum(step) for step in found[1]]


@pytest.mark.parametrize("kind", ["exclusive", "reader", "failover", "shared"])
def test_credit_ends_within_a_turn(rigs: Callable[..., Rig], kind: str) -> None:
    """Kernels charge it for each frame: those behind its end are not delivered before there is more."""
    rig = rigs(ipc_endpoint=fresh_endpoint())
    rig.assign(1, durability="memory")
    publisher = Publisher(rig, 1)
    client = ring_client(rig)
    served = warmed(rig, publisher)
    client.subscribe(1, NAMES[kind], kind=kind, credit=0)
    client.send(21, 1, 1 << 20, 3)
    publisher.post()
    publisher.finish()
    rig.turn(lambda: len(numbers(client)) == 2, "the first two")
    client.send(21, 1, 1 << 20, 3)
    rig.worker.do_work()
    publisher.post(20)
    publisher.finish()
    for _ in range(5):
        rig.worker.do_work()
    assert numbers(client) == list(range(6)), "credit for four more"
    assert served[OutletKind.MEMORY + DELIVERED_TOO], "kernels delivered nothing"
    client.send(21, 1, 1 << 20, 100)
    rig.turn(lambda: len(numbers(client)) == publisher.sent, "what was left")
    assert client.receive(publisher.sent) == expected(0, publisher.sent)
