"""What a subscription loses while it has no consumer is told to the first one that comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.subscription.consumer import Gap
from danube_fast.broker.subscription.pending_gaps import GAPS_MAX, PendingGaps
from tests.workers.shard_rig import RawClient, Rig, Shifted

SECOND = 1_000_000_000
TTL = {"message_ttl_ms": 1000}
EVICT = {"backlog_bytes_max": 20_000, "backlog_policy": "evict"}
OLD = {"retention_policy": "until_expired", "retention_seconds": 1}
COUNT = 10


@pytest.fixture
def start(rigs: Callable[..., Rig]) -> Callable[..., Rig]:
    def made(ahead_ns: int = 0) -> Rig:
        rig = rigs(session_timeout_ms=3_600_000)
        rig.worker.state.clock = rig.boot.clock = Shifted(rig.boot.clock)
        rig.worker.state.clock.ahead_ns = ahead_ns
        return rig

    return made


def later(rig: Rig, seconds: float) -> None:
    for _ in range(10):
        rig.worker.state.clock.ahead_ns += int(seconds * SECOND / 10)
        rig.worker.do_work()


def gaps(client: RawClient) -> list[tuple[int, int, bool]]:
    """What consumers of this connection were told since the last call."""
    client.ask(2)  # answered behind all that was sent before
    client.pump()
    told = [event[3] for event in client.events if event[2] == "gap"]
    client.events.clear()
    return [(detail["start"], detail["end"], detail["lost"]) for detail in told]


def begin(rig: Rig, durability: str, policy: dict[str, Any]) -> RawClient:
    """A subscription without a consumer, and ten messages that it has not got."""
    rig.assign(1, durability=durability, policy=policy)
    client = rig.client()
    opened = client.open_producer(1)
    assert client.subscribe(1, credit=0)[0] == 67
    assert client.ask(25, 1)[0] == 67
    for sequence in range(COUNT):
        assert client.publish((1, client.frame(opened, sequence, [b"x" * 5000])))[0] == 0
    return client


def lose(rig: Rig, policy: dict[str, Any]) -> None:
    if not policy:
        rig.operation(m.PurgePartitions([1]))
    later(rig, 4)


@pytest.mark.parametrize("durability", ["os", "memory"])
@pytest.mark.parametrize("policy", [{}, TTL, EVICT, OLD], ids=["purge", "ttl", "evict", "expired"])
def test_who_comes_back_is_told_once(start: Any, durability: str, policy: dict[str, Any]) -> None:
    rig = start()
    client = begin(rig, durability, policy)
    lose(rig, policy)
    assert gaps(client) == []
    reply = client.subscribe(1, consumer_id=2)
    first = reply[2]["next_offset"]
    assert first > 0
    assert gaps(client) == [(0, first, True)]
    client.ask(25, 2)
    client.subscribe(1, consumer_id=3)
    assert gaps(client) == [], "it was told"


@pytest.mark.parametrize("how", ["stop", "crash"])
@pytest.mark.parametrize("policy", [{}, TTL, EVICT], ids=["purge", "ttl", "evict"])
def test_a_restart_does_not_forget_what_is_to_be_told(
    start: Any, how: str, policy: dict[str, Any]
) -> None:
    rig = start()
    begin(rig, "fsync", policy)
    lose(rig, policy)
    ahead_ns = rig.worker.state.clock.ahead_ns
    getattr(rig, how)()
    again = start(ahead_ns)
    client = again.client()
    first = client.subscribe(1)[2]["next_offset"]
    assert gaps(client) == [(0, first, True)]
    later(again, 1)  # that it was told is recorded
    getattr(again, how)()
    third = start(ahead_ns + SECOND)
    client = third.client()
    client.subscribe(1)
    assert gaps(client) == [], "it was told"


def test_who_is_there_is_told_at_once_and_not_again(start: Any) -> None:
    rig = start()
    client = begin(rig, "os", {})
    client.subscribe(1, consumer_id=2, credit=0)
    rig.operation(m.PurgePartitions([1]))
    assert gaps(client) == [(0, COUNT, True)]
    client.ask(25, 2)
    client.subscribe(1, consumer_id=3)
    assert gaps(client) == []


def test_gaps_that_go_on_are_one_and_their_number_is_bounded() -> None:
    pending = PendingGaps()
    for start in range(0, 1000, 10):
        pending.add(Gap(start + 10, "old", lost=True, start=start))
    pending.add(Gap(1010, "purged", lost=True, start=1000))
    pending.add(Gap(1010, "purged", lost=True, start=1005))
    record = pending.record(1, "s")
    assert record.gaps == [(0, 1000, "old", True), (1000, 1010, "purged", True)]
    for number in range(1000):
        pending.add(Gap(3 * number + 2001, "old", lost=bool(number % 2), start=3 * number + 2000))
    record = pending.record(1, "s")
    assert len(record.gaps) == GAPS_MAX
    assert (record.gaps[0][0], record.gaps[-1][1]) == (0, 3 * 999 + 2001)
    restored = PendingGaps()
    restored.restore(record)
    assert restored.take() == pending.take()
    assert not pending
    assert pending.is_dirty
