"""Faults that systems of this kind are known for, each tried on a real broker.

Those that have a place of their own: a standby that is never promoted (test_failover.py), a rate limit
that swallows what it held (test_policies.py), a nack beside a timeout and a silent consumer
(test_failures.py, tests/broker/test_failures.py), a policy that the next subscriber overwrites
(test_failures.py), a join that stops everybody (test_key_shared.py).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import FailedPrecondition
from danube_fast.frame.layout import message_frame_bytes_max
from danube_fast.frame.pack import encode_frame
from tests.crash.rig import SMALL, Server
from tests.delivery.test_failover import consumer_process

WAIT_SECONDS = 60.0
EARLIEST: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("traps") / "data", workers=2) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[danube_fast.Client]:
    with danube_fast.connect(server.url) as connected:
        yield connected


def receive(consumer: Any, count: int) -> list[danube_fast.Message]:
    """Exactly so many messages, one by one."""
    found = []
    for _ in range(count):
        message = consumer.receive(timeout=WAIT_SECONDS)
        assert message is not None, f"{len(found)} of {count} came within {WAIT_SECONDS} s"
        found.append(message)
    return found


def publish(client: danube_fast.Client, topic: str, count: int, keys: int = 0) -> None:
    with client.producer(topic) as producer:
        names = [f"k{n % keys}" for n in range(count)] if keys else None
        producer.send_many([b"%d" % n for n in range(count)], keys=names)
        producer.flush()


def test_the_newest_acked_first_stalls_nothing(client: danube_fast.Client) -> None:
    topic = "/default/newest-first"
    publish(client, topic, 5000)
    with client.consumer(topic, **EARLIEST, permits_messages=1000) as consumer:
        seen = 0
        while seen < 5000:
            batch = receive(consumer, min(500, 5000 - seen))
            for message in reversed(batch):
                consumer.ack(message)
            seen += len(batch)
        consumer.flush_acks()
    assert client.admin.describe_subscription(topic, "s")["lag_messages"] == 0


def test_one_consumer_cannot_ack_for_another(client: danube_fast.Client, server: Server) -> None:
    topic = "/default/for-another"
    publish(client, topic, 20)
    with danube_fast.connect(server.url) as other:
        one = client.consumer(topic, **EARLIEST, type="shared", name="one")
        held = receive(one, 20)
        with other.consumer(topic, **EARLIEST, type="shared", name="two") as two:
            for message in held:
                foreign = danube_fast.Message(payload=b"", topic=topic, offset=message.offset)
                with pytest.raises(danube_fast.InvalidArgument, match="never received"):
                    two.ack(foreign)
            two.flush_acks()
            assert client.admin.describe_subscription(topic, "s")["unacked"] == 20
            one.close()
            again = receive(two, 20)
            assert sorted(m.offset for m in again) == list(range(20))


def test_what_a_dead_key_shared_consumer_held_is_not_acked(
    client: danube_fast.Client, server: Server
) -> None:
    topic = "/default/dead-keys"
    publish(client, topic, 300, keys=30)
    dead = danube_fast.connect(server.url)
    first = dead.consumer(topic, **EARLIEST, type="key_shared", name="dead")
    assert len(receive(first, 10)) == 10
    with client.consumer(topic, **EARLIEST, type="key_shared", name="alive") as alive:
        dead.close(timeout=0)
        by_key: dict[bytes, list[int]] = {}
        for message in receive(alive, 300):
            by_key.setdefault(message.key or b"", []).append(int(message.payload or b""))
            alive.ack(message)
        assert len(by_key) == 30
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        assert sorted(n for numbers in by_key.values() for n in numbers) == list(range(300))


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
def test_poison_takes_only_itself_out_of_its_keys_queue(
    client: danube_fast.Client, kind: str
) -> None:
    topic = f"/default/poison-{kind}"
    publish(client, topic, 50, keys=1)
    policy = {"max_redelivery_count": 1, "base_redelivery_delay_ms": 1, "poison_policy": "drop"}
    done: list[int] = []
    with client.consumer(topic, **EARLIEST, type=kind, failure_policy=policy) as consumer:
        failures = 0
        while len(done) < 49 or failures < 2:
            (message,) = receive(consumer, 1)
            if message.payload == b"7":
                failures += 1
                consumer.nack(message, reason="poison")
            else:
                done.append(int(message.payload or b""))
                consumer.ack(message)
        consumer.flush_acks()
        assert sorted(done) == [n for n in range(50) if n != 7]
        assert consumer.receive(timeout=0.5) is None
    described = client.admin.describe_subscription(topic, "s")
    assert (described["dropped"], described["lag_messages"]) == (1, 0)


def test_an_exclusive_slot_is_free_soon_after_its_holder_is_stopped(
    client: danube_fast.Client, server: Server
) -> None:
    """SIGSTOP: no connection breaks, only silence tells."""
    topic = "/default/slot"
    publish(client, topic, 10)
    holder = consumer_process(server, "exclusive", "zmq", topic)
    try:
        with pytest.raises(FailedPrecondition, match="exclusive"):
            client.consumer(topic, **EARLIEST, timeout=5)
        holder.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        opened: Any = None
        while opened is None:
            assert time.monotonic() - stopped < WAIT_SECONDS, "the stopped one holds the slot still"
            with contextlib.suppress(FailedPrecondition, danube_fast.DeadlineExceeded):
                opened = client.consumer(topic, **EARLIEST, timeout=5)
        opened.close()
    finally:
        holder.kill()
        holder.wait(WAIT_SECONDS)
        assert holder.stdout is not None
        holder.stdout.close()


def test_a_slow_reader_gets_everything(server: Server) -> None:
    """Behind memory and credit, with publishing going on: its stream is slow, not ended."""
    topic = "/default/slow-reader"
    with (
        danube_fast.connect(server.url) as client,
        client.producer(topic) as producer,
        client.reader(topic, start="earliest", stop=None, permits_bytes=64 * 1024) as reader,
    ):
        payload = b"x" * 1000
        total, seen = 40_000, 0
        for _ in range(total // 5000):
            producer.send_many([payload] * 5000)
            seen += len(reader.receive_batch(200, timeout=WAIT_SECONDS))
        producer.flush()
        while seen < total:
            batch = reader.receive_batch(5000, timeout=WAIT_SECONDS)
            assert len(batch), f"the stream ended after {seen} of {total}"
            seen += len(batch)
        assert seen == total


def test_offsets_go_on_after_all_messages_are_gone_and_everything_restarts(tmp_path: Path) -> None:
    topic = "/default/offsets"
    with Server(tmp_path / "data", workers=1) as server:
        with danube_fast.connect(server.url) as client:
            publish(client, topic, 100)
            client.admin.purge_topic(topic)
        server.kill("all")
        server.start()
        with danube_fast.connect(server.url) as client, client.producer(topic) as producer:
            assert producer.publish(b"next").offset == 100


def test_close_returns_and_keeps_the_last_message(client: danube_fast.Client) -> None:
    """Close right behind a send, in threads, with the window full: nothing hangs, nothing is dropped."""
    topic = "/default/close"

    def produce(number: int) -> None:
        producer = client.producer(topic, name=f"p{number}")
        for n in range(500):
            producer.send(b"%d-%d" % (number, n))
        producer.close()

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "close() hangs"
    with client.consumer(topic, **EARLIEST) as consumer:
        payloads = {message.payload for message in receive(consumer, 2000)}
    assert payloads == {b"%d-%d" % (number, n) for number in range(4) for n in range(500)}


@pytest.mark.parametrize("key", [None, b"k"])
def test_the_largest_message_that_is_allowed_is_taken(
    client: danube_fast.Client, key: bytes | None
) -> None:
    topic = f"/default/largest-{key is None}"
    limit = SMALL["segment_bytes"] // 2
    client.publish(topic, bytes(limit), key=key)
    with client.consumer(topic, **EARLIEST) as consumer:
        with pytest.raises(danube_fast.InvalidArgument, match="the broker accepts"):
            client.publish(topic, bytes(limit + 1), key=key)
        assert receive(consumer, 1)[0].payload == bytes(limit)


KEY = b"k" * 24


@pytest.mark.parametrize("excess", range(-17, 2))
def test_client_and_broker_have_the_same_limit_of_payloads(
    client: danube_fast.Client, excess: int
) -> None:
    """What the client takes the broker takes; what is larger the client refuses, by whatever call."""
    payload = bytes(SMALL["segment_bytes"] // 2 + excess)
    with client.producer("/default/limit") as producer:
        sends = (
            lambda: producer.publish(payload),
            lambda: producer.publish(payload, key=KEY, attributes={"a": "x"}),
            lambda: producer.send_many([payload, payload], keys=[None, KEY]),
        )
        for send in sends:
            if excess <= 0:
                send()
                producer.flush(timeout=WAIT_SECONDS)
            else:
                with pytest.raises(danube_fast.InvalidArgument, match="the broker accepts"):
                    send()


@pytest.mark.parametrize("place", ["key", "attribute"])
@pytest.mark.parametrize("excess", range(-24, 9, 8))
def test_client_and_broker_have_the_same_limit_of_frames(
    client: danube_fast.Client, place: str, excess: int
) -> None:
    """Payload, key and attributes together; sizes of frames are multiples of 8."""
    limit = SMALL["segment_bytes"] // 2
    payload, size, wanted = bytes(limit - 1000), 0, message_frame_bytes_max(limit) + excess

    def fields() -> tuple[str | None, dict[str, str] | None]:
        text = "x" * size
        return (text, None) if place == "key" else (None, {"a": text})

    def frame_bytes() -> int:
        key, attributes = fields()
        keys = None if key is None else [key.encode()]
        return len(encode_frame([payload], keys=keys, attributes=attributes and [attributes]))

    while frame_bytes() < wanted:
        size += max(1, wanted - frame_bytes() - 8)
    assert frame_bytes() == wanted
    key, attributes = fields()
    with client.producer(f"/default/limit-{place}") as producer:
        if excess <= 0:
            producer.publish(payload, key=key, attributes=attributes)
        else:
            with pytest.raises(danube_fast.InvalidArgument, match="the broker accepts"):
                producer.publish(payload, key=key, attributes=attributes)
