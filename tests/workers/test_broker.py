"""Whole brokers with real workers: what the coordinator and the workers owe each other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from danube_fast.net import protocol
from tests.workers.broker import Broker, Client, is_running, wait_until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", fake="", segment_bytes=4 << 20) as started:
        started.wait_ready()
        yield started


def partitions_served(broker: Broker) -> int:
    count: int = broker.status()["counters"]["partitions"]
    return count


def test_topics_from_birth_to_death(broker: Broker) -> None:
    with Client(broker) as client:
        made = client.admin("create_topic", topic="/default/a", durability="os", partitions=4)
        assert made["partitions"] == 4
        refused = client.ask(protocol.Admin, "create_topic", {"topic": "/default/a"})
        assert refused.code == 6
        assert client.lookup("/default/a").value["durability"] == "os"
        stats = client.admin("topic_stats", topic="/default/a")
        assert [entry["partition"] for entry in stats["partition_stats"]] == [
            f"/default/a-part-{i}" for i in range(4)
        ]
        assert {entry["log_id"] for entry in stats["partition_stats"]} == {0, 1}
        client.admin("set_topic", topic="/default/a", durability="fsync")
        stats = client.admin("topic_stats", topic="/default/a")
        assert {entry["durability"] for entry in stats["partition_stats"]} == {"fsync"}
        first = {row[0] for row in client.lookup("/default/a").value["partitions"]}
        client.admin("delete_topic", topic="/default/a")
        assert client.lookup("/default/a").code == 5
        again = client.lookup("/default/a", {"partitions": 4}).value
        assert not first & {row[0] for row in again["partitions"]}
        assert client.admin("list_topics", pattern="/default/?")[0]["topic"] == "/default/a"
        assert client.admin("list_subscriptions", topic="/default/a") == []
        assert client.ask(protocol.Admin, "topic_stats", {"topics": "x"}).code == 3
        assert client.ask(protocol.Admin, "no_such_thing", {}).code == 5
        assert client.ask(protocol.Lookup, "/default/b", {"durability": "object"}).code == 3
        assert client.ask(protocol.Lookup, "/nowhere/b", {}).code == 5


def test_everything_killed_at_once_comes_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Broker(data, fake="", segment_bytes=4 << 20) as broker:
        broker.wait_ready()
        with Client(broker) as client:
            before = client.lookup("/default/a", {"partitions": 6}).value["partitions"]
        for pid in (broker.process.pid, *broker.pids):
            os.kill(pid, signal.SIGKILL)
        broker.process.wait()
        wait_until("end of all", lambda: not any(map(is_running, broker.pids)))
    with Broker(data, fake="", segment_bytes=4 << 20) as broker:
        broker.wait_ready()
        with Client(broker) as client:
            after = client.lookup("/default/a").value["partitions"]
            assert [row[:3] for row in after] == [row[:3] for row in before]
            assert client.lookup("/default/b", {}).value["partitions"][0][0] > after[-1][0]
            stats = client.admin("topic_stats", topic="/default/a")
            assert len(stats["partition_stats"]) == 6


def test_topic_deleted_while_its_worker_is_down(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 1, "restart_delay_ms": 1500, "segment_bytes": 4 << 20}
    with Broker(tmp_path / "data", fake="", **settings) as broker:
        broker.wait_ready()
        with Client(broker) as client:
            for name in ("a", "b"):
                client.lookup(f"/default/{name}", {})
            wait_until("counters", lambda: partitions_served(broker) == 2)
            os.kill(broker.ready["worker_pids"][0], signal.SIGKILL)
            wait_until("death", lambda: broker.status()["processes"][1]["state"] == "failed")
            client.admin("delete_topic", topic="/default/a")
            assert isinstance(client.lookup("/default/b", None, 60_000), protocol.Result)
            wait_until("the worker drops it", lambda: partitions_served(broker) == 1)
            stats = client.admin("topic_stats", topic="/default/b")
            assert len(stats["partition_stats"]) == 1


def test_coordinator_dies_while_topics_are_created(broker: Broker) -> None:
    """Whatever was answered exists afterwards, and nothing exists twice."""
    answered: dict[str, int] = {}
    for attempt in range(2):
        with Client(broker) as client:
            requests = {
                client.send(protocol.Lookup, f"/default/t{attempt}-{i}", {}, 60_000): i
                for i in range(200)
            }
            for _ in range(50):
                answer = client.receive()
                assert isinstance(answer, protocol.Result), answer
                i = requests[answer.request]
                answered[f"/default/t{attempt}-{i}"] = answer.value["partitions"][0][0]
            pid = broker.status()["processes"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until("death", lambda pid=pid: not is_running(pid))
    with Client(broker) as client:
        listed = {entry["topic"] for entry in client.admin("list_topics")}
        assert set(answered) <= listed
        found = {
            topic: client.lookup(topic, None, 60_000).value["partitions"][0][0] for topic in listed
        }
        assert {topic: found[topic] for topic in answered} == answered
        assert len(set(found.values())) == len(found)


def test_a_thousand_at_once(tmp_path: Path) -> None:
    """First publish and subscribe of 1,000 fresh topics: no NotFound, nothing made twice."""
    with Broker(tmp_path / "data", fake="", workers=4, segment_bytes=4 << 20) as broker:
        broker.wait_ready()
        context: zmq.Context[Any] = zmq.Context()
        clients = [Client(broker, context) for _ in range(100)]
        topics = [f"/default/t{'x' * (i % 3)}{i}" for i in range(1000)]
        asked: list[dict[int, str]] = [{} for _ in clients]
        for i, topic in enumerate(topics):
            for step, create in ((0, None), (31, {}), (57, {"dispatch": "reliable"})):
                slot = (i + step) % len(clients)
                request = clients[slot].send(protocol.Lookup, topic, create, 60_000)
                asked[slot][request] = topic
        found: dict[str, set[int]] = {topic: set() for topic in topics}
        for client, requests in zip(clients, asked, strict=True):
            for _ in range(len(requests)):
                answer = client.receive()
                assert isinstance(answer, protocol.Result), answer
                (row,) = answer.value["partitions"]
                found[requests.pop(answer.request)].add(row[0])
        for client in clients:
            client.close()
        context.term()
        ids = list(found.values())
        assert all(len(some) == 1 for some in ids), "two ids for one topic"
        assert len(set().union(*ids)) == 1000, "one id for two topics"
        status = broker.status()
        assert status["topics"] == status["partitions"] == 1000


def test_commit_cursors_of_all_logs_reach_the_coordinator(broker: Broker) -> None:
    def cursors() -> list[dict[str, int]]:
        logs: list[dict[str, int]] = broker.status()["logs"]
        return logs

    wait_until("a word of every log", lambda: all("synced_position" in x for x in cursors()))
    before = cursors()
    with Client(broker) as client:
        client.admin("create_topic", topic="/default/a", partitions=8)  # recorded in both logs

    def moved() -> bool:
        return all(
            old["synced_position"] < new["synced_position"] <= new["written_position"]
            and old["oldest_position"] == new["oldest_position"]
            for old, new in zip(before, cursors(), strict=True)
        )

    wait_until("cursors that moved", moved)
