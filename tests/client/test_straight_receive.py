"""Frames of one message that go straight to the application: the same as in batches, credit, ends, time limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import danube_fast
from danube_fast.client.consume.delivery import Delivery
from danube_fast.client.link.deliveries import Deliveries
from danube_fast.errors import Unavailable
from danube_fast.testing import Broker
from tests.workers.broker import wait_until

WAIT_SECONDS = 60
COUNT = 60
FIELDS = (
    "payload", "key", "attributes", "event_time", "offset", "publish_time", "sequence",
    "producer_name", "topic", "partition", "redelivery_count",
)  # fmt: skip


class Straight:
    """Counts what went straight: out of ring or socket, and to the application."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = self.opened = 0
        take, only = Deliveries.take_all, Delivery.only

        def counted_take(deliveries: Deliveries, *source: Any) -> int:
            count = take(deliveries, *source)
            self.taken += count
            return count

        def counted_only(delivery: Delivery) -> danube_fast.Message:
            self.opened += 1
            return only(delivery)

        monkeypatch.setattr(Deliveries, "take_all", counted_take)
        monkeypatch.setattr(Delivery, "only", counted_only)


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> Straight:
    return Straight(monkeypatch)


@pytest.fixture(params=["shm", "zmq"])
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def plain(real: Broker, transport: Any) -> Iterator[danube_fast.Client]:
    with real.client(transport=transport, name="plain") as client:
        yield client


def fields_of(messages: list[danube_fast.Message]) -> list[dict[str, Any]]:
    return [{name: getattr(message, name) for name in FIELDS} for message in messages]


def one_by_one(consumer: danube_fast.Consumer, count: int) -> list[danube_fast.Message]:
    messages: list[danube_fast.Message] = []
    while len(messages) < count:
        message = consumer.receive(timeout=WAIT_SECONDS)
        assert message is not None, f"stalled at {len(messages)} of {count}"
        messages.append(message)
    return messages


def in_batches(consumer: danube_fast.Consumer, count: int) -> list[danube_fast.Message]:
    messages: list[danube_fast.Message] = []
    while len(messages) < count:
        batch = consumer.receive_batch(timeout=WAIT_SECONDS)
        assert len(batch), f"stalled at {len(messages)} of {count}"
        messages += list(batch)
    return messages


def wait_for_frames(client: danube_fast.Client, consumer: danube_fast.Consumer, count: int) -> None:
    """Wait until so many frames have come and wait for the application."""
    pump, queue = client._core.pump, consumer._inbox.frames.queue
    deadline_ns = pump.clock.monotonic_ns() + WAIT_SECONDS * 10**9
    assert pump.wait(lambda: len(queue) >= count, deadline_ns), f"{len(queue)} of {count} frames"


def publish_kinds(client: danube_fast.Client, topic: str) -> None:
    """Publish messages of all kinds, each in a frame of its own; now and then several in one."""
    with client.producer(topic, durability="os") as producer:
        for number in range(COUNT):
            options: dict[str, Any] = {}
            if number % 3 == 0:
                options["key"] = b"k%d" % number
            if number % 4 == 0:
                options["attributes"] = {"a": str(number), "b": "ü"}
            if number % 5 == 0:
                options["event_time"] = 1_000 + number
            payload = None if number % 7 == 0 else b"%d" % number * (number % 4)
            producer.publish(payload, **options)
            if number % 20 == 19:
                producer.send_many([b"x%d" % number, None, b"z"])
                producer.flush()


