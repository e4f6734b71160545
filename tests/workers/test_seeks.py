"""Seeks at the worker's door: what is from before one does not count, also if another consumer made it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.shard_rig import RawClient, Rig

SEEK, CREDIT = 24, 1 << 20
CLOSED = "closed"


@pytest.fixture
def rig(start: Callable[..., Rig]) -> Rig:
    made = start()
    made.assign(1)
    return made


def publish(client: RawClient, count: int) -> None:
    opened = client.open_producer(1)
    client.publish((1, client.frame(opened, 0, [b"%d" % i for i in range(count)])))


def offsets(client: RawClient, count: int) -> list[int]:
    return [offset for offset, _ in client.receive(count)]


@pytest.mark.parametrize("kind", ["shared", "key_shared", "failover"])
def test_a_late_ack_does_not_cancel_the_replay_of_another(rig: Rig, kind: str):
    """Not even of a client that knows nothing of seeks: it answers what it hears with an ack."""
    one, two = rig.client(), rig.client()
    one.subscribe(1, kind=kind)
    publish(one, 10)
    assert offsets(one, 10) == list(range(10))
    two.subscribe(1, kind=kind)
    assert two.ask(SEEK, 1, "earliest")[0] == 67
    one.ack(0, 10)
    one.send(21, 1, CREDIT, CREDIT)
    seen = offsets(two, 10)
    assert sorted(seen) == list(range(10)), "an ack from before the seek counted"
    one.pump()
    assert [event[2] for event in one.events] == [CLOSED]
    assert one.events[0][3]["code"] == 14
    assert one.events[0][3]["sought"] is True
    assert one.subscribe(1, kind=kind)[0] == 67, "it may come back at once"


def test_nacks_and_extensions_from_before_a_seek_are_void_too(rig: Rig):
    one, two = rig.client(), rig.client()
    one.subscribe(1, kind="shared")
    publish(one, 10)
    one.receive(10)
    two.subscribe(1, kind="shared")
    two.ask(SEEK, 1, 0)
    one.send(23, [[1, [0, 10]]], 3_600_000)
    one.send(26, [[1, [0, 10]]], 3_600_000)
    one.ack()
    assert offsets(two, 10) == list(range(10))


def test_who_has_received_nothing_stays_and_keeps_its_place(rig: Rig):
    """A standby has nothing from before the seek: it is the next in line, as it was."""
    active, second, third = rig.client(), rig.client(), rig.client()
    for client in (active, second, third):
        client.subscribe(1, kind="failover")
    publish(active, 5)
    active.receive(5)
    active.ask(SEEK, 1, "earliest")
    assert offsets(active, 5) == list(range(5))
    active.ask(25, 1)
    assert offsets(second, 5) == list(range(5))
    for client in (second, third):
        client.pump()
        assert not client.events


def test_an_offset_beyond_the_end_is_the_end(rig: Rig):
    """Of partitions with one position for all, some are shorter."""
    client = rig.client()
    client.subscribe(1)
    publish(client, 3)
    client.receive(3)
    assert client.ask(SEEK, 1, 1 << 62)[2] == {"next_offset": 3, "end_offset": 3}
    assert client.ask(SEEK, 1, 1)[2] == {"next_offset": 1, "end_offset": 3}
    assert client.ask(SEEK, 1, -1)[2] == 3


def test_a_seek_may_be_tried_without_moving_anything(rig: Rig):
    one, two = rig.client(), rig.client()
    for client in (one, two):
        client.subscribe(1, kind="shared")
    publish(one, 4)
    held = offsets(one, 2) + offsets(two, 2)
    assert sorted(held) == [0, 1, 2, 3]
    assert one.ask(SEEK, 1, "earliest", True)[2] == {"next_offset": 0, "end_offset": 4}
    one.ack(0, 4)
    two.ack(0, 4)
    assert not two.events
    assert one.ask(SEEK, 1, "latest", True)[2] == {"next_offset": 4, "end_offset": 4}
    described = rig.worker.state.catalog.by_id[1].subscriptions["s"]
    assert described.cursor == 4
