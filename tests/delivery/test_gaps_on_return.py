"""A consumer that comes back hears what was lost while it was away, whatever happened to its partition since."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server

TOPIC = "/default/away"
MESSAGES = 500
WAIT_SECONDS = 60.0


@pytest.mark.parametrize("meanwhile", ["nothing", "move", "restart", "kill"])
@pytest.mark.parametrize("partitions", [0, 2])
def test_a_purge_while_away_is_told_on_return(
    tmp_path: Path, meanwhile: str, partitions: int
) -> None:
    with Server(tmp_path / "data", workers=2) as server:
        with danube_fast.connect(server.url) as client:
            client.admin.create_topic(TOPIC, partitions=partitions)
            client.consumer(TOPIC, subscription="s").close()
            with client.producer(TOPIC) as producer:
                producer.send_many([b"x"] * MESSAGES, keys=[f"k{n}" for n in range(MESSAGES)])
                producer.flush(timeout=WAIT_SECONDS)
            client.admin.purge_topic(TOPIC)
            if meanwhile == "move":
                placement = client.admin.describe_topic(TOPIC)["placement"]
                part = 0 if partitions else None
                client.admin.move_topic(TOPIC, 1 - placement[0]["worker"], partition=part)
        if meanwhile == "restart":
            server.stop()
            server.start()
        elif meanwhile == "kill":
            server.kill("all")
            server.start()
        heard: list[Any] = []
        with danube_fast.connect(server.url) as client:
            with client.consumer(TOPIC, subscription="s") as consumer:
                consumer.on_gap = heard.append
                deadline = time.monotonic() + WAIT_SECONDS
                while sum(gap.last - gap.first + 1 for gap in consumer.gaps) < MESSAGES:
                    consumer.receive(timeout=0.05)
                    told = list(consumer.gaps)
                    assert time.monotonic() < deadline, f"only {told} was told"
                assert all(gap.lost and "purged" in gap.reason for gap in consumer.gaps)
                assert len(consumer.gaps) == max(1, partitions)
                while len(heard) < len(consumer.gaps):
                    consumer.receive(timeout=0.05)
                    assert time.monotonic() < deadline, f"on_gap heard {heard}"
                assert sorted(heard) == sorted(consumer.gaps)
            with client.consumer(TOPIC, subscription="s") as consumer:
                consumer.lag()  # answered behind all that a consumer is told when it comes
                assert not consumer.gaps
