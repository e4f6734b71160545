"""Quotas of namespaces: words that workers share, what one worker makes of them, what the coordinator adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota
from danube_fast.errors import ResourceExhausted
from danube_fast.net.protocol import Status
from danube_fast.ring.buckets import Bucket, BucketTable, JointBucket
from danube_fast.ring.control import ProcessState
from danube_fast.ring.namespace_words import NamespaceWords
from danube_fast.workers.reports import namespaces
from danube_fast.workers.reports.namespaces import NamespaceUsage
from tests.workers.shard_rig import FakeMailbox, FakeRequest, RawClient, Rig, Shifted

SECOND = 1_000_000_000
THROTTLED, OK = int(Status.THROTTLED), 0
EXHAUSTED = ResourceExhausted.code
ME, OTHER = 1, 2


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    made = rigs(session_timeout_ms=3_600_000, worker_count=2)
    made.worker.state.clock = made.boot.clock = Shifted(made.boot.clock)
    return made


@pytest.fixture
def table() -> Iterator[BucketTable]:
    made = BucketTable.create()
    yield made
    made.close()


class Control:
    """Epochs of two workers."""

    def __init__(self) -> None:
        self.epochs = {ME: 1, OTHER: 1}

    def epoch(self, process: int) -> int:
        return self.epochs[process]

    def state(self, process: int) -> ProcessState:
        return ProcessState.READY


def shared(rig: Rig) -> NamespaceWords:
    return NamespaceWords(rig.buckets, rig.boot.control, [ME, OTHER], "default")


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


def test_a_joint_bucket_waits_for_both_and_charges_both(table: BucketTable) -> None:
    own = Bucket(table.address(1), 10, 0)
    common = Bucket(table.address(2), 100, 0, burst_ns=0)
    both = JointBucket(own, common)
    assert both.room(0) == 1 and both.wait_ns(0) == 0
    both.take(0, 50, 0)
    assert common.wait_ns(0) == SECOND // 2
    assert both.wait_ns(0) == own.wait_ns(0) == 5 * SECOND - 250_000_000


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
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(m.NamespaceFull({})))
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


def test_a_worker_that_has_nothing_of_it_says_so_when_it_is_asked(rig: Rig) -> None:
    later(rig, 10)
    assert not rig.said(m.NamespaceUsed)
    rig.mailbox.handlers[m.NamespaceFull](FakeRequest(m.NamespaceFull({})))
    assert rig.said(m.NamespaceUsed) == [m.NamespaceUsed({})]


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


def test_handles_of_another_worker_count_until_it_starts_again(table: BucketTable) -> None:
    control: Any = Control()
    words = NamespaceWords(table, control, [ME, OTHER], "n")
    assert [words.take_handle(OTHER, 3) for _ in range(4)] == [True, True, True, False]
    assert not words.take_handle(ME, 3)
    assert (words.handles(ME), words.handles(OTHER)) == (0, 3)
    control.epochs[OTHER] = 2
    assert words.handles_of_all() == 0
    assert words.take_handle(ME, 3)
    assert NamespaceWords(table, control, [ME, OTHER], "m").handles_of_all() == 0


# ---------------------------------------------------------------- the coordinator


class Usages:
    """The coordinator's side, with workers that say what a test has them say."""

    def __init__(self, table: BucketTable) -> None:
        self.mailbox, self.control = FakeMailbox(), Control()
        self.now_ns = 0
        self.quota = NamespaceQuota(namespace_storage_bytes_max=1000)
        boot: Any = SimpleNamespace(
            mailbox=self.mailbox, buckets=table, control=self.control,
            clock=SimpleNamespace(monotonic_ns=lambda: self.now_ns),
            config=SimpleNamespace(processes=SimpleNamespace(workers=[ME, OTHER])),
        )  # fmt: skip
        quotas = SimpleNamespace(
            quota=lambda name: self.quota,
            with_quota=lambda: ["n"] if self.quota != NO_QUOTA else [],
        )
        topics: Any = SimpleNamespace(namespaces=quotas)
        self.usage = NamespaceUsage(boot, topics)
        self.words = NamespaceWords(table, boot.control, [ME, OTHER], "n")

    def say(
        self, worker: int, kept: int | None, accepted: int = 0, *, is_measured: bool = True
    ) -> str:
        """Have a worker report; why the namespace is full."""
        used = {}
        if kept is not None:
            used["n"] = m.NamespaceUse(kept, accepted, 0, is_measured)
        request: Any = SimpleNamespace(peer=worker, message=m.NamespaceUsed(used))
        self.mailbox.handlers[m.NamespaceUsed](request)
        notices = self.mailbox.notices
        return notices[-1].full.get("n", "") if notices and used else ""  # type: ignore[attr-defined]


