"""A shard worker and odd requests: readers far behind, hard clients, changes and restarts."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.admission.layout import ProducerWord
from danube_fast.broker.records import SubscriptionCreated
from danube_fast.broker.subscription.consumer import CREDIT_MAX
from danube_fast.clock import NEVER_NS
from danube_fast.config import Settings
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.net.server import WouldBlock
from danube_fast.net.session import Session
from danube_fast.ring.counters import (
    HISTOGRAM_BUCKETS,
    HISTOGRAM_WORDS,
    Counter,
    Histogram,
)
from danube_fast.workers.reports.quota import SAY_AGAIN_NS
from danube_fast.workers.shard import worker as shard
from danube_fast.workers.shard.deliver import dispatcher
from danube_fast.workers.shard.deliver.delivery import OUTBOX_MESSAGES_MAX, Delivery
from danube_fast.workers.shard.publish.intake import ACK_WAIT_NS_MAX, STILL_NS
from tests.workers.shard_faults import (
    Asked,
    HeldSyncs,
    fill,
    in_flight,
    post_publish,
    settled,
    wait,
)

# ---------------------------------------------------------------- reads behind the tail


def test_a_damaged_segment_stops_its_readers_and_nobody_else(rigs):
    rig = rigs(tail_bytes_max=0)
    rig.assign(1)
    rig.assign(2)
    client = rig.client()
    fill(client, 1, 3)
    fill(client, 2, 3)
    log = rig.worker.state.logs[0]
    run = log.find(1, 1)
    assert run is not None
    segment = log._chain[log._chain.index_of(run.position)]
    with open(segment.path, "r+b") as file:
        file.seek(segment.file_offset(run.position) + 200)
        file.write(b"damage")
    client.subscribe(1, consumer_id=1)
    rig.turn(lambda: client.pump() or client.events, "word of the damage")
    assert client.events[0][1:3] == [1, "closed"]
    assert client.events[0][3]["code"] == 15 and "damaged" in client.events[0][3]["text"]
    client.delivered.clear()
    client.subscribe(2, consumer_id=2)
    assert [offset for offset, _ in client.receive(3)] == [0, 1, 2]


def test_who_reads_far_back_lets_others_live(rigs, monkeypatch):
    monkeypatch.setattr(dispatcher, "READ_BYTES_PER_TURN", 1024 * 1024)
    rig = rigs(tail_bytes_max=0)
    rig.assign(1)
    rig.assign(2)
    client = rig.client()
    fill(client, 1, 80)
    fill(client, 2, 1)
    client.subscribe(1, consumer_id=1, credit=0)
    client.subscribe(1, "other", consumer_id=2, credit=0)
    client.subscribe(2, consumer_id=3, credit=0)
    client.send(21, 1, 1 << 30, 1 << 30)
    read: list[int] = []
    before = rig.worker.reader.bytes_read

    def got_short_one() -> bool:
        rig.worker.do_work()
        read.append(rig.worker.reader.bytes_read - before - sum(read))
        client.pump()
        return any(consumer_id == 3 for consumer_id, _ in client.delivered)

    rig.turn(got_short_one, "the short backlog")
    assert max(read) < 3 * 1024 * 1024
    assert sum(1 for consumer_id, _ in client.delivered if consumer_id == 1) < 80
    client.receive(161)


def test_what_a_lagging_consumer_of_a_lossy_topic_missed_is_counted(rigs):
    rig = rigs(tail_bytes_max=250_000)
    rig.assign(1, dispatch="non_reliable")
    client = rig.client()
    client.subscribe(1, credit=0)
    fill(client, 1, 10)
    client.send(21, 1, 1 << 20, 1000)
    assert [offset for offset, _ in client.receive(2)] == [8, 9]
    stats = rig.stats()[0]["subscriptions"][0]
    assert stats["lost"] == 8
    assert client.events[0][2] == "gap" and client.events[0][3]["end"] == 8


# ---------------------------------------------------------------- hard clients


def test_as_many_frames_as_a_bundle_holds(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    at = 0
    requests = []
    for count in (4000, 4000, 4000, 9000):
        frames = [(1, client.frame(opened, at + i, [b""])) for i in range(count)]
        at += count
        requests.append(post_publish(client, *frames))
    base = 0
    for request in requests:
        statuses = client.answer(request)[1]
        assert set(statuses[::2]) == {0}
        assert statuses[1::2] == list(range(base, base + len(statuses) // 2))
        base += len(statuses) // 2
    assert base == at
    client.subscribe(1)
    assert len(client.receive(at)) == at


def test_credit_has_a_bound_and_is_used_to_the_end(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    client.subscribe(1, credit=0)
    for _ in range(3):
        client.send(21, 1, (1 << 64) - 1, (1 << 64) - 1)
    client.ask(2)
    flow = rig.worker.state.sessions.by_number(client.session).flows[1]
    assert flow.byte_credit == flow.message_credit == CREDIT_MAX
    client.send(21, 2, -5, -5)
    client.ask(2)


def test_small_grants_keep_a_consumer_going(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    client.subscribe(1, credit=0)
    fill(client, 1, 20, size=1000)
    for i in range(20):
        client.send(21, 1, 100_000 if i == 0 else 1000, 1)
        assert client.receive(1)[0][0] == i


class DeafServer:
    """No peer ever takes anything."""

    def send(self, identity: bytes, parts: list[bytes]) -> None:
        raise WouldBlock

    def end_session(self, identity: bytes) -> None:
        pass


def test_a_session_that_takes_nothing_is_given_up():
    delivery = Delivery(DeafServer(), None, Settings())  # type: ignore[arg-type]
    session = Session(1, b"", b"", "deaf", "")
    for _ in range(OUTBOX_MESSAGES_MAX + 10):
        delivery.send(session, [b"x"])
    assert delivery.gone == [session]
    session.closed = True
    delivery.forget(session)
    delivery.send(session, [b"x"])
    assert session.outbox == [] and not delivery.waiting


# ---------------------------------------------------------------- memory topics, refusals


def test_a_deleted_memory_topic_stays_deleted(rigs):
    rig = rigs(memory_topic_bytes_max=64 * 1024)
    rig.assign(1, durability="memory")
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    partition = rig.worker.state.catalog.by_id[1]
    assert client.publish((1, client.frame(opened, 0, [bytes(100_000)]))) == [0, 0]
    rig.turn(lambda: partition.refusal, "the refusal")
    assert client.publish((1, client.frame(opened, 1, [b"x"]))) == [8, 0]
    rig.operation(m.Unassign([1]))
    rig.worker.touched._next_ns = 0
    rig.worker.do_work()
    assert client.publish((1, client.frame(opened, 1, [b"x"]))) == [35, 0]


def test_a_memory_topic_keeps_its_messages_not_their_bundles(rigs):
    rig = rigs()
    rig.assign(1, durability="memory")
    rig.assign(2)
    client = rig.client()
    one, two = client.open_producer(1), client.open_producer(2)
    client.subscribe(1, credit=0)
    client.publish(
        (1, client.frame(one, 0, [b"small"])), (2, client.frame(two, 0, [bytes(1 << 20)]))
    )
    oldest = rig.worker.state.catalog.by_id[1].oldest_in_tail()
    assert oldest is not None and len(oldest.holder) < 1000  # type: ignore[arg-type]
    client.send(21, 1, 1 << 20, 1000)
    assert client.receive(1) == [(0, b"small")]


def test_a_hello_that_nests_deeply(rigs):
    rig = rigs()
    client = rig.client()
    for depth in range(850, 1000, 3):
        auth = b"\x81\xa9principal" + b"\x91" * depth + b"\x90"
        client.socket.send(b"\x95\x01\x01\x01\xa3raw" + auth)
    client.rig.turn(lambda: client.pump() or len(client.waiting) >= 50, "answers")


def test_who_was_refused_is_told_why_and_nobody_else(rigs):
    rig = rigs()
    rig.assign(1)
    client, other = rig.client(), rig.client()
    opened, theirs = client.open_producer(1, "p"), other.open_producer(1, "q")
    disk = HeldSyncs(rig)
    bundle = sealed_bundle(
        [(1, client.frame(opened, 0, [b"a"])), (1, client.frame(opened, 5, [b"too early"]))]
    )
    mixed = client.post(11, parts=(bytes(bundle),))
    rig.turn(in_flight(rig, 1), "the group")
    late = post_publish(other, (1, other.frame(theirs, 7, [b"b"])))
    answer = other.answer(late)
    assert answer[1] == [32, 0] and 32 in answer[2]
    disk.release()
    answer = client.answer(mixed)
    assert answer[1] == [0, 0, 32, 0] and 32 in answer[2]
    fine = client.publish((1, client.frame(opened, 1, [b"c"])))
    assert fine[0] == 0


# ---------------------------------------------------------------- stalls, restarts, leftovers


def test_a_worker_that_stood_still_does_not_take_its_clients_for_dead(rigs, monkeypatch):
    rig = rigs(session_timeout_ms=1000)
    rig.assign(1)
    clients = [rig.client() for _ in range(3)]
    for number, client in enumerate(clients):
        assert client.subscribe(1, f"s{number}")[0] == 67
    monkeypatch.setattr(shard, "MESSAGES_PER_TURN_MAX", 1)
    later = [rig.worker.state.clock.monotonic_ns() + 3_000_000_000]
    for client in clients:
        client.post(2)
    wait(lambda: rig.worker.server.socket.poll(0), "the pings")
    time.sleep(0.05)  # all three are there, as after a pause of the whole process
    monkeypatch.setattr(
        rig.worker.state, "clock",
        SimpleNamespace(monotonic_ns=lambda: later[0], wall_ns=rig.worker.state.clock.wall_ns),
    )  # fmt: skip
    for _ in range(10):
        later[0] += 300_000_000
        rig.worker.do_work()
        if rig.worker.server.drained:
            break
    assert len(rig.worker.state.sessions) == 3
    later[0] += 3_000_000_000
    rig.worker.do_work()
    assert len(rig.worker.state.sessions) == 0


def test_a_snapshot_that_is_ahead_of_its_records(rigs):
    rig = rigs()
    rig.assign(1)
    settled(rig)
    disk = HeldSyncs(rig)
    client = rig.client()
    post = client.post(10, 1, "p")
    rig.turn(in_flight(rig, 1), "a record under way")
    client.post(20, 1, 1, 1, "s", "exclusive", "earliest")
    rig.turn(lambda: rig.worker.state.catalog.by_id[1].subscriptions, "the subscription")
    rig.worker.operations._delete_subscription(
        Asked(m.DeleteSubscription([1], "s"))  # type: ignore[arg-type]
    )
    client.post(20, 2, 1, 1, "s", "shared", "earliest")
    rig.turn(lambda: rig.worker.state.catalog.by_id[1].subscriptions, "the subscription again")
    log = rig.worker.state.logs[0]
    log._snapshot_rolls = -1
    rig.turn(lambda: rig.worker.state.journals[0].snapshot, "a snapshot in the making")
    disk.release()
    assert client.answer(post)[0] == 67
    settled(rig)
    rig.turn(lambda: log.snapshot_position, "a snapshot")
    rig.crash()
    rig = rigs()
    (sub,) = rig.worker.state.catalog.by_id[1].subscriptions.values()
    assert sub.kind == "shared"


def test_nothing_of_a_removed_partition_is_kept(rigs):
    rig = rigs()
    client = rig.client()
    for partition_id in range(1, 30):
        rig.assign(partition_id)
        fill(client, partition_id, 1, size=10)
        client.subscribe(partition_id, consumer_id=partition_id)
        rig.operation(m.Unassign([partition_id]))
    worker = rig.worker
    left = list(worker.state.catalog.by_slot.values())
    assert not any(part.subscriptions or part.producer_names or part.tail_count for part in left)
    live = worker.state.tables.producers[
        : worker.state.tables.producer_count, ProducerWord.PARTITION_ID
    ]
    assert not live.any()
    assert worker.tails.byte_count == 0
    opened = {"producer_id": 1, "producer_epoch": 1}
    assert client.publish((7, client.frame(opened, 0, [b"x"]))) == [35, 0]


def test_one_log_that_cannot_end_in_order_does_not_keep_the_others_from_it(rigs):
    rig = rigs(log_count=2)
    rig.assign(1, log_id=0)
    rig.assign(2, log_id=1, durability="memory")
    client = rig.client()
    fill(client, 1, 1, size=10)
    fill(client, 2, 3, size=10)
    disk = HeldSyncs(rig)
    rig.worker.state.journals[0].record(SubscriptionCreated(1, "s", "shared", 0))
    rig.turn(in_flight(rig, 1), "a group")
    disk.fail()
    rig.stop()
    rig = rigs(log_count=2)
    assert rig.worker.state.catalog.by_id[1].visible == 1
    assert rig.worker.state.catalog.by_id[2].visible == 3


def test_a_seek_is_answered_before_what_follows_it_and_an_ack_tells_when_it_is_durable(rigs):
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    fill(client, 1, 3, size=10)
    client.subscribe(1)
    client.receive(3)
    client.ack(0, 3)
    disk = HeldSyncs(rig)
    assert client.ask(24, 1, 1)[2] == {"next_offset": 1, "end_offset": 3}
    assert [offset for offset, _ in client.receive(2)] == [1, 2]
    request = client.post(22, [])
    for _ in range(50):
        rig.worker.do_work()
        client.pump()
    assert [reply for reply in client.waiting if reply[0] == 67] == []
    disk.release()
    assert client.answer(request)[2] is None
    rig.crash()
    rig = rigs()
    assert rig.worker.state.catalog.by_id[1].subscriptions["s"].cursor == 1


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_what_a_restart_lost_is_told_and_counted_as_far_as_it_is_known(rigs, end):
    rig = rigs()
    rig.assign(1, durability="memory")
    client = rig.client()
    client.subscribe(1, credit=0)
    fill(client, 1, 5, size=10)
    getattr(rig, end)()
    rig = rigs()
    client = rig.client()
    client.subscribe(1)
    rig.turn(lambda: client.pump() or client.events, "word of the gap")
    assert client.events[0][2] == "gap" and client.events[0][3]["end"] >= 5
    stats = rig.stats()[0]["subscriptions"][0]
    assert stats["lost"] == (5 if end == "stop" else 0)


def test_who_is_close_behind_holds_up_a_non_reliable_producer_a_little(rigs):
    """8 MiB behind and moving: acks wait, for a while. Who stands still holds up nobody."""
    rig = rigs()
    rig.assign(1, dispatch="non_reliable")
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=100_000)
    now = SimpleNamespace(ns=rig.worker.state.now_ns)
    rig.worker.state.clock = SimpleNamespace(monotonic_ns=lambda: now.ns, wall_ns=time.time_ns)
    requests: list[int] = []

    def is_acked(size: int = 200_000) -> bool:
        """Whether one more message is acked within the same instant."""
        before = rig.worker.intake.messages_in
        frame = client.frame(opened, len(requests), [bytes(size)])
        requests.append(post_publish(client, (1, frame)))
        rig.turn(lambda: rig.worker.intake.messages_in > before, "admission")
        return len(rig.worker.intake.put_off) == 0

    while is_acked():
        assert len(requests) < 50, "no ack ever waited"
    assert len(requests) > 40, "it waited too soon"
    now.ns += ACK_WAIT_NS_MAX
    client.answer(requests[-1])
    assert is_acked(1000), "who publishes little waits for nobody"
    now.ns += STILL_NS
    assert is_acked(), "a consumer that stands still"
    client.send(21, 1, 200_000, 100_000)
    client.receive(2)
    assert not is_acked(), "it moves again, and is as far behind"
    now.ns += ACK_WAIT_NS_MAX
    client.answer(requests[-1])
    rig.worker.intake.lag_bytes_hopeless = 8 * 1024 * 1024
    assert is_acked(), "one that loses messages anyway"
    rig.worker.intake.lag_bytes_hopeless = 1 << 30
    assert not is_acked()
    client.send(21, 1, 1 << 30, 1 << 30)
    client.answer(requests[-1])
    assert now.ns == rig.worker.state.now_ns
    client.receive(len(requests) - 2)


def test_every_counter_is_kept(rigs):
    rig = rigs()
    rig.assign(1)
    rig.assign(2, dispatch="non_reliable")
    told: dict[int, int] = {}
    rig.boot.counters.set = told.__setitem__
    client = rig.client()
    opened, other = client.open_producer(1), client.open_producer(2)
    client.subscribe(2, credit=0)
    assert client.publish((1, client.frame(opened, 0, [b"a", b"b"]))) == [0, 0]
    assert client.publish((1, client.frame(opened, 0, [b"a", b"b"]))) == [1, 0]
    assert client.publish((1, client.frame(opened, 5, [b"out of turn"])))[0] > 1
    for sequence in range(3):
        assert client.publish((2, client.frame(other, sequence, [b"c"])))[0] == 0
    partition = rig.worker.state.catalog.by_id[2]
    while partition.tail_count:
        partition.evict()
    client.send(21, 1, 1 << 20, 1 << 20)
    rig.turn(lambda: told.get(Counter.LOST_NON_RELIABLE) and told.get(Counter.PRODUCERS), "counts")
    settled(rig)
    told.clear()
    others = {each for each in Counter if each.name.startswith("HISTORY_")}  # of the uploader
    others |= {Counter.SCRAPES, Counter.FIRST_KEYS}  # of the coordinator
    kept = set(Counter) - others
    rig.turn(lambda: kept <= told.keys(), f"a value for each of {kept}")
    wanted = {
        "MESSAGES_IN": 5, "FRAMES_IN": 4, "ACKS_OUT": 5, "DUPLICATES": 1, "REFUSED": 1,
        "PRODUCERS": 2, "CONSUMERS": 1, "SESSIONS": 1, "PARTITIONS": 2,
    }  # fmt: skip
    assert {name: told[Counter[name]] for name in wanted} == wanted
    assert told[Counter.LOST_NON_RELIABLE] == 3
    for histogram in Histogram:
        words = [told.get(histogram + place, 0) for place in range(HISTOGRAM_WORDS)]
        assert sum(words[:HISTOGRAM_BUCKETS]) > 0 and words[HISTOGRAM_BUCKETS] > 0, words
    assert 0 < told[Counter.SYNC_BYTES] <= told[Counter.LOG_POSITION]
    client.ask(12, 1, opened["producer_id"])
    rig.turn(lambda: told[Counter.PRODUCERS] == 1, "one producer less")


def test_a_worker_that_owes_nothing_rests(rigs):
    """It sleeps longer, and says what its logs take only when that is news."""
    rig = rigs()
    rig.assign(1)
    client = rig.client()
    opened = client.open_producer(1)
    checks, quota = rig.worker.session_checks, rig.worker.quota
    rig.turn(lambda: checks.rest_ns == NEVER_NS and quota._said_ns, "rest")

    def said() -> int:
        return len(rig.said(m.LogUsage))

    logs = list(rig.worker.state.logs.values())
    used = sum(log.bytes_on_disk for log in logs)
    at_ns = quota._said_ns + SAY_AGAIN_NS
    quota.report(used, logs, at_ns)
    before = said()
    quota.report(used, logs, at_ns + SAY_AGAIN_NS - 1)
    assert said() == before
    quota.report(used, logs, at_ns + SAY_AGAIN_NS)
    assert said() == before + 1
    assert client.publish((1, client.frame(opened, 0, [b"a"]))) == [0, 0]
    quota.report(used, logs, quota._said_ns + 1)
    assert said() >= before + 2
    client.subscribe(1)
    rig.turn(lambda: checks.rest_ns < NEVER_NS, "the end of the rest")
