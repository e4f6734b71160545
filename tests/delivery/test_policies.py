"""Policies over a real broker: inherited, changed live, obeyed by every worker, told to clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import InvalidArgument, NotFound, ResourceExhausted
from tests.crash.rig import Server
from tests.workers.broker import wait_until

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("policies") / "data", workers=2, session_timeout_ms=30_000
    ) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[danube_fast.Client]:
    with danube_fast.connect(server.url) as connected:
        yield connected


def received(consumer: Any, count: int) -> list[danube_fast.Message]:
    found: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} within {WAIT_SECONDS} s"
        found += consumer.receive_batch(count, timeout=1)
    return found


def test_a_namespace_is_inherited_and_a_topic_goes_before_it(client: danube_fast.Client) -> None:
    admin = client.admin
    admin.create_namespace("inherit")
    admin.create_topic("/inherit/old")
    admin.set_namespace_policy("inherit", {"message_ttl_ms": 5000, "producers_max": 7})
    admin.create_topic("/inherit/new")
    admin.set_topic_policy("/inherit/new", {"producers_max": 2})
    assert admin.topic_policy("/inherit/old")["producers_max"] == 7
    assert admin.topic_policy("/inherit/new")["producers_max"] == 2
    assert admin.topic_policy("/inherit/new")["message_ttl_ms"] == 5000
    admin.set_topic_policy("/inherit/new", {"producers_max": None})
    admin.set_namespace_policy("inherit", {"message_ttl_ms": None})
    assert admin.topic_policy("/inherit/new")["producers_max"] == 7
    assert admin.namespace_policy("inherit") == {"producers_max": 7}
    with pytest.raises(InvalidArgument, match="there are:"):
        admin.set_topic_policy("/inherit/new", {"speed": 1})
    with pytest.raises(InvalidArgument, match="needs retention_seconds"):
        admin.set_namespace_policy("inherit", {"retention_policy": "until_expired"})
    with pytest.raises(NotFound):
        admin.set_namespace_policy("nowhere", {"producers_max": 1})


def test_limits_of_numbers_are_live(client: danube_fast.Client, server: Server) -> None:
    topic = "/default/numbers"
    client.admin.create_topic(topic, partitions=4)
    client.admin.set_topic_policy(topic, {"producers_max": 1})
    with client.producer(topic, name="one") as one, danube_fast.connect(server.url) as other:
        one.publish(b"x")
        with pytest.raises((ResourceExhausted, danube_fast.errors.DeadlineExceeded)):
            other.producer(topic, name="two", timeout=2)
        client.admin.set_topic_policy(topic, {"producers_max": None})
        with other.producer(topic, name="two") as two:
            two.publish(b"y")


def test_a_publish_rate_holds_over_the_partitions_of_both_workers(
    client: danube_fast.Client,
) -> None:
    """Eight partitions on two workers, one rate; everything arrives, at the pace that was set."""
    topic, rate, count = "/default/paced", 500, 2000
    client.admin.create_topic(topic, partitions=8)
    client.admin.set_topic_policy(topic, {"publish_messages_per_second": rate})
    placement = client.admin.describe_topic(topic)["placement"]
    assert {place["worker"] for place in placement} == {0, 1}
    options: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}
    with client.producer(topic) as producer, client.consumer(topic, **options) as consumer:
        start = time.monotonic()
        for number in range(0, count, 10):
            keys = [f"k{n}" for n in range(number, number + 10)]
            producer.send_many([b"%d" % n for n in range(number, number + 10)], keys=keys)
        producer.flush(timeout=WAIT_SECONDS)
        seconds = time.monotonic() - start
        messages = received(consumer, count)
        consumer.ack(messages[-1])
    assert sorted(int(m.payload) for m in messages) == list(range(count))
    assert seconds >= count / rate * 0.8 - 0.5, "faster than the rate"


def test_a_dispatch_rate_is_changed_while_messages_wait(client: danube_fast.Client) -> None:
    topic = "/default/dripping"
    client.admin.create_topic(topic)
    client.admin.set_topic_policy(topic, {"dispatch_messages_per_second": 10})
    options: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}
    with client.producer(topic) as producer, client.consumer(topic, **options) as consumer:
        producer.send_many([b"%d" % n for n in range(3000)])
        producer.flush()
        few = received(consumer, 10)
        assert len(consumer.receive_batch(3000, timeout=0.5)) < 100
        client.admin.set_topic_policy(topic, {"dispatch_messages_per_second": None})
        last = few[-1].offset
        while last < 2999:  # what came meanwhile is not acked, and not lost
            batch = consumer.receive_batch(3000, timeout=WAIT_SECONDS)
            assert len(batch), f"nothing came behind {last}"
            last = batch[-1].offset


def test_messages_expire_and_whoever_comes_late_is_told(client: danube_fast.Client) -> None:
    topic = "/default/fading"
    client.admin.create_topic(topic)
    client.admin.set_topic_policy(topic, {"message_ttl_ms": 500})
    options: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}
    client.consumer(topic, **options).close()
    with client.producer(topic) as producer:
        producer.send_many([b"old"] * 100)
        producer.flush()
        wait_until(
            "the end of their time",
            lambda: client.admin.describe_subscription(topic, "s")["expired"] == 100,
            WAIT_SECONDS,
        )
        client.admin.set_topic_policy(topic, {"message_ttl_ms": 600_000})  # the next one lives
        with client.consumer(topic, **options) as consumer:
            producer.publish(b"new")
            (message,) = received(consumer, 1)
            assert (message.payload, message.offset) == (b"new", 100)
    described = client.admin.describe_subscription(topic, "s")
    assert described["expired"] == 100 and described["gaps"] >= 1


def test_the_storage_quota_of_a_namespace_counts_both_workers(client: danube_fast.Client) -> None:
    admin = client.admin
    admin.create_namespace("small")
    admin.create_topic("/small/spread", partitions=4)
    admin.create_topic("/small/other")
    admin.set_namespace_policy("small", {"storage_bytes_max": 200_000})
    with client.producer("/small/spread") as producer:
        producer.send_many([b"x" * 1000] * 400, keys=[f"k{n}" for n in range(400)])
        producer.flush()
    wait_until(
        "the refusal",
        lambda: "storage_bytes_max" in admin.topic_stats("/small/other")["partition_stats"][0]["refusal"],
        WAIT_SECONDS,
    )  # fmt: skip
    with (
        client.producer("/small/other", timeout=5) as producer,
        pytest.raises(danube_fast.DanubeError, match="storage_bytes_max"),
    ):
        producer.publish(b"x" * 10)
    admin.purge_topic("/small/spread")
    wait_until(
        "room again",
        lambda: not admin.topic_stats("/small/other")["partition_stats"][0]["refusal"],
        WAIT_SECONDS,
    )
    with client.producer("/small/other") as producer:
        producer.publish(b"x" * 10)


def test_a_policy_survives_a_kill_of_everything(tmp_path: Path) -> None:
    with Server(tmp_path / "data", workers=1) as server:
        with danube_fast.connect(server.url) as client:
            client.admin.create_topic("/default/kept")
            client.admin.set_topic_policy("/default/kept", {"message_bytes_max": 100})
        server.kill("all")
        server.start()
        with danube_fast.connect(server.url) as client:
            assert client.admin.topic_policy("/default/kept")["message_bytes_max"] == 100
            with (
                client.producer("/default/kept") as producer,
                pytest.raises(InvalidArgument, match="at most 100 bytes"),
            ):
                producer.publish(b"x" * 101)