TOTAL = COUNT + 3 * (COUNT // 20)
WAYS: list[Callable[[danube_fast.Consumer, int], list[danube_fast.Message]]] = [
    one_by_one, in_batches,
]  # fmt: skip


def test_one_by_one_is_the_same_as_in_batches(
    real: Broker, plain: danube_fast.Client, transport: Any, topic: str, straight: Straight
) -> None:
    other = real.client(transport=transport, name="plain")
    plain.admin.create_topic(topic, durability="os")
    consumers = [
        # of one client each: frames for two consumers of a client come in one command
        each.consumer(topic, subscription=name, initial_position="earliest")
        for name, each in (("one", plain), ("many", other))
    ]
    publish_kinds(plain, topic)
    got = [way(each, TOTAL) for way, each in zip(WAYS, consumers, strict=True)]
    assert fields_of(got[0]) == fields_of(got[1])
    assert [message.offset for message in got[0]] == list(range(TOTAL))
    assert straight.taken >= COUNT and straight.opened >= COUNT // 2
    for consumer, messages in zip(consumers, got, strict=True):
        consumer.ack(messages)
        consumer.flush_acks()
        assert consumer.lag() == 0
    other.close()


def test_redeliveries_are_counted_alike(
    plain: danube_fast.Client, topic: str, straight: Straight
) -> None:
    plain.admin.create_topic(topic, durability="os")
    consumers = [plain.consumer(topic, subscription=name, type="shared") for name in ("a", "b")]
    with plain.producer(topic) as producer:
        for number in range(12):
            producer.publish(b"%d" % number)
        for number in range(12, 24, 3):
            producer.send_many([b"%d" % (number + i) for i in range(3)])
            producer.flush()
    again = []
    for way, consumer in zip(WAYS, consumers, strict=True):
        messages = way(consumer, 24)
        consumer.ack([message for message in messages if message.offset % 3 != 1])
        consumer.nack([message for message in messages if message.offset % 3 == 1])
        more = sorted(way(consumer, 8), key=lambda each: each.offset)
        again.append(fields_of(more))
        assert consumer.lag() == 8
        consumer.ack(more)
        consumer.flush_acks()
        assert consumer.lag() == 0
    assert again[0] == again[1]
    offsets = range(1, 24, 3)
    assert [(fields["offset"], fields["payload"]) for fields in again[0]] == [
        (offset, b"%d" % offset) for offset in offsets
    ]
    assert {fields["redelivery_count"] for fields in again[0]} == {1}
    assert straight.opened >= 6


@pytest.mark.parametrize("permits", [
    {"permits_messages": 1}, {"permits_messages": 3}, {"permits_bytes": 400},
])  # fmt: skip
def test_a_tiny_window_never_stands_still(
    plain: danube_fast.Client, topic: str, straight: Straight, permits: dict[str, int]
) -> None:
    count = 10_000 if "permits_bytes" in permits else 3_000
    plain.admin.create_topic(topic, durability="os")
    consumer = plain.consumer(topic, subscription="s", **permits)  # type: ignore[arg-type]
    producer = plain.producer(topic)
    got: list[bytes | None] = []
    for number in range(count):
        producer.send(b"%d" % number)
        producer.flush()
        if number % 3 == 2:
            messages = one_by_one(consumer, 3)
            consumer.ack(messages)
            got += [message.payload for message in messages]
    got += [message.payload for message in one_by_one(consumer, count - len(got))]
    assert got == [b"%d" % number for number in range(count)]
    assert straight.opened > count // 2


def test_receiving_keeps_no_references(
    plain: danube_fast.Client, topic: str, straight: Straight
) -> None:
    plain.admin.create_topic(topic, durability="os")
    consumer, producer = plain.consumer(topic, subscription="s"), plain.producer(topic)
    least: list[int] = []
    for _ in range(2):
        counts = []
        for number in range(1000):
            producer.publish(b"%d" % number)
            (message,) = one_by_one(consumer, 1)
            consumer.ack(message)
            counts.append(sys.getrefcount(None))
        least.append(min(counts))
    assert abs(least[1] - least[0]) < 300, f"{least[1] - least[0]} references to None"
    connection = consumer._inbox.attachments[0].connection
    assert connection._deliveries._cell == [None]
    assert straight.taken > 1000


def test_a_seek_while_single_frames_wait(
    plain: danube_fast.Client, topic: str, straight: Straight
) -> None:
    plain.admin.create_topic(topic, durability="os")
    consumer = plain.consumer(topic, subscription="s")
    with plain.producer(topic) as producer:
        for number in range(20):
            producer.publish(b"%d" % number)
    assert [message.offset for message in one_by_one(consumer, 5)] == list(range(5))
    wait_for_frames(plain, consumer, 15)
    consumer.seek(2)
    assert [message.offset for message in one_by_one(consumer, 18)] == list(range(2, 20))
    consumer.seek("latest")
    plain.publish(topic, b"new")
    (new,) = one_by_one(consumer, 1)
    assert (new.offset, new.payload) == (20, b"new")
    assert straight.opened >= 6


def test_a_close_while_single_frames_wait(plain: danube_fast.Client, topic: str) -> None:
    plain.admin.create_topic(topic, durability="os")
    consumer = plain.consumer(topic, subscription="s")
    with plain.producer(topic) as producer:
        for number in range(10):
            producer.publish(b"%d" % number)
    taken = one_by_one(consumer, 4)
    consumer.ack(taken[:2])
    wait_for_frames(plain, consumer, 6)
    consumer.close()
    with pytest.raises(danube_fast.FailedPrecondition, match="closed"):
        consumer.receive(timeout=1)
    with plain.consumer(topic, subscription="s") as other:
        rest = one_by_one(other, 8)
    assert [message.offset for message in rest] == list(range(2, 10))
    # those that only waited do not count as delivered
    assert [message.redelivery_count for message in rest] == [1, 1] + [0] * 6


@pytest.mark.parametrize("transport", ["shm"])  # over a socket acks may go into the void before
def test_a_broker_that_is_killed_while_single_frames_wait(topic: str, transport: Any) -> None:
    with Broker(workers=1) as broker, broker.client(transport=transport, timeout=60) as client:
        client.admin.create_topic(topic)
        consumer = client.consumer(topic, subscription="s")
        with client.producer(topic) as producer:
            for number in range(20):
                producer.publish(b"%d" % number)
        consumer.ack(one_by_one(consumer, 5)[:3])
        consumer.flush_acks()
        wait_for_frames(client, consumer, 15)
        broker.kill()
        broker.start()
        seen: dict[int, bytes | None] = {}
        while len(seen) < 17:
            (message,) = one_by_one(consumer, 1)
            seen[message.offset] = message.payload
            consumer.ack(message)
        assert seen == {number: b"%d" % number for number in range(3, 20)}

        def is_done() -> bool:
            # frames that stood in the rings when the worker died come again, and so do their acks
            consumer.ack(consumer.receive_batch(timeout=0.05))
            return lag_of(consumer) == 0

        wait_until("all acks", is_done)


def lag_of(consumer: danube_fast.Consumer) -> int | None:
    """Lag; None if the connection to the coordinator has noticed only now that the broker was killed."""
    try:
        return consumer.lag()
    except Unavailable:
        return None


def test_gaps_between_single_frames(broker: Any, client: danube_fast.Client) -> None:
    topic = "/default/gaps"
    broker.create(topic)
    consumer = client.consumer(topic, subscription="s", initial_position="earliest")
    for number in range(3):
        client.publish(topic, b"%d" % number)
        (message,) = one_by_one(consumer, 1)
        assert message.payload == b"%d" % number
        broker.event("gap", {"end": 10 * number + 10, "reason": "unclean end"})
    client.publish(topic, b"last")
    one_by_one(consumer, 1)
    assert [gap.last for gap in consumer.gaps] == [9, 19, 29]


# ---------------------------------------------------------------- time limits


def test_useless_frames_make_a_receive_last_no_longer(
    broker: Any, client: danube_fast.Client
) -> None:
    topic = "/default/void"
    broker.create(topic)
    consumer = client.consumer(topic, subscription="s", initial_position="earliest")
    client.publish(topic, b"0")
    wait_for_frames(client, consumer, 1)
    queue = consumer._inbox.frames.queue
    void = queue.popleft()
    void.generation -= 1
    limit_ns = time.monotonic_ns() + 1000 * 10**9
    steps = consumer._inbox.receive_steps(limit_ns)
    first = next(steps)
    for _ in range(3):
        assert first.deadline_ns <= limit_ns
        queue.append(void)
        found = steps.send(True)
        assert found.deadline_ns == first.deadline_ns, "the time began anew"
        assert not queue, "the useless frame was not dropped"
    with pytest.raises(StopIteration) as ended:
        steps.send(False)
    assert ended.value.value is None


@pytest.mark.parametrize("timeout", [float("nan"), "1", True, [1]])
def test_an_invalid_timeout_is_refused(plain: danube_fast.Client, topic: str, timeout: Any) -> None:
    plain.admin.create_topic(topic, durability="os")
    consumer = plain.consumer(topic, subscription="s")
    with pytest.raises(danube_fast.InvalidArgument, match="timeout"):
        consumer.receive(timeout=timeout)
    plain.publish(topic, b"1")
    wait_for_frames(plain, consumer, 1)
    with pytest.raises(danube_fast.InvalidArgument, match="timeout"):
        consumer.receive(timeout=timeout)
    assert one_by_one(consumer, 1)[0].payload == b"1"
    assert consumer.receive(timeout=0) is None
