"""Quotas of namespaces: words that workers share, what one worker makes of them, what the coordinator adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.topics.quota import NamespaceQuota
from danube_fast.errors import ResourceExhausted
from danube_fast.net.protocol import Status
from danube_fast.ring.buckets import Bucket
from danube_fast.ring.namespace_words import NamespaceWords
from danube_fast.roles import COORDINATOR
from tests.workers.shard_rig import FakeRequest, RawClient, Rig, Shifted

SECOND = 1_000_000_000
THROTTLED, OK = int(Status.THROTTLED), 0
EXHAUSTED = ResourceExhausted.code
ME, OTHER = 1, 2


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    made = rigs(session_timeout_ms=3_600_000, worker_count=2)
    made.worker.state.clock = made.boot.clock = Shifted(made.boot.clock)
    return made


def words_of(rig: Rig, namespace: str) -> NamespaceWords:
    return NamespaceWords(rig.buckets, rig.boot.control, [ME, OTHER], namespace)


def shared(rig: Rig) -> NamespaceWords:
    return words_of(rig, "default")


def later(rig: Rig, seconds: float) -> None:
    ahead_ns = int(seconds * SECOND)
    rig.worker.state.clock.ahead_ns += ahead_ns
    for session in rig.worker.state.sessions:
        session.last_seen_ns += ahead_ns
    for _ in range(3):
        rig.worker.do_work()


def assign(rig: Rig, *partition_ids: int, durability: str = "os", **quota: Any) -> None:
    for number in partition_ids:
        rig.assign(number, durability=durability, incarnation=number, quota=quota)


class Lane:
    """A producer of a raw client on one partition."""

    def __init__(self, client: RawClient, partition_id: int, name: str = "p") -> None:
        self._client, self._partition_id = client, partition_id
        self._opened = client.open_producer(partition_id, name)
        self._sequence = 0

    def publish(self, count: int = 1, payload: bytes = b"x") -> tuple[int, int]:
        """Publish a frame, again the next time if it is refused: its status, and its bytes."""
        frame = self._client.frame(self._opened, self._sequence, [payload] * count)
        status, _ = self._client.publish((self._partition_id, frame))
        self._sequence += count if status == OK else 0
        return status, len(frame)


# ---------------------------------------------------------------- rates


@pytest.mark.parametrize("durability", ["os", "memory"])
def test_topics_of_a_namespace_draw_on_one_rate_and_others_do_not(
    rig: Rig, durability: str
) -> None:
    assign(rig, 1, 2, durability=durability, namespace_publish_messages_per_second=100)
    rig.assign(3, topic="/other/t", durability=durability, incarnation=3)
    client = rig.client()
    one, two, other = (Lane(client, number) for number in (1, 2, 3))
    assert one.publish(100)[0] == OK
    assert two.publish(1)[0] == THROTTLED, "of another topic, which was not charged itself"
    assert one.publish(1)[0] == THROTTLED
    assert other.publish(100)[0] == OK
    later(rig, 1.0)
    assert two.publish(1)[0] == OK


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, {}),
        ({"namespace_publish_bytes_per_second": 1_000_000}, {"frame_bytes_max": 20_000}),
        ({"namespace_publish_bytes_per_second": 1000}, {"frame_bytes_max": 4096}),
        ({"namespace_publish_messages_per_second": 5}, {"frame_messages_max": 1}),
        ({"namespace_publish_messages_per_second": 1000}, {"frame_messages_max": 20}),
    ],
)
def test_a_producer_hears_how_small_frames_keep_the_rate(
    rig: Rig, limits: dict[str, int], expected: dict[str, int]
) -> None:
    assign(rig, 1, **limits)
    opened = rig.client().open_producer(1)
    assert {name: opened[name] for name in opened if name.startswith("frame_")} == expected


def test_what_another_worker_took_counts_at_once(rig: Rig) -> None:
    assign(rig, 1, namespace_publish_bytes_per_second=1000)
    lane = Lane(rig.client(), 1)
    assert lane.publish()[0] == OK
    now_ns = rig.worker.state.clock.monotonic_ns()
    Bucket(shared(rig).publish_row, 0, 1000).take(now_ns, 1, 100_000)
    assert lane.publish()[0] == THROTTLED
    assign(rig, 1, namespace_publish_bytes_per_second=1_000_000)
    assert lane.publish()[0] == OK, "another rate forgives what was owed"


def test_the_rate_of_a_topic_and_that_of_its_namespace_both_hold(rig: Rig) -> None:
    rig.assign(
        1, durability="os", policy={"publish_messages_per_second": 10},
        quota={"namespace_publish_messages_per_second": 1000},
    )  # fmt: skip
    lane = Lane(rig.client(), 1)
    assert lane.publish(20)[0] == OK
    later(rig, 0.5)
    assert lane.publish()[0] == THROTTLED
    assert "faster than its policy" in rig.stats()[0]["refusal"]
    later(rig, 2)
    assert lane.publish(1500)[0] == OK
    later(rig, 0.2)
    assert lane.publish()[0] == THROTTLED


def test_a_quota_that_is_taken_back_bounds_nothing_any_more(rig: Rig) -> None:
    assign(
        rig, 1, namespace_publish_messages_per_second=1, namespace_storage_bytes_max=1,
        namespace_handles_max=1,
    )  # fmt: skip
    shared(rig).set_until(1)
    client = rig.client()
    lane = Lane(client, 1)
    assert lane.publish(100)[0] == EXHAUSTED
    assign(rig, 1)
    assert [lane.publish(100)[0] for _ in range(3)] == [OK] * 3
    Lane(client, 1, "more")


def test_dispatch_of_all_subscriptions_and_readers_draws_on_one_rate(rig: Rig) -> None:
    assign(rig, 1, 2)
    client = rig.client()
    for number in (1, 2):
        lane = Lane(client, number)
        for _ in range(20):
            assert lane.publish(10)[0] == OK
    assign(rig, 1, 2, namespace_dispatch_messages_per_second=100)
    client.subscribe(1, "a", consumer_id=1)
    client.subscribe(2, "", consumer_id=2, kind="reader", position="earliest")
    begun_ns = rig.worker.state.clock.monotonic_ns()
    for _ in range(50):
        later(rig, 0.02)
        client.pump()
    client.ask(2)
    seconds = (rig.worker.state.clock.monotonic_ns() - begun_ns) / SECOND
    got = sum(len(view.offsets()) for _, view in client.delivered)
    assert 80 <= got <= 100 * seconds + 10
    client.delivered = []
    assign(rig, 1, 2)
    assert len(client.receive(400 - got)) == 400 - got


def test_a_reader_that_is_there_already_draws_on_a_rate_that_is_set(rig: Rig) -> None:
    assign(rig, 1)
    client = rig.client()
    client.subscribe(1, "", consumer_id=1, kind="reader", position="earliest")
    assign(rig, 1, namespace_dispatch_messages_per_second=100)
    lane = Lane(client, 1)
    begun_ns = rig.worker.state.clock.monotonic_ns()
    for _ in range(20):
        assert lane.publish(10)[0] == OK
    later(rig, 0.02)
    client.ask(2)
    seconds = (rig.worker.state.clock.monotonic_ns() - begun_ns) / SECOND
    assert sum(len(view.offsets()) for _, view in client.delivered) <= 100 * seconds + 20


# ---------------------------------------------------------------- storage


def test_the_kernel_lets_in_what_all_workers_may_accept_and_not_a_byte_more(rig: Rig) -> None:
    assign(rig, 1, 2, namespace_storage_bytes_max=10_000)
    client, words = rig.client(), shared(rig)
    one, two = Lane(client, 1), Lane(client, 2)
    status, size = one.publish(1, b"x" * 1000)
    assert status == THROTTLED, "it is not known yet what is there"
    words.set_until(10 * size)
    assert [lane.publish(1, b"x" * 1000)[0] for lane in (one, two) * 2] == [OK] * 4
    assert words.accepted(ME) == 4 * size
    rig.buckets.set_word(words.accepted_address(OTHER), 5 * size)
    assert one.publish(1, b"x" * 1001)[0] == EXHAUSTED, "a byte too much"
    assert one.publish(1, b"x" * 1000)[0] == OK
    refused = client.ask(11, parts=(client_bundle(client, 2),))
    assert "namespace default" in str(refused) and "namespaces set-quota default" in str(refused)
    words.set_until(12 * size)
    assert two.publish(1, b"x" * 1000)[0] == OK


def client_bundle(client: RawClient, partition_id: int) -> bytes:
    from danube_fast.frame.bundle import sealed_bundle

    opened = client.open_producer(partition_id, "late")
    return bytes(sealed_bundle([(partition_id, client.frame(opened, 0, [b"x"]))]))


def test_a_resend_costs_nothing_and_topics_that_keep_nothing_go_on(rig: Rig) -> None:
    assign(rig, 1, namespace_storage_bytes_max=10_000)
    rig.assign(
        2, dispatch="non_reliable", incarnation=2, quota={"namespace_storage_bytes_max": 10_000}
    )
    client, words = rig.client(), shared(rig)
    words.set_until(1 << 40)
    opened = client.open_producer(1)
    frame = client.frame(opened, 0, [b"x"])
    assert client.publish((1, frame))[0] == OK
    assert client.publish((1, frame)) == [1, 0]
    assert words.accepted(ME) == len(frame)
    full = m.NamespaceFull({"default": "namespace default is full"})
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(full))
    assert client.publish((1, client.frame(opened, 1, [b"x"])))[0] == EXHAUSTED
    assert Lane(client, 2).publish()[0] == OK
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(m.NamespaceFull({"other": "full"})))
    assert client.publish((1, client.frame(opened, 1, [b"x"])))[0] == EXHAUSTED
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(m.NamespaceFull({"default": ""})))
    assert client.publish((1, client.frame(opened, 1, [b"x"])))[0] == OK


def test_what_is_kept_is_reported_and_what_goes_at_once(rig: Rig) -> None:
    assign(rig, 1, 2, namespace_storage_bytes_max=1 << 30)
    shared(rig).set_until(1 << 40)
    client = rig.client()
    sizes = [Lane(client, number).publish(5, b"x" * 1000)[1] for number in (1, 2)]
    later(rig, 1)
    use = rig.said(m.NamespaceUsed)[-1].used["default"]
    assert use == m.NamespaceUse(sum(sizes), sum(sizes), 0, True)
    rig.operation(m.Unassign([1]))
    later(rig, 0.02)
    use = rig.said(m.NamespaceUsed)[-1].used["default"]
    assert use == m.NamespaceUse(sizes[1], sum(sizes), 0, True)


def test_a_namespace_is_reported_twice_when_it_changes_and_all_to_a_coordinator_that_is_new(
    rig: Rig,
) -> None:
    for number in range(1, 4):
        rig.assign(
            number, topic=f"/n{number}/t", durability="os", incarnation=number,
            quota={"namespace_storage_bytes_max": 1 << 30},
        )  # fmt: skip
    for _ in range(5):
        later(rig, 1)
    before = rig.said(m.NamespaceUsed)
    assert [each.is_whole for each in before] == [True] + [False] * (len(before) - 1)
    assert sorted(name for each in before for name in each.used) == [
        "n1",
        "n1",
        "n2",
        "n2",
        "n3",
        "n3",
    ]
    rig.buckets.set_word(words_of(rig, "n2").until_address, 1 << 40)
    size = Lane(rig.client(), 2).publish(5)[1]
    for _ in range(5):
        later(rig, 1)
    said = rig.said(m.NamespaceUsed)[len(before) :]
    assert [list(each.used) for each in said] == [["n2"], ["n2"]], "only what has changed, twice"
    assert said[-1].used["n2"] == m.NamespaceUse(size, size, 0, True)
    for watcher in rig.mailbox.epoch_watchers:
        watcher(COORDINATOR, 2)
    later(rig, 0.02)
    last = rig.said(m.NamespaceUsed)[-1]
    assert last.is_whole and last.used["n2"].storage_bytes == size and len(last.used) == 3


def test_nothing_is_left_of_a_namespace_that_is_gone_and_it_can_be_made_again(rig: Rig) -> None:
    assign(rig, 1, namespace_storage_bytes_max=1 << 30, namespace_handles_max=2)
    words = shared(rig)
    words.set_until(1 << 40)
    client = rig.client()
    size = Lane(client, 1).publish()[1]
    client.subscribe(1, "s", consumer_id=1)
    full = m.NamespaceFull({"default": "namespace default is full"})
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(full))
    assert words.handles(ME) == 2
    rig.operation(m.Unassign([1]))
    for _ in range(4):
        later(rig, 1)
    use = rig.said(m.NamespaceUsed)[-1].used["default"]
    assert (use.storage_bytes, use.accepted_bytes, use.handles) == (0, size, 0)
    assert not rig.worker.limits.namespaces.with_quota() and not words.handles_of_all()
    count = len(rig.said(m.NamespaceUsed))
    assign(rig, 2, namespace_storage_bytes_max=1 << 30, namespace_handles_max=2)
    lane = Lane(client, 2)
    assert lane.publish()[0] == OK, "why it was full is forgotten"
    later(rig, 1)
    use = rig.said(m.NamespaceUsed)[count:][-1].used["default"]
    assert use == m.NamespaceUse(size, 2 * size, 1, True)


def test_a_worker_that_has_nothing_of_it_says_so_when_it_is_asked(rig: Rig) -> None:
    later(rig, 10)
    assert not rig.said(m.NamespaceUsed)
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(m.NamespaceFull({})))
    assert rig.said(m.NamespaceUsed) == [m.NamespaceUsed({}, is_whole=True)]


def test_a_restart_goes_on_with_the_quota_that_the_log_knows(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    assign(rig, 1, namespace_topics_max=3, namespace_handles_max=1)
    rig.crash()
    rig = rigs()
    quota = rig.worker.state.catalog.by_id[1].quota
    assert quota == NamespaceQuota(namespace_topics_max=3, namespace_handles_max=1)
    client = rig.client()
    Lane(client, 1, "a")
    assert "namespace_handles_max" in client.ask(10, 1, "b")[3]


# ---------------------------------------------------------------- handles


def test_producers_consumers_and_readers_count_and_those_that_are_closed_do_not(rig: Rig) -> None:
    assign(rig, 1, 2, namespace_handles_max=3)
    client, late = rig.client(), rig.client()
    client.open_producer(1, "a")
    client.open_producer(1, "a")  # again: it takes its own place
    assert client.subscribe(2, "s", consumer_id=1)[0] == 67
    assert client.subscribe(1, "", consumer_id=2, kind="reader", position="earliest")[0] == 67
    client.open_producer(1, "a")  # even when no other place is left
    for answer in (
        late.ask(10, 2, "b"),
        late.subscribe(1, "t", consumer_id=1),
        late.subscribe(1, "", consumer_id=1, kind="reader", position="earliest"),
    ):
        assert answer[0] == 66 and "namespace_handles_max 3" in answer[3]
    client.ask(25, 2)
    assert late.subscribe(1, "t", consumer_id=1)[0] == 67
    dead = client
    dead.socket.close(0)
    later(rig, 1.1)  # sessions are looked at once a second
    rig.turn(lambda: late.ask(10, 2, "b")[0] == 67, "the place of a client that is gone")
