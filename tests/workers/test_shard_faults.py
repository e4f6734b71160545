"""A shard worker in bad luck: syncs that fail at the wrong moment, logs that refuse."""

from __future__ import annotations

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.records import SubscriptionCreated
from danube_fast.errors import ResourceExhausted
from tests.workers.shard_faults import (
    BIG,
    Asked,
    FullLog,
    HeldSyncs,
    in_flight,
    post_publish,
    settled,
)

# ---------------------------------------------------------------- failing syncs


def test_a_group_that_was_synced_before_the_failing_one_is_acked(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    disk = HeldSyncs(rig)
    first = post_publish(client, (1, client.frame(opened, 0, [b"a"])))
    rig.turn(in_flight(rig, 1), "the first group")
    second = post_publish(client, (1, client.frame(opened, 1, [bytes(BIG)])))
    rig.turn(in_flight(rig, 2), "the second group")
    disk.release_first()
    disk.fail()
    assert client.answer(first)[1] == [0, 0]
    assert client.answer(second)[1] == [13, 0]
    assert client.publish((1, client.frame(opened, 1, [b"b"]))) == [0, 1]
    client.subscribe(1)
    assert client.receive(2) == [(0, b"a"), (1, b"b")]


def test_a_duplicate_of_what_was_taken_back_is_not_acked(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    disk = HeldSyncs(rig)
    frame = client.frame(opened, 0, [b"a"])
    first = post_publish(client, (1, frame))
    rig.turn(in_flight(rig, 1), "the group")
    second = post_publish(client, (1, frame))
    rig.turn(lambda: rig.worker.intake.duplicates, "the duplicate")
    disk.fail()
    assert client.answer(first)[1] == [13, 0]
    assert client.answer(second)[1] == [14, 0], "asked again"
    assert client.publish((1, frame)) == [0, 0]


def test_a_duplicate_of_what_is_durable_does_not_say_that_it_is_not_stored(rigs):
    """It waits for the group that cannot be written, though its original was in one before."""
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    frame = client.frame(opened, 0, [b"a"])
    assert client.publish((1, frame)) == [0, 0]
    log = rig.worker.state.logs[0]
    log.append = FullLog._refuse  # type: ignore[method-assign,assignment]
    log.lend = lambda: None  # type: ignore[method-assign]
    assert client.publish((1, client.frame(opened, 1, [b"b"])), (1, frame)) == [8, 0, 14, 0]
    del log.append, log.lend
    assert client.publish((1, frame)) == [1, 0]


def test_a_failing_sync_of_one_log_leaves_the_other_alone(rigs):
    rig = rigs(log_count=2)
    rig.assign(1, log_id=0)
    rig.assign(2, log_id=1)
    client = rig.client()
    one, two = client.open_producer(1), client.open_producer(2)
    broken, slow = HeldSyncs(rig, 0), HeldSyncs(rig, 1)
    both = post_publish(
        client, (1, client.frame(one, 0, [b"a"])), (2, client.frame(two, 0, [b"b"]))
    )
    rig.turn(in_flight(rig, 1, 0), "the groups")
    more = post_publish(client, (2, client.frame(two, 1, [b"c"])))
    rig.turn(lambda: rig.worker.state.journals[1].has_open_group, "an open group")
    broken.fail()
    rig.turn(lambda: rig.worker.state.logs[0].sync_fault is None, "the repair")
    slow.release()
    assert client.answer(both)[1] == [13, 0, 0, 0]
    assert client.answer(more)[1] == [0, 1]
    run = rig.worker.state.logs[1].find(2, 1)
    assert run is not None and (run.partition_id, run.base_offset) == (2, 1)


def test_a_snapshot_that_knew_too_much_is_not_saved(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"a"]))) == [0, 0]
    disk = HeldSyncs(rig)
    request = post_publish(client, (1, client.frame(opened, 1, [bytes(5000)] * 10)))
    rig.turn(in_flight(rig, 1), "the group")
    rig.worker.state.logs[0]._snapshot_rolls = -1
    rig.turn(lambda: rig.worker.state.journals[0].snapshot, "a snapshot in the making")
    disk.fail()
    assert client.answer(request)[1] == [13, 0]
    assert client.publish((1, client.frame(opened, 1, [b"c"]))) == [0, 1]
    rig.turn(lambda: rig.worker.state.journals[0].snapshot is None, "the snapshot's end")
    rig.turn(lambda: not rig.worker.state.logs[0]._snapshots.is_saving, "the snapshot's saving")
    rig.crash()
    rig = rigs()
    client = rig.client()
    assert client.open_producer(1)["next_sequence"] == 2
    client.subscribe(1)
    assert client.receive(2) == [(0, b"a"), (1, b"c")]


