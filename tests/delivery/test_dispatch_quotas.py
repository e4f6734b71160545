"""Rates of deliveries that a namespace's quota allows, over a real broker of two workers with segments as they are by default."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import danube_fast
from danube_fast.config import Settings
from tests.crash.rig import SMALL, Server
from tests.delivery.test_namespace_quotas import FRAME_BYTES, PAYLOAD, Sample, check, workers_of


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[danube_fast.Client]:
    defaults = Settings()
    large = {name: getattr(defaults, name) for name in SMALL}
    folder = tmp_path_factory.mktemp("dispatch")
    with Server(folder / "data", workers=2, **large) as server, server.client() as connected:
        yield connected


def handed_out(client: danube_fast.Client, topics: list[str], unit: int) -> Sample:
    """How much subscriptions that ack nothing have handed out, as the broker counts it."""
    count, after = 0, time.monotonic()
    for topic in topics:
        count += sum(row["unacked"] for row in client.admin.list_subscriptions(topic))
    return Sample(after, time.monotonic(), count * unit)


@pytest.mark.parametrize(
    ("what", "rate", "unit"), [("messages", 4000, 1), ("bytes", 4_000_000, len(PAYLOAD))]
)
def test_a_dispatch_rate_holds_over_all_subscriptions_in_each_second(
    client: danube_fast.Client, what: str, rate: int, unit: int
) -> None:
    """Of batches as large as they are by default; counted where they are handed out."""
    admin = client.admin
    namespace = f"dripping-{what}"
    admin.create_namespace(namespace)
    topics = [f"/{namespace}/t{number}" for number in range(4)]
    for topic in topics:
        admin.create_topic(topic, durability="os")
        with client.producer(topic) as producer:
            producer.send_many([PAYLOAD] * 8000)
    admin.set_namespace_quota(namespace, {f"namespace_dispatch_{what}_per_second": rate})
    assert workers_of(client, topics) == {0, 1}
    samples: list[Sample] = []
    options: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}
    with ExitStack() as stack:
        consumers = [stack.enter_context(client.consumer(each, **options)) for each in topics]
        begun = time.monotonic()
        while time.monotonic() < begun + 5:
            samples.append(handed_out(client, topics, unit))
            for consumer in consumers:
                consumer.receive_batch(timeout=0.001)
    check(f"dispatch of {what}", samples, rate, 1.1)


def test_readers_and_subscriptions_draw_on_one_dispatch_rate(
    client: danube_fast.Client,
) -> None:
    admin, rate, count = client.admin, 1000, 3000
    admin.create_namespace("shared")
    topics = [f"/shared/t{number}" for number in range(4)]
    for topic in topics:
        admin.create_topic(topic, durability="os")
        with client.producer(topic, batch_bytes_max=FRAME_BYTES) as producer:
            producer.send_many([PAYLOAD] * count)
    admin.set_namespace_quota("shared", {"namespace_dispatch_messages_per_second": rate})
    assert workers_of(client, topics) == {0, 1}
    options: dict[str, Any] = {"initial_position": "earliest"}
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(client.consumer(topic, subscription="s", **options))
            for topic in topics[:3]
        ]
        consumers.append(stack.enter_context(client.reader(topics[3], stop=None)))
        total, begun = 0, time.monotonic()
        while time.monotonic() < begun + 3:
            for consumer in consumers:
                total += len(consumer.receive_batch(count, timeout=0.02))
        # received can be no more than was handed out since then, behind a burst
        assert 0.5 * rate <= total / (time.monotonic() - begun) <= 1.1 * rate, total
