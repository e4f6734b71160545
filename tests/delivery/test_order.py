"""Order over a real broker: what was given back goes first, and delays turn round nothing but themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server

WAIT_SECONDS = 120.0
MIB = 1 << 20
PAYLOAD = b"x" * 4096
HELD = 4000
"""Of PAYLOAD: four times what a worker reads of its log in one turn."""


def receive(consumer: Any, count: int) -> list[danube_fast.Message]:
    """So many messages."""
    got: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(got) < count:
        got += list(consumer.receive_batch(1000, timeout=1))
        assert time.monotonic() < deadline, f"{len(got)} of {count} came within {WAIT_SECONDS} s"
    return got


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["exclusive", "failover"])
def test_nothing_fresh_goes_before_what_a_gone_consumer_held(tmp_path: Path, kind: str) -> None:
    """Most of it lies in the log, what is fresh in memory."""
    topic, fresh = "/default/held", 50
    options: dict[str, Any] = {
        "subscription": "s", "type": kind, "permits_bytes": 256 * MIB, "permits_messages": 100_000,
    }  # fmt: skip
    with (
        Server(tmp_path / "data", workers=1, tail_bytes_max=MIB) as server,
        server.client() as client,
        client.producer(topic, durability="os") as producer,
    ):
        with client.consumer(topic, **options) as first:
            producer.send_many([PAYLOAD] * HELD)
            producer.flush(timeout=WAIT_SECONDS)
            assert [each.offset for each in receive(first, HELD)] == list(range(HELD))
        producer.send_many([b"fresh"] * fresh)
        producer.flush(timeout=WAIT_SECONDS)
        with client.consumer(topic, **options) as second:
            came = receive(second, HELD + fresh)
        assert [each.offset for each in came] == list(range(HELD + fresh))
        assert [each.redelivery_count for each in came] == [1] * HELD + [0] * fresh