def test_records_keep_their_order_over_a_failing_sync(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    disk = HeldSyncs(rig)
    created = client.post(20, 1, 1, 1, "s", "shared", "earliest")
    rig.turn(in_flight(rig, 1), "the subscription's record")
    rig.worker.operations._delete_subscription(
        Asked(m.DeleteSubscription([1], "s"))  # type: ignore[arg-type]
    )
    disk.fail()
    assert client.answer(created)[0] == 66
    rig.operation(m.DeleteSubscription([1], "other"))
    rig.turn(lambda: not rig.worker.state.journals[0].busy, "everything written")
    rig.crash()
    rig = rigs()
    assert rig.worker.state.catalog.by_id[1].subscriptions == {}


# ---------------------------------------------------------------- answers before their time


def test_acks_are_durable_only_when_their_own_group_is(rigs):
    rig = rigs()
    rig.assign(1)
    rig.assign(2, durability="os")
    client = rig.client()
    strict, loose = client.open_producer(1), client.open_producer(2)
    client.publish((1, client.frame(strict, 0, [b"a"])))
    client.subscribe(1)
    client.receive(1)
    disk = HeldSyncs(rig)
    first = client.post(22, [[1, [0, 1]]])
    rig.turn(in_flight(rig, 1), "the cursor's record")
    assert client.publish((2, client.frame(loose, 0, [b"os"]))) == [0, 0]
    second = client.post(22, [[1, [0, 1]]])
    for _ in range(50):
        rig.worker.do_work()
        client.pump()
    assert [reply for reply in client.waiting if reply[0] != 68] == []
    disk.release()
    assert client.answer(first)[0] == client.answer(second)[0] == 67


def with_a_quiet_sync(rig):
    """A client whose ack is on its way to the disk, its producer, and the disk."""
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    client.publish((1, client.frame(opened, 0, [b"a"])))
    client.subscribe(1)
    client.receive(1)
    disk = HeldSyncs(rig)
    client.send(22, 0, [[1, [0, 1]]])
    rig.turn(in_flight(rig, 1), "the cursor's record")
    assert disk.quiet == [True]
    return client, opened, disk


def test_a_cursor_wakes_nobody_when_it_is_durable_unless_that_is_asked_for(rigs):
    rig = rigs()
    client, _, disk = with_a_quiet_sync(rig)
    assert not rig.worker.state.journals[0].syncing, (
        "frames would wait for an end that wakes no one"
    )
    asked = client.post(22, [[1, [0, 1]]])
    rig.turn(lambda: len(disk.quiet) > 1, "a sync whose end wakes the worker")
    assert set(disk.quiet[1:]) == {False}
    disk.release()
    assert client.answer(asked)[0] == 67


def test_many_that_wait_for_a_quiet_sync_queue_one_more(rigs):
    rig = rigs()
    _, _, disk = with_a_quiet_sync(rig)
    told = []
    for _ in range(5):
        rig.worker.state.journals[0].when_durable(told.append)
    assert disk.quiet == [True, False]
    disk.release()
    rig.turn(lambda: told == [None] * 5, "word that it is durable")


def test_a_frame_behind_a_quiet_sync_does_not_wait_for_its_end(rigs):
    rig = rigs()
    client, opened, disk = with_a_quiet_sync(rig)
    published = post_publish(client, (1, client.frame(opened, 1, [b"b"])))
    rig.turn(in_flight(rig, 2), "the frame behind it")
    assert disk.quiet == [True, False]
    disk.release()
    assert client.answer(published)[1] == [0, 1]


# ---------------------------------------------------------------- a log that refuses


def test_an_assignment_that_found_no_room_is_recorded_when_there_is(rigs):
    rig = rigs()
    disk = FullLog(rig)
    with pytest.raises(ResourceExhausted):
        rig.assign(1)
    with pytest.raises(ResourceExhausted):
        rig.assign(1)
    disk.mend()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"a"]))) == [0, 0]
    rig.crash()
    rig = rigs()
    client = rig.client()
    assert client.open_producer(1)["next_sequence"] == 1


