"""One subscription that nobody consumes any more: its topic is refused at the quota, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import ResourceExhausted
from tests.crash.rig import Server
from tests.workers.broker import wait_until

SEGMENT_BYTES = 1 << 20
QUOTA_BYTES = 8 * SEGMENT_BYTES
PINNED, FREE = "/default/pinned", "/default/free"
PAYLOADS = [bytes(1000)] * 500
TAKEN_MAX = 10 * QUOTA_BYTES // len(PAYLOADS[0])
WAIT_SECONDS = 60.0


def publish_until_refused(producer: Any) -> tuple[int, str]:
    """Publish batches until one is refused; how many messages were taken, and what it said."""
    taken = 0
    while taken < TAKEN_MAX:
        try:
            producer.send_many(PAYLOADS)
            producer.flush(timeout=WAIT_SECONDS)
        except ResourceExhausted as error:
            return taken, str(error)
        taken += len(PAYLOADS)
    pytest.fail(f"{taken} messages and no refusal")


def publish_and_consume(producer: Any, consumer: Any, rounds: int) -> None:
    """The other topic goes on."""
    for _ in range(rounds):
        producer.send_many(PAYLOADS)
        producer.flush(timeout=WAIT_SECONDS)
        received = 0
        while received < len(PAYLOADS):
            batch = consumer.receive_batch(timeout=WAIT_SECONDS)
            assert batch, "the other topic stands still"
            received += len(batch)
            consumer.ack(batch)


def test_only_the_topic_of_a_forgotten_subscription_is_refused(tmp_path: Path) -> None:
    server = Server(
        tmp_path / "data", workers=1, segment_bytes=SEGMENT_BYTES, wal_bytes_max=QUOTA_BYTES,
        retention_seconds_min=0,
    )  # fmt: skip
    with (
        server,
        danube_fast.connect(server.url) as client,
        client.producer(PINNED, durability="fsync", timeout=3) as pinned,
        client.producer(FREE, durability="os") as free,
        client.consumer(FREE, subscription="s", initial_position="earliest") as consumer,
    ):
        client.consumer(PINNED, subscription="forgotten", initial_position="earliest").close()
        taken, text = publish_until_refused(pinned)
        assert "'forgotten'" in text and PINNED in text and "delete" in text
        publish_and_consume(free, consumer, 3 * QUOTA_BYTES // (len(PAYLOADS) * 1000))
        with pytest.raises(ResourceExhausted, match="'forgotten'"):
            pinned.publish(b"still refused")
        with client.consumer(PINNED, subscription="forgotten") as late:
            received = 0
            while received < taken and (batch := late.receive_batch(timeout=WAIT_SECONDS)):
                received += len(batch)
            assert received >= taken  # nothing that was acked is lost meanwhile
        client.admin.delete_subscription(PINNED, "forgotten")
        wait_until(
            "room in the log",
            lambda: server.status()["counters"]["log_bytes"] <= QUOTA_BYTES,
            WAIT_SECONDS,
        )
        assert pinned.publish(b"taken again").offset >= taken
        publish_and_consume(free, consumer, 2)
