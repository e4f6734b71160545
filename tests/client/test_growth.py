"""What a client does when a topic that it uses gets more partitions."""

from __future__ import annotations

import time
from typing import Any

import danube_fast
from danube_fast.frame.hash import key_hash
from tests.workers.broker import wait_until

TOPIC = "/default/a"
KEYS = [b"key-%d" % number for number in range(40)]


def grow(broker: Any, client: danube_fast.Client, count: int) -> None:
    """The topic has more partitions, and the client looks it up again."""
    with broker.lock:
        topic = broker.topics[TOPIC]
        wide = type(topic)(TOPIC, {**topic.options, "partitions": count}, broker._next_id)
        broker._next_id += count
        topic.options = wide.options
        topic.partitions += wide.partitions[len(topic.partitions) :]
        broker.by_partition.update({part.partition_id: part for part in topic.partitions})
    core = client._core
    with core.pump.lock:
        core.watcher._refresh(TOPIC)


def test_a_resend_keeps_its_partition_and_what_comes_next_spreads(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC, partitions=2, linger_us=0)
    broker.drop_publishes = 1_000_000
    producer.send_many([b"before"] * len(KEYS), keys=KEYS)
    wait_until("frames are on their way", lambda: broker.commands["Publish"] >= 2)
    grow(broker, client, 4)
    wait_until("four lanes", lambda: len(producer._publisher.lanes) == 4)
    broker.drop_publishes = 0
    broker.forget_sessions()
    producer.send_many([b"after"] * len(KEYS), keys=KEYS)
    producer.flush(timeout=60)
    found = list(client.reader(TOPIC))
    assert len(found) == 2 * len(KEYS), "nothing is lost or twice"
    for message in found:
        count = 2 if message.payload == b"before" else 4
        assert message.partition == key_hash(message.key or b"") % count
    sequences: dict[int | None, list[int]] = {}
    for message in found:
        sequences.setdefault(message.partition, []).append(message.sequence)
    for numbers in sequences.values():
        assert numbers == list(range(len(numbers))), "dense in each partition"


def test_one_partition_becomes_two(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, partitions=1)
    producer.send(b"x", key=b"a")
    producer.flush(timeout=60)
    grow(broker, client, 2)
    wait_until("two lanes", lambda: len(producer._publisher.lanes) == 2)
    for key in KEYS:
        producer.send(b"y", key=key)
    for _ in range(10):
        producer.publish(b"z")
    producer.flush(timeout=60)
    found = list(client.reader(TOPIC))
    assert len(found) == 1 + len(KEYS) + 10
    assert {m.partition for m in found if m.payload == b"y"} == {0, 1}
    assert {m.partition for m in found if m.payload == b"z"} == {0, 1}


def test_consumers_and_readers_get_the_new_partitions_from_their_first_message(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC, partitions=2)
    consumer = client.consumer(TOPIC, subscription="s", initial_position="latest")
    follows = client.reader(TOPIC, start="latest", stop=None)
    ends = client.reader(TOPIC, start="earliest", stop="latest")
    grow(broker, client, 3)
    wait_until("three lanes", lambda: len(producer._publisher.lanes) == 3)
    wait_until("three attachments", lambda: len(consumer._inbox.attachments) == 3)
    for number in range(30):
        producer.publish(b"%d" % number)
    for source in (consumer, follows):
        got: list[danube_fast.Message] = []
        deadline = time.monotonic() + 60
        while len(got) < 30:
            got += list(source.receive_batch(timeout=0.5))
            assert time.monotonic() < deadline, f"{len(got)} of 30"
        assert {message.partition for message in got} == {0, 1, 2}
    assert list(ends) == [], "its end was fixed when it was opened"


def test_a_topic_of_the_same_name_is_another_one(broker: Any, client: danube_fast.Client) -> None:
    producer = client.producer(TOPIC, partitions=2)
    with broker.lock:
        broker.delete(TOPIC)
        broker.create(TOPIC, partitions=5)
    core = client._core
    with core.pump.lock:
        core.watcher._refresh(TOPIC)
    wait_until("it was looked up", lambda: len(producer._publisher._route.partitions) == 5)
    with core.pump.lock:
        assert len(producer._publisher.lanes) + len(producer._publisher.joining) == 2
