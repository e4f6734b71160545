"""Policies on a worker: rates counted over a virtual minute, ages, sizes, numbers, live changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.admission.gate import Cause
from danube_fast.errors import ResourceExhausted
from danube_fast.net.protocol import Status
from tests.workers.shard_rig import FakeRequest, Rig, Shifted

SECOND = 1_000_000_000
THROTTLED = int(Status.THROTTLED)
EXHAUSTED = 8


class Ticking:
    """A clock of its own: 100 us go by with every look, and whatever a test adds; a slow machine makes no
    difference."""

    def __init__(self, clock: Any) -> None:
        self._monotonic_ns, self._wall_ns = clock.monotonic_ns(), clock.wall_ns()
        self.ahead_ns = 0

    def monotonic_ns(self) -> int:
        self.ahead_ns += 100_000
        return int(self._monotonic_ns + self.ahead_ns)

    def wall_ns(self) -> int:
        return int(self._wall_ns + self.ahead_ns)


@pytest.fixture
def timed(rigs: Callable[..., Rig]) -> Rig:
    """For what is counted over a virtual minute."""
    made = rigs(session_timeout_ms=3_600_000)
    made.worker.state.clock = made.boot.clock = Ticking(made.boot.clock)
    return made


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    made = rigs(session_timeout_ms=3_600_000)
    made.worker.state.clock = made.boot.clock = Shifted(made.boot.clock)
    return made


def later(rig: Rig, seconds: float) -> None:
    """Let the time go by, and let the worker see it. Raw clients do not beat, so they count as heard: how often a test
    comes here while it waits depends on the disk."""
    ahead_ns = int(seconds * SECOND)
    rig.worker.state.clock.ahead_ns += ahead_ns
    for session in rig.worker.state.sessions:
        session.last_seen_ns += ahead_ns
    for _ in range(3):
        rig.worker.do_work()


def assign(rig: Rig, partition_id: int = 1, durability: str = "os", **policy: Any) -> None:
    rig.assign(partition_id, durability=durability, policy=policy)


def stats(rig: Rig, partition_id: int = 1) -> dict[str, Any]:
    entries = rig.stats()
    return next(entry for entry in entries if entry["partition_id"] == partition_id)


def subscription(rig: Rig, name: str = "s") -> dict[str, Any]:
    return next(e for e in stats(rig)["subscriptions"] if e["subscription"] == name)


# ---------------------------------------------------------------- rates


@pytest.mark.parametrize(
    ("policy", "per_second"),
    [
        ({"publish_messages_per_second": 100}, 100),
        ({"publish_messages_per_second": 5000}, 5000),
        ({"publish_bytes_per_second": 100_000}, None),
    ],
)
def test_a_publish_rate_over_sixty_virtual_seconds(timed, policy, per_second):
    assign(timed, **policy)
    client = timed.client()
    opened = client.open_producer(1)
    draw = random.Random(1)
    clock, start = timed.worker.state.clock, timed.worker.state.clock.monotonic_ns()
    sequence = size = 0
    count = 10 if per_second != 5000 else 100
    while clock.monotonic_ns() - start < 60 * SECOND:
        frame = client.frame(opened, sequence, [b"x" * 100] * count)
        status, told = client.publish((1, frame))
        if status == THROTTLED:
            assert 0 < told < 2000, "milliseconds to wait"
            clock.ahead_ns += told * 1_000_000 + draw.randrange(50_000_000)
            continue
        assert (status, told) == (0, sequence)
        sequence += count
        size += len(frame)
    if per_second is None:
        assert size == pytest.approx(60 * 100_000, rel=0.02)
    else:
        assert sequence == pytest.approx(60 * per_second, rel=0.02)


def test_a_throttled_frame_is_sent_again_and_nothing_is_lost_or_doubled(rig):
    assign(rig, publish_messages_per_second=10)
    client = rig.client()
    opened = client.open_producer(1)
    frames = [client.frame(opened, i * 10, [b"%d" % n for n in range(10)]) for i in range(3)]
    first, *rest = [client.publish((1, frame))[0] for frame in frames]
    assert first == 0 and rest[0] == THROTTLED
    assert rest[1] == Status.OUT_OF_SEQUENCE
    later(rig, 1.1)
    assert client.publish((1, frames[0])) == [1, 0], "a resend costs nothing"
    assert client.publish((1, frames[1])) == [0, 10]
    later(rig, 1.1)
    assert client.publish((1, frames[2])) == [0, 20]
    client.subscribe(1)
    assert [offset for offset, _ in client.receive(30)] == list(range(30))


def test_two_partitions_of_a_topic_share_its_rate_and_other_topics_do_not(rig):
    for partition_id in (1, 2):
        rig.assign(
            partition_id, topic="/default/t", incarnation=7, durability="os",
            policy={"publish_messages_per_second": 10},
        )  # fmt: skip
    rig.assign(3, incarnation=8, durability="os", policy={"publish_messages_per_second": 10})
    client = rig.client()
    opened = {pid: client.open_producer(pid) for pid in (1, 2, 3)}

    def publish(partition_id: int, sequence: int) -> int:
        frame = client.frame(opened[partition_id], sequence, [b"x"] * 10)
        return client.publish((partition_id, frame))[0]

    assert publish(1, 0) == 0
    assert publish(2, 0) == 0, "the partition sees the debt when it is charged itself"
    assert publish(2, 10) == THROTTLED
    assert publish(3, 0) == 0
    later(rig, 1.1)
    assert publish(1, 10) == publish(2, 10) == THROTTLED, "two seconds' worth was taken"
    later(rig, 0.8)
    assert publish(1, 10) == 0


def test_a_throttled_partition_stays_throttled_when_another_refusal_ends_or_its_policy_changes(rig):
    assign(rig, publish_messages_per_second=1)
    client = rig.client()
    opened = client.open_producer(1)
    frame = client.frame(opened, 100, [b"x"])
    assert client.publish((1, client.frame(opened, 0, [b"x"] * 100)))[0] == 0
    assert client.publish((1, frame))[0] == THROTTLED
    state = rig.worker.state
    partition = state.partition(1)
    state.gate.set(partition, Cause.BACKLOG, "the backlog is full")
    assert client.publish((1, frame))[0] == ResourceExhausted.code
    state.gate.set(partition, Cause.BACKLOG, "")
    assert client.publish((1, frame))[0] == THROTTLED
    assign(rig, publish_messages_per_second=1, message_bytes_max=1000)
    assert client.publish((1, frame))[0] == THROTTLED
    later(rig, 100)
    assert client.publish((1, frame))[0] == 0


def test_a_rate_that_is_taken_back_holds_nobody_any_more(rig):
    assign(rig, publish_messages_per_second=1)
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"x"] * 1000)))[0] == 0
    assert client.publish((1, client.frame(opened, 1000, [b"x"])))[0] == THROTTLED
    assign(rig)
    assert client.publish((1, client.frame(opened, 1000, [b"x"])))[0] == 0


def test_a_rate_that_is_raised_takes_nobody_to_account_for_the_old_one(rig):
    """At one a second a thousand messages would be paid for in a quarter of an hour."""
    assign(rig, publish_messages_per_second=1)
    client = rig.client()
    opened = client.open_producer(1)
    assert client.publish((1, client.frame(opened, 0, [b"x"] * 1000)))[0] == 0
    assert client.publish((1, client.frame(opened, 1000, [b"x"])))[0] == THROTTLED
    assign(rig, publish_messages_per_second=1_000_000)
    for sequence in range(1000, 1010):
        assert client.publish((1, client.frame(opened, sequence, [b"x"])))[0] == 0


def test_a_dispatch_rate_that_is_raised_holds_nothing_back_for_the_old_one(rig):
    assign(rig, dispatch_bytes_per_second=1)
    client = rig.client()
    opened = client.open_producer(1)
    for sequence in range(3):
        assert client.publish((1, client.frame(opened, sequence, [b"x" * 1000])))[0] == 0
    client.subscribe(1)
    assert client.receive(1) == [(0, b"x" * 1000)]
    assign(rig, dispatch_bytes_per_second=1_000_000)
    later(rig, 0.5)
    assert [offset for offset, _ in client.receive(2)] == [1, 2]


def test_a_dispatch_rate_delays_and_never_drops(timed):
    assign(timed, dispatch_messages_per_second=100)
    client = timed.client()
    opened = client.open_producer(1)
    for i in range(100):
        client.publish((1, client.frame(opened, i * 10, [b"x"] * 10)))
    client.subscribe(1)
    got: list[int] = []
    start = timed.worker.state.clock.monotonic_ns()
    for _ in range(250):
        later(timed, 0.02)
        client.pump()
    client.ask(2)  # answered behind all that was sent before
    seconds = (timed.worker.state.clock.monotonic_ns() - start) / SECOND
    got += [int(o) for _, view in client.delivered for o in view.offsets()]
    client.delivered = []
    # when this process stands still, the time that goes by without a turn gives nothing beyond a burst
    assert 0.93 * 100 * 5 <= len(got) <= 1.07 * 100 * seconds
    assign(timed)
    got += [offset for offset, _ in client.receive(1000 - len(got))]
    assert got == list(range(1000))


# ---------------------------------------------------------------- sizes and numbers


def test_messages_above_the_topics_limit_are_refused_and_smaller_ones_are_not(rig):
    assign(rig, message_bytes_max=100)
    client = rig.client()
    opened = client.open_producer(1)
    big = client.frame(opened, 0, [b"x" * 50, b"y" * 101, b"z"])
    reply = client.ask(11, parts=(bytes(client_bundle(1, big)),))
    assert reply[1][0] == 3
    assert "at most 100 bytes" in reply[2][3]
    fine = client.frame(opened, 0, [b"x" * 100] * 50)
    assert client.publish((1, fine)) == [0, 0]
    assign(rig, message_bytes_max=10)
    assert client.publish((1, fine)) == [1, 0], "what was accepted stays so"
    packed = client.frame(opened, 50, [b"x" * 5000], codec=1)
    assert client.publish((1, packed))[0] == 3


def client_bundle(partition_id: int, frame: bytearray) -> bytes:
    from danube_fast.frame.bundle import sealed_bundle

    return sealed_bundle([(partition_id, frame)])


def test_producers_consumers_and_subscriptions_have_limits(rig):
    assign(
        rig, producers_max=1, consumers_max=3, subscriptions_max=2, consumers_per_subscription_max=2
    )
    one, two = rig.client(), rig.client()
    one.open_producer(1, "a")
    refused = two.ask(10, 1, "b")
    assert refused[0] == 66 and "producers_max 1" in refused[3]
    one.open_producer(1, "a")
    assert one.subscribe(1, "x", consumer_id=1, kind="shared")[0] == 67
    assert one.subscribe(1, "x", consumer_id=2, kind="shared")[0] == 67
    third = two.subscribe(1, "x", consumer_id=1, kind="shared")
    assert third[0] == 66 and "consumers_per_subscription_max 2" in third[3]
    assert two.subscribe(1, "y", consumer_id=2, kind="shared")[0] == 67
    assert "subscriptions_max 2" in two.subscribe(1, "z", consumer_id=3, kind="shared")[3]
    assert "consumers_max 3" in two.subscribe(1, "y", consumer_id=4, kind="shared")[3]


def test_who_is_gone_is_not_counted(rig):
    """Killed clients: their sessions live for an hour here, their connections do not."""
    assign(rig, producers_max=1, consumers_per_subscription_max=1)
    dead, two = rig.client(), rig.client()
    dead.open_producer(1, "a")
    dead.subscribe(1, "x", consumer_id=1, kind="shared")
    assert "producers_max 1" in two.ask(10, 1, "b")[3]
    assert "per_subscription_max 1" in two.subscribe(1, "x", consumer_id=7, kind="shared")[3]
    dead.socket.close(0)
    rig.turn(lambda: two.ask(10, 1, "b")[0] == 67, "a producer in the place of a dead one")
    subscribe = lambda: two.subscribe(1, "x", consumer_id=7, kind="shared")[0]  # noqa: E731
    rig.turn(lambda: subscribe() == 67, "a consumer in the place of a dead one")
    assert "producers_max 1" in rig.client().ask(10, 1, "c")[3], "who lives is counted"


# ---------------------------------------------------------------- ages


def test_a_time_to_live_over_sixty_virtual_seconds(timed):
    """100 messages a second for a minute, alive for ten seconds: the last thousand are left, less what the
    clock of a slow machine went on by itself meanwhile."""
    assign(timed, message_ttl_ms=10_000)
    client = timed.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    clock = timed.worker.state.clock
    published: list[tuple[int, int]] = []  # before and after each
    for i in range(600):
        before_ns = clock.wall_ns()
        client.publish((1, client.frame(opened, i * 10, [b"x"] * 10)))
        published.append((before_ns, clock.wall_ns()))
        clock.ahead_ns += SECOND // 10
    asked_ns = clock.wall_ns()
    client.send(21, 1, 1 << 30, 1 << 30)
    timed.turn(lambda: client.pump() or client.delivered, "a delivery")
    begun_ns = clock.wall_ns()
    alive = [10 * (begun_ns - before_ns < 10 * SECOND) for before_ns, _ in published]
    left = client.receive(sum(alive))
    perhaps = [10 * (asked_ns - after_ns <= 10 * SECOND) for _, after_ns in published]
    assert sum(alive) <= len(left) <= sum(perhaps) <= 1010
    assert left[-1][0] == 5999
    expired = subscription(timed)["expired"]
    assert expired + len(left) == 6000
    gaps = [event[3] for event in client.events if event[2] == "gap"]
    assert gaps and gaps[-1]["end"] == left[0][0]
    assert "message_ttl_ms" in gaps[-1]["reason"]


def test_what_is_acked_in_time_is_not_told_as_lost(rig):
    assign(rig, message_ttl_ms=1000)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    client.publish((1, client.frame(opened, 0, [b"x"] * 10)))
    client.receive(10)
    client.ack(0, 10)
    later(rig, 5)
    later(rig, 5)
    assert subscription(rig)["expired"] == 0
    assert not [event for event in client.events if event[2] == "gap"]


def test_until_expired_keeps_what_is_young_and_tells_what_is_gone(rig):
    assign(rig, retention_policy="until_expired", retention_seconds=10)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    client.publish((1, client.frame(opened, 0, [b"old"] * 5)))
    later(rig, 6)
    client.publish((1, client.frame(opened, 5, [b"young"] * 5)))
    client.ack(0, 0)
    assert stats(rig)["first_offset"] == 0
    later(rig, 6)
    rig.turn(lambda: stats(rig)["first_offset"] == 5, "the end of the retention")
    client.send(21, 1, 1 << 30, 1 << 30)
    assert [offset for offset, _ in client.receive(5)] == [5, 6, 7, 8, 9]
    (gap,) = [event[3] for event in client.events if event[2] == "gap"]
    assert (gap["start"], gap["end"], gap["lost"]) == (0, 5, True)


def test_retention_by_size_leaves_the_newest(rig):
    assign(rig, retention_policy="until_expired", retention_bytes=100_000)
    client = rig.client()
    opened = client.open_producer(1)
    for i in range(50):
        client.publish((1, client.frame(opened, i, [b"x" * 10_000])))
        later(rig, 0.2)
    rig.turn(lambda: stats(rig)["first_offset"] > 30, "the end of the retention")
    first = stats(rig)["first_offset"]
    assert 38 <= first <= 42
    client.subscribe(1, position="earliest")
    assert [offset for offset, _ in client.receive(50 - first)] == list(range(first, 50))


def test_an_expired_state_holds_after_a_restart(rigs):
    rig = rigs(session_timeout_ms=3_600_000)
    rig.worker.state.clock = rig.boot.clock = Shifted(rig.boot.clock)
    assign(rig, message_ttl_ms=1000)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    client.publish((1, client.frame(opened, 0, [b"x"] * 7)))
    later(rig, 3)
    rig.turn(lambda: subscription(rig)["expired"] == 7, "the end of their time")
    client.ack(0, 0)
    rig.crash()
    rig = rigs()
    client = rig.client()
    client.subscribe(1, credit=0)
    assert subscription(rig)["cursor"] == 7


# ---------------------------------------------------------------- sizes of what is kept


def test_a_full_backlog_refuses_until_it_is_consumed(rig):
    assign(rig, backlog_bytes_max=50_000)
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    sequence = 0
    while True:
        status, _ = client.publish((1, client.frame(opened, sequence, [b"x" * 5000])))
        later(rig, 0.15)
        if status == EXHAUSTED:
            break
        sequence += 1
        assert sequence < 50, "no refusal"
    assert 9 <= sequence <= 12
    assert "backlog_bytes_max 50000" in stats(rig)["refusal"]
    client.receive(sequence)
    client.ack(0, sequence)
    later(rig, 0.2)
    assert client.publish((1, client.frame(opened, sequence, [b"x"])))[0] == 0


def test_a_full_backlog_evicts_the_oldest_if_the_policy_says_so(rig):
    assign(rig, backlog_bytes_max=50_000, backlog_policy="evict")
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1, credit=0)
    for i in range(40):
        assert client.publish((1, client.frame(opened, i, [b"x" * 5000])))[0] == 0
        later(rig, 0.15)
    cursor = subscription(rig)["cursor"]
    assert 28 <= cursor <= 32
    client.send(21, 1, 1 << 30, 1 << 30)
    assert [offset for offset, _ in client.receive(40 - cursor)] == list(range(cursor, 40))
    assert subscription(rig)["expired"] == cursor


def test_a_storage_quota_is_reported_and_obeyed(rig):
    assign(rig, storage_bytes_max=50_000)
    client = rig.client()
    opened = client.open_producer(1)
    for i in range(10):
        client.publish((1, client.frame(opened, i, [b"x" * 5000])))
    later(rig, 2)
    later(rig, 2)
    assert rig.said(m.StorageUsed)[-1].used[1] == pytest.approx(52_000, rel=0.05)
    rig.mailbox.handlers[m.StorageFull](
        FakeRequest(m.StorageFull({1: "namespace default is full"}))
    )
    assert client.publish((1, client.frame(opened, 10, [b"x"])))[0] == EXHAUSTED
    rig.mailbox.handlers[m.StorageFull](FakeRequest(m.StorageFull({})))
    assert client.publish((1, client.frame(opened, 10, [b"x"])))[0] == 0


# ---------------------------------------------------------------- space, subscriptions


def test_space_comes_back_when_a_policy_says_so(rig):
    """24 hours are the broker's default; the topic's own retention frees its segments long before."""
    assign(rig, retention_policy="until_expired", retention_bytes=1_000_000)
    client = rig.client()
    opened = client.open_producer(1)
    log = rig.worker.state.logs[0]
    for i in range(40):
        client.publish((1, client.frame(opened, i, [b"x" * 500_000])))
        later(rig, 1.2)
        # a slow disk skips snapshots, and the last two are kept with all behind them
        rig.turn(lambda: not log.snapshot_due and not log._snapshots.is_saving, "a snapshot")
    rig.turn(lambda: log.segment_count <= 2, "the trimming of the log")
    assert log.oldest_position > 0
    client.subscribe(1)
    assert client.receive(1)[0][0] >= 37


def test_forever_is_kept_even_when_acked(rigs):
    rig = rigs(retention_seconds_min=1, session_timeout_ms=3_600_000)
    rig.worker.state.clock = rig.boot.clock = Shifted(rig.boot.clock)
    assign(rig, retention_policy="forever")
    client = rig.client()
    opened = client.open_producer(1)
    client.subscribe(1)
    for i in range(30):
        client.publish((1, client.frame(opened, i, [b"x" * 500_000])))
    client.receive(30)
    client.ack(0, 30)
    for _ in range(5):
        later(rig, 2)
    assert rig.worker.state.logs[0].oldest_position == 0
    client.subscribe(1, "again", consumer_id=2)
    assert client.receive(1)[0][0] == 0


def test_an_abandoned_subscription_is_deleted_and_one_in_use_is_not(rig):
    assign(rig, subscription_expiry_seconds=60)
    client = rig.client()
    client.subscribe(1, "gone", consumer_id=1)
    client.subscribe(1, "used", consumer_id=2)
    client.ask(25, 1)
    later(rig, 1)
    later(rig, 50)
    assert {entry["subscription"] for entry in stats(rig)["subscriptions"]} == {"gone", "used"}
    later(rig, 11)
    later(rig, 1)
    assert [entry["subscription"] for entry in stats(rig)["subscriptions"]] == ["used"]
