"""Which pages of a log leave the page cache: those behind every consumer, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danube_fast.errors import DataLoss
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
    rig.worker.state.logs[0].pages.dropped_position = 0
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


def test_what_memory_holds_in_little_room_may_reach_far_back_in_the_log(start, dropped):
    """Groups are padded: a tail of small frames takes less memory than room in the log."""
    rig, client = small(start, 1)
    client.subscribe(1, "s", consumer_id=1)
    opened = client.open_producer(1)
    for i in range(300):
        assert client.publish((1, client.frame(opened, i, [b"x" * 50])))[1] == i
        later(rig, 0.01)
    assert rig.worker.state.catalog.by_id[1].oldest_in_tail().base_offset > 0
    assert max(dropped, default=0) <= position_of(rig, 1, 0), "nothing was acked"


def test_a_place_in_the_log_is_the_same_in_memory_and_in_the_index(start, dropped, monkeypatch):
    rig, client = small(start, 1)
    client.subscribe(1, "s", consumer_id=1)
    opened = client.open_producer(1) | {"partition": 1}
    publish(rig, client, opened, 0, 20)
    log, partition = rig.worker.state.logs[0], rig.worker.state.catalog.by_id[1]
    look = passed.PassedPages(rig.worker.state)
    for sub in partition.subscriptions.values():
        monkeypatch.setattr(type(sub), "cursor", property(lambda _: cursor))
    kinds = set()
    for cursor in range(20):
        kinds.add(partition.find_in_tail(cursor) is None)
        assert look._needed_from(log, partition, 1 << 60) == position_of(rig, 1, cursor)
    assert kinds == {True, False}


def test_compaction_reads_a_topic_from_the_front(start, dropped):
    rig = start(tail_bytes_max=TAIL, page_cache_bytes=0)
    rig.worker.state.logs[0].pages.dropped_position = 0
    rig.assign(1, durability="os", policy={"compaction": True})
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, "s", consumer_id=1)
    for i in range(60):
        frame = client.frame(opened, i, [PAYLOAD % i], keys=[b"%d" % i])
        assert client.publish((1, frame))[1] == i
        client.ack(i, i + 1)
        later(rig, 0.01)
    assert max(dropped, default=0) <= position_of(rig, 1, 0)


def test_many_partitions_are_looked_at_in_slices(start, dropped, monkeypatch):
    monkeypatch.setattr(passed, "SLICE", 4)
    rig, client = small(start, *range(1, 22))
    opened = client.open_producer(21) | {"partition": 21}
    asked: list[int] = []
    needed_from = passed.PassedPages._needed_from

    def counted(*args):
        asked.append(args[2].partition_id)
        return needed_from(*args)

    monkeypatch.setattr(passed.PassedPages, "_needed_from", counted)
    look = passed.PassedPages(rig.worker.state)
    look.do_work(rig.worker.state.now_ns)
    publish(rig, client, opened, 0, 40)
    asked.clear()
    dropped.clear()
    turns = 0
    while not dropped:
        look.do_work(rig.worker.state.now_ns)
        turns += 1
        assert len(asked) <= 4 * turns <= 24
    assert asked == list(range(1, 22))


def test_an_index_that_cannot_be_read_ends_a_look_and_no_worker(start, dropped, monkeypatch):
    rig, client = small(start, 1)
    client.subscribe(1, "s", consumer_id=1)
    opened = client.open_producer(1) | {"partition": 1}
    asked: list[int] = []

    def damaged(*_):
        asked.append(1)
        raise DataLoss("the index is gone")

    with monkeypatch.context() as patch:
        patch.setattr(passed, "lowest_position", damaged)
        publish(rig, client, opened, 0, 60)
    assert asked
    assert not dropped
    client.ack(0, 60)
    publish(rig, client, opened, 60, 20)
    assert dropped, "the next look goes on"
