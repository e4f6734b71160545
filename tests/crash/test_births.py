"""Many fresh topics at once, over four workers; and names that begin alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import NotFound
from tests.crash.rig import Server

TOPICS = 1000
WORKERS = 4
STORM_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("births") / "data", workers=WORKERS) as started:
        yield started


async def storm(url: str, topics: list[str]) -> dict[str, list[tuple[int, bytes | None]]]:
    """Two first publishes and one first subscribe for every topic, from three clients, all at once;
    what each consumer received."""
    first, second, third = [
        await danube_fast.connect_async(url, name=name) for name in ("first", "second", "third")
    ]

    async def take(topic: str) -> list[tuple[int, bytes | None]]:
        consumer = await third.consumer(
            topic, subscription="s", initial_position="earliest", timeout=STORM_SECONDS
        )
        got: list[tuple[int, bytes | None]] = []
        while len(got) < 2:
            message = await consumer.receive(timeout=STORM_SECONDS)
            assert message is not None, f"{topic}: only {got} came"
            assert message.topic == topic
            got.append((message.offset, message.payload))
            await consumer.ack(message)
        assert await consumer.receive(timeout=0.001) is None
        return got

    async with first, second, third:
        jobs: list[Any] = []
        for topic in topics:
            jobs.append(take(topic))
            jobs.append(first.publish(topic, topic.encode() + b" first"))
            jobs.append(second.publish(topic, topic.encode() + b" second"))
        done = await asyncio.gather(*jobs)
    for at, topic in enumerate(topics):
        ids = {done[3 * at + 1], done[3 * at + 2]}
        assert ids == {danube_fast.MessageId(topic, 0), danube_fast.MessageId(topic, 1)}
    return {topic: done[3 * at] for at, topic in enumerate(topics)}


def test_a_thousand_first_publishes_and_subscribes(server: Server) -> None:
    """No NotFound, nothing made twice, nobody gets another topic's messages."""
    topics = [f"/default/{'ab' * (i % 3)}{i}" for i in range(TOPICS)]
    with server.client() as client:
        before = {entry["topic"] for entry in client.admin.list_topics()}
    received = asyncio.run(storm(server.url, topics))
    for topic, messages in received.items():
        offsets, payloads = zip(*messages, strict=True)
        assert offsets == (0, 1)
        assert set(payloads) == {f"{topic} first".encode(), f"{topic} second".encode()}
    with server.client() as client:
        listed = [entry["topic"] for entry in client.admin.list_topics()]
        assert sorted(listed) == sorted([*topics, *before])
        status = client.admin.cluster_status()
        assert status["topics"] == status["partitions"] == TOPICS + len(before)
        owners = {log["log_id"]: log["worker"] for log in status["logs"]}
        assert set(owners.values()) == set(range(WORKERS))


def test_names_that_begin_alike_are_never_confused(server: Server) -> None:
    names = ["/default/a", "/default/ab", "/default/a-b", "/default/A", "/default/abc"]
    with server.client() as client:
        for index, topic in enumerate(names):
            for number in range(index + 1):
                client.publish(topic, f"{topic} {number}".encode())
            with client.consumer(topic, subscription="s", initial_position="earliest") as consumer:
                assert [consumer.receive(timeout=60).payload for _ in range(index + 1)] == [
                    f"{topic} {number}".encode() for number in range(index + 1)
                ]
        check_each(client, names, names)
        places = {n: client.admin.describe_topic(n)["partitions"] for n in names}
        client.admin.delete_subscription("/default/ab", "s")
        assert client.admin.list_subscriptions("/default/ab") == []
        assert len(client.admin.list_subscriptions("/default/a")) == 1
        client.admin.delete_topic("/default/a")
        check_each(client, names, names[1:])
    server.kill("all")
    server.start()
    with server.client() as client:
        check_each(client, names, names[1:])
        for topic in names[1:]:
            assert client.admin.describe_topic(topic)["partitions"] == places[topic]
        assert client.publish("/default/a", b"born again").offset == 0
        assert [m.payload for m in client.reader("/default/a")] == [b"born again"]
        check_each(client, names, names[1:])
        assert client.admin.list_subscriptions("/default/a") == []


def check_each(client: Any, names: list[str], alive: list[str]) -> None:
    """Lookup, list and stats of every topic speak of that one."""
    for index, topic in enumerate(names):
        if topic not in alive:
            continue
        assert [entry["topic"] for entry in client.admin.list_topics(pattern=topic)] == [topic]
        assert client.admin.describe_topic(topic)["topic"] == topic
        (stats,) = client.admin.topic_stats(topic)["partition_stats"]
        assert (stats["partition"], stats["next_offset"]) == (topic, index + 1)
        assert [message.payload for message in client.reader(topic)] == [
            f"{topic} {number}".encode() for number in range(index + 1)
        ]
    gone = {entry["topic"] for entry in client.admin.list_topics()} & set(names) - set(alive)
    if "/default/a" not in alive and not gone:
        for question in (client.admin.describe_topic, client.admin.topic_stats):
            with pytest.raises(NotFound):
                question("/default/a")
        with pytest.raises(NotFound):
            client.reader("/default/a", timeout=0.1)
