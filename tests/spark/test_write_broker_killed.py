"""Writes without a Spark session whose broker or worker is killed behind the commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube_fast.client.produce.frames import FramePublisher
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.write import publishing, rows, staging
from danube_fast.spark.write.publishing import BrokerLink, finish_batch, publish_proposal
from danube_fast.spark.write.record import list_batches
from danube_fast.spark.write.staging import open_staging
from danube_fast.testing.broker import Broker
from tests.spark.write_rig import assert_once, numbers, payloads_of, propose

COUNT = 2000


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Where rows are staged, as small objects."""
    monkeypatch.setattr(staging, "OBJECT_BYTES", 1000)
    return open_staging(f"file://{tmp_path}/staging")


def _kill_the_worker_at_half(own: Broker, link: BrokerLink, patch: pytest.MonkeyPatch) -> None:
    """Kill the worker when the first frame of a write is acked, and wait until another one is there."""
    opened: list[FramePublisher] = []

    def open_noted(topic: str, write_id: str) -> FramePublisher:
        opened.append(BrokerLink.open_frames(link, topic, write_id))
        return opened[-1]

    def reached(step: str) -> None:
        if step == "half":
            link.flush_frames(opened[-1])
            own.kill_worker(0)
            with own.client() as client:
                client.publish("/default/other", b"another worker is there")

    patch.setattr(link, "open_frames", open_noted)
    patch.setattr(publishing, "reached", reached)
    patch.setattr(rows, "CHUNK_BYTES", 1)


@pytest.mark.parametrize(
    ("write_id", "query", "text"),
    [
        ("nightly", "", "run the job again with the same write_id, or `danube-fast spark writes"),
        ("once-1", "", r"run `danube-fast spark writes resume once-1` \(a job that is run again"),
        ("stream-q", "q", "start the query again with the same checkpoint, or run `danube-fast"),
    ],
)
def test_the_broker_is_killed_behind_the_commit(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, write_id: str, query: str, text: str
) -> None:
    """The error says how the rest is published, once, and the way that it names does that."""
    with Broker() as own, own.client() as client:
        client.admin.create_topic("/default/cut", durability="fsync")
        with BrokerLink(own.url, 1) as link, monkeypatch.context() as patch:
            patch.setattr(publishing, "reached", lambda at: own.kill() if at == "half" else None)
            patch.setattr(rows, "CHUNK_BYTES", 1)
            rest = propose(link, store, "/default/cut", write_id, numbers(0, COUNT), query=query)
            with pytest.raises(
                DanubeError, match=f"write_id {write_id}, batch 0, are .*{text}"
            ) as raised:
                publish_proposal(link, store, rest)
        assert "timeoutSeconds" in str(raised.value)
        assert "timeout=" not in str(raised.value) and "producer name" not in str(raised.value)
        own.start()
        (state,) = list_batches(store, write_id)
        with BrokerLink(own.url, 30) as link:
            assert finish_batch(link, store, state) == COUNT
        assert_once(client, "/default/cut", numbers(0, COUNT))


def test_the_worker_is_killed_while_rows_are_published(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable topic has each row once. One in memory has lost some: doubtful from then on, and no row doubles."""
    with Broker() as own, own.client() as client:
        for durability in ("fsync", "memory"):
            topic = f"/default/{durability}"
            client.admin.create_topic(topic, durability=durability)
            with monkeypatch.context() as patch, BrokerLink(own.url, 30) as link:
                _kill_the_worker_at_half(own, link, patch)
                proposal = propose(link, store, topic, durability, numbers(0, COUNT))
                if durability == "fsync":
                    assert publish_proposal(link, store, proposal) == COUNT
                    assert_once(client, topic, numbers(0, COUNT))
                    continue
                with pytest.raises(DataLoss, match="has lost messages that it had acked"):
                    publish_proposal(link, store, proposal)
            with (
                BrokerLink(own.url, 30) as link,
                pytest.raises(FailedPrecondition, match="it cannot be told which rows"),
            ):
                publish_proposal(link, store, proposal)
            found = payloads_of(client, topic)
            assert len(found) == len(set(found)) < COUNT
