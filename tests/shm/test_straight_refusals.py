"""Single publishes that the broker refuses: each ends with the error that says why."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ProducerFenced,
    ResourceExhausted,
    TopicDeleted,
)
from tests.crash.rig import Server
from tests.shm.test_straight import SECONDS, SOON_SECONDS, Team, stopped, stored, transport, waiting
from tests.workers.broker import wait_until

__all__ = ["transport"]


def test_a_deleted_topic_a_fenced_producer_and_a_throttled_topic(
    tmp_path: Path, transport: Any
) -> None:
    with (
        Server(tmp_path / "data", workers=1) as server,
        server.client(transport=transport) as client,
        server.client(transport=transport) as other,
    ):
        gone = client.producer("/default/gone", timeout=SECONDS)
        gone.publish(b"x")
        other.admin.delete_topic("/default/gone")
        with pytest.raises(TopicDeleted):
            gone.publish(b"y")

        fenced = client.producer("/default/fenced", name="same", timeout=SECONDS)
        fenced.publish(b"x")
        other.producer("/default/fenced", name="same").publish(b"y")
        with pytest.raises(ProducerFenced):
            fenced.publish(b"z")
        assert [*stored(client, "/default/fenced").values()] == [b"x", b"y"]

        paced = client.producer("/default/paced", timeout=1.0)
        paced.publish(b"x")
        other.admin.set_topic_policy("/default/paced", {"publish_bytes_per_second": 1000})
        wait_until("the policy", lambda: is_throttled(paced))
        other.admin.set_topic_policy("/default/paced", {"publish_bytes_per_second": None})
        wait_until("its end", lambda: not is_throttled(paced))
        assert max(Counter(stored(client, "/default/paced").values()).values()) == 1


def test_a_producer_that_is_closed_ends_the_calls_that_wait(tmp_path: Path, transport: Any) -> None:
    """The worker stands still: one thread waits for its ack, as the leader, and one on its row."""
    settings = {"session_timeout_ms": 300_000, "heartbeat_timeout_ms": 300_000}
    with (
        Server(tmp_path / "data", workers=1, **settings) as server,
        server.client(transport=transport) as client,
    ):
        producers = [client.producer(f"/default/closed-{number}") for number in range(2)]
        with stopped(server):
            team = Team(len(producers), lambda number: producers[number].publish(b"x"))
            wait_until("both calls", lambda: waiting(client) == len(producers))
            for producer in producers:
                with pytest.raises(DeadlineExceeded):
                    producer.close(timeout=0.1)
            for outcome in team.join(SOON_SECONDS).values():
                assert isinstance(outcome, FailedPrecondition), outcome
                assert "may have been stored" in str(outcome)


def is_throttled(producer: danube_fast.Producer) -> bool:
    """Publish a large message of its own; whether its rate did not let it through."""
    try:
        producer.publish(os.urandom(10_000))
    except ResourceExhausted as error:
        return "rate" in str(error)
    return False