def test_a_cursor_that_found_no_room_is_recorded_when_there_is(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    client.publish((1, client.frame(opened, 0, [b"a", b"b"])))
    client.subscribe(1)
    client.receive(2)
    disk = FullLog(rig)
    assert client.ask(22, [[1, [0, 1]]])[:3:2] == [66, 8]
    assert client.ask(22, [[1, [1, 2]]])[:3:2] == [66, 8]
    disk.mend()
    rig.turn(lambda: rig.worker.state.journals[0].stuck is None, "the disk's recovery")
    assert client.ask(22, [])[0] == 67
    rig.crash()
    rig = rigs()
    assert rig.worker.state.catalog.by_id[1].subscriptions["s"].cursor == 2


def test_records_of_a_group_that_was_not_written_are_written_with_the_next(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    rig.worker.state.journals[0].reserve(10_000)
    log = rig.worker.state.logs[0]
    log.append = FullLog._refuse  # type: ignore[method-assign,assignment]
    post = client.post(20, 1, 1, 1, "s", "shared", "earliest")
    request = post_publish(client, (1, client.frame(opened, 0, [b"a"])))
    assert client.answer(request)[1] == [8, 0]
    assert client.answer(post)[0] == 66
    del log.append
    settled(rig)
    assert client.publish((1, client.frame(opened, 0, [b"a"]))) == [0, 0]
    rig.crash()
    rig = rigs()
    assert list(rig.worker.state.catalog.by_id[1].subscriptions) == ["s"]


def test_a_consumer_whose_subscription_was_not_recorded_is_not_there(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    disk = FullLog(rig)
    assert client.subscribe(1, "s", consumer_id=1)[:3:2] == [66, 8]
    assert client.subscribe(1, "s", consumer_id=2)[:3:2] == [66, 8]
    disk.mend()
    assert client.subscribe(1, "s", consumer_id=3)[0] == 67
    assert rig.worker.state.sessions.by_number(client.session).consumers.keys() == {3}


def test_who_attaches_to_a_new_subscription_waits_for_its_record_too(rigs):
    rig = rigs()
    rig.assign(1)
    one, two = rig.client(), rig.client()
    disk = HeldSyncs(rig)
    first = one.post(20, 1, 1, 1, "s", "shared", "earliest")
    rig.turn(in_flight(rig, 1), "the record")
    second = two.post(20, 1, 1, 1, "s", "shared", "earliest")
    for _ in range(50):
        rig.worker.do_work()
        two.pump()
    assert two.waiting == []
    disk.release()
    assert one.answer(first)[0] == two.answer(second)[0] == 67


def test_more_records_than_a_group_holds(rigs):
    rig = rigs(segment_bytes=256 * 1024)
    names = ["n" * 200 + str(i) for i in range(3000)]
    rig.assign(1)
    partition = rig.worker.state.catalog.by_id[1]
    for name in names:
        record = SubscriptionCreated(1, name, "shared", 0)
        rig.worker.state.catalog.apply(record, 0)
        rig.worker.state.journals[0].record(record)
    assert len(partition.subscriptions) == 3000
    settled(rig)
    rig.crash()
    rig = rigs(segment_bytes=256 * 1024)
    assert len(rig.worker.state.catalog.by_id[1].subscriptions) == 3000
