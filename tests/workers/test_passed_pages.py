"""Which pages of a log leave the page cache: those behind every consumer, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danube_fast.wal.pages import CachedPages
from danube_fast.workers.shard.keep import passed
from tests.workers.shard_rig import RawClient, Rig
from tests.workers.test_policies import later

STEP = 64 * 1024
TAIL = 32 * 1024
PAYLOAD = b"%8000d"


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that pages were dropped below."""
    told: list[int] = []
    monkeypatch.setattr(passed, "STEP_BYTES", STEP)
    monkeypatch.setattr(CachedPages, "drop", lambda _, position: told.append(position))
    return told


def small(start: Callable[..., Rig], *topics: int) -> tuple[Rig, RawClient]:
    rig = start(tail_bytes_max=TAIL, page_cache_bytes=0, index_flush_entries=4)
    for number in topics:
        rig.assign(number, durability="os")
    return rig, rig.client()


def publish(rig: Rig, client: RawClient, opened: dict[str, int], start: int, count: int) -> None:
    for i in range(start, start + count):
        frame = client.frame(opened, i, [PAYLOAD % i])
        assert client.publish((opened["partition"], frame))[1] == i
        later(rig, 0.01)


def position_of(rig: Rig, partition_id: int, offset: int) -> int:
    run = rig.worker.state.logs[0].find(partition_id, offset)
    assert run is not None
    return run.position


def test_pages_behind_a_consumer_go_and_those_before_it_stay(start, dropped):
    rig, client = small(start, 1)
    client.subscribe(1, "s", consumer_id=1)
    opened = client.open_producer(1) | {"partition": 1}
    publish(rig, client, opened, 0, 60)
    assert max(dropped, default=0) <= position_of(rig, 1, 0), "nothing was acked"
    client.ack(0, 40)
    publish(rig, client, opened, 60, 20)
    assert dropped[-1] == position_of(rig, 1, 40)
    client.ack(40, 80)
    for i in range(80, 100):
        publish(rig, client, opened, i, 1)
        client.ack(i, i + 1)
    log = rig.worker.state.logs[0]
    kept = log.written_position - dropped[-1]
    assert TAIL + STEP <= kept < TAIL + 3 * STEP, "the newest stay, though they were passed"
    assert dropped[-1] <= log.synced_position


def test_a_topic_that_is_never_read_keeps_no_pages_and_one_that_is_behind_keeps_its_own(
    start, dropped
):
    rig, client = small(start, 1, 2)
    client.subscribe(1, "s", consumer_id=1)
    first, second = (client.open_producer(n) | {"partition": n} for n in (1, 2))
    publish(rig, client, first, 0, 2)
    publish(rig, client, second, 0, 60)
    assert max(dropped) <= position_of(rig, 1, 0), "topic 1 has unread messages in front"
    client.ack(0, 2)
    publish(rig, client, second, 60, 20)
    assert dropped[-1] > position_of(rig, 2, 20)


def test_what_another_part_of_the_worker_needs_stays(start, dropped):
    rig, client = small(start, 1)
    opened = client.open_producer(1) | {"partition": 1}
    publish(rig, client, opened, 0, 10)
    needed = position_of(rig, 1, 5)
    rig.worker.state.pins.add("a test", lambda _: needed)
    publish(rig, client, opened, 10, 60)
    assert dropped
    assert max(dropped) <= needed


def test_settings_say_how_much_stays(start, dropped):
    rig = start(tail_bytes_max=TAIL, page_cache_bytes=1 << 30)
    rig.assign(1, durability="os")
    client = rig.client()
    opened = client.open_producer(1) | {"partition": 1}
    publish(rig, client, opened, 0, 60)
    assert max(dropped, default=0) <= rig.worker.state.logs[0].oldest_position