@pytest.fixture
def usages(table: BucketTable) -> Iterator[Usages]:
    made = Usages(table)
    yield made
    made.mailbox.close()


def test_what_may_be_accepted_waits_until_all_have_counted(usages: Usages) -> None:
    usages.say(ME, 100, 100)
    assert usages.words.until == 0, "a worker is silent"
    usages.say(OTHER, 0, 0, is_measured=False)
    assert usages.words.until == 0, "a worker has not counted all"
    usages.say(OTHER, 300, 50)
    assert usages.words.until == 1000 - 400 + 150


def test_a_worker_that_never_speaks_does_not_hold_publishers_for_ever(usages: Usages) -> None:
    usages.say(ME, 100, 100)
    usages.now_ns = namespaces.WAIT_NS
    usages.say(ME, 100, 100)
    assert usages.words.until == 1000


def test_a_partition_that_moves_is_never_missing(usages: Usages) -> None:
    """The source has dropped it before the target speaks, or before that has counted it."""
    usages.say(ME, 600, 600)
    usages.say(OTHER, 0, 0)
    assert usages.words.until == 1000
    usages.say(ME, 0, 600)
    assert usages.words.until == 1000, "for one report more it counts"
    usages.say(OTHER, 0, 0, is_measured=False)
    usages.say(ME, 0, 600)
    assert usages.words.until == 1000, "and while a worker has not counted all"
    usages.say(OTHER, 600, 0)
    assert usages.words.until == 1000


def test_what_is_deleted_may_be_accepted_again(usages: Usages) -> None:
    usages.say(OTHER, 0, 0)
    assert "keeps 1000 bytes" in usages.say(ME, 1000, 1000)
    assert usages.words.until == 1000
    for _ in range(2):
        assert usages.say(ME, 400, 1000) == ""
    assert usages.words.until == 1600
    assert usages.usage.of("n").storage_bytes == 400


def test_a_worker_without_anything_of_it_any_more_gives_back_all(
    usages: Usages, table: BucketTable
) -> None:
    table.set_word(usages.words.accepted_address(OTHER), 700)
    usages.say(ME, 100, 100)
    usages.say(OTHER, 700, 700)
    assert usages.words.until == 1000
    usages.say(OTHER, None)
    usages.say(ME, 100, 100)
    assert usages.words.until == 1000 - 100 + 100 + 700


def test_a_worker_that_was_started_again_is_asked_and_counts_as_before_until_it_answers(
    usages: Usages,
) -> None:
    usages.say(ME, 100, 100)
    assert m.NamespaceFull({}) in usages.mailbox.notices, "the other worker is asked"
    usages.say(OTHER, 500, 500)
    usages.control.epochs[OTHER] = 2
    usages.mailbox.notices.clear()
    for _ in range(2):
        usages.say(ME, 0, 100)
    assert len(usages.mailbox.notices) == 4, "answers, and a question with each"
    assert usages.words.until == 1000, "what was freed counts when all have spoken"
    usages.say(OTHER, None)
    usages.say(ME, 0, 100)
    assert len(usages.mailbox.notices) == 5
    assert usages.words.until == 1100


def test_a_limit_that_changes_or_goes_is_felt_with_the_next_report(usages: Usages) -> None:
    usages.say(ME, 600, 600)
    usages.say(OTHER, 0, 0)
    usages.quota = NamespaceQuota(namespace_storage_bytes_max=500)
    assert "namespace_storage_bytes_max 500" in usages.say(ME, 600, 600)
    assert usages.words.until == 500
    usages.quota = NO_QUOTA
    assert usages.say(ME, 600, 600) == ""
    assert usages.words.until == 0
