"""A consumer that gets nothing: it beats, is answered, and wakes up for next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube_fast.client.link.connection import Connection
from danube_fast.client.link.pump import Pump
from tests.crash.rig import Server
from tests.shm.test_straight import stopped
from tests.workers.broker import wait_until

BEAT_MS = 50
TIMEOUT_MS = 1000
IDLE_SECONDS = 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    data_dir: Path = tmp_path_factory.mktemp("idle") / "data"
    with Server(
        data_dir, workers=1, heartbeat_ms=BEAT_MS, session_timeout_ms=TIMEOUT_MS,
        heartbeat_timeout_ms=300_000,
    ) as made:  # fmt: skip
        yield made


def test_an_idle_consumer_wakes_rarely_and_keeps_its_session(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its heartbeats, whose answers kernels take, its calls hear nothing."""
    with (
        server.client(transport="shm") as client,
        client.producer("/default/idle") as producer,
        client.consumer("/default/idle", subscription="s") as consumer,
    ):
        producer.publish(b"1")
        first = consumer.receive(timeout=60)
        assert first is not None
        consumer.ack(first)
        slept: list[int] = []
        renewed: list[Connection] = []
        sleep, renew = Pump._sleep, Connection._renew

        def count(pump: Pump, row: int, limit_ns: int) -> None:
            slept.append(limit_ns)
            sleep(pump, row, limit_ns)

        def note(connection: Connection) -> None:
            renewed.append(connection)
            renew(connection)

        monkeypatch.setattr(Pump, "_sleep", count)
        monkeypatch.setattr(Connection, "_renew", note)
        assert consumer.receive(timeout=IDLE_SECONDS) is None
        assert len(slept) < IDLE_SECONDS * 1000 / BEAT_MS / 3, "a heartbeat wakes the caller"
        assert not renewed, "the answers were not heard"
        with stopped(server):
            wait_until("the loss of a silent worker", lambda: renewed)
        producer.publish(b"2")
        second = consumer.receive(timeout=60)
        assert second is not None and second.payload == b"2"
