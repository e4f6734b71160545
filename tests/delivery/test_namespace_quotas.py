"""Quotas of namespaces over a real broker of two workers: what all topics of a namespace take together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import DanubeError, InvalidArgument, NotFound, ResourceExhausted
from tests.crash.rig import Server
from tests.delivery.quota_rig import (
    FRAME_BYTES,
    PAYLOAD,
    WAIT_SECONDS,
    Publishers,
    Sample,
    accepted,
    check,
)
from tests.workers.broker import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("quotas") / "data", workers=2, session_timeout_ms=30_000
    ) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[danube_fast.Client]:
    with danube_fast.connect(server.url) as connected:
        yield connected


def used(client: danube_fast.Client, namespace: str, name: str) -> int:
    return int(client.admin.describe_namespace(namespace)["quota"][name]["used"])


def answers(client: danube_fast.Client) -> bool:
    """Whether the coordinator, which was killed, is back."""
    try:
        return bool(client.admin.list_namespaces())
    except DanubeError:
        return False


def publish(client: danube_fast.Client, topic: str, count: int) -> None:
    with client.producer(topic, timeout=2, batch_bytes_max=FRAME_BYTES) as producer:
        producer.send_many([PAYLOAD] * count)
        producer.flush(timeout=WAIT_SECONDS)


def workers_of(client: danube_fast.Client, topics: list[str]) -> set[int]:
    describe = client.admin.describe_topic
    return {place["worker"] for topic in topics for place in describe(topic)["placement"]}


# ---------------------------------------------------------------- rates


def test_a_publish_rate_holds_over_all_topics_and_workers_in_each_second(
    client: danube_fast.Client, server: Server
) -> None:
    """Four topics on two workers, published to without a pause, once by messages and, changed live, at half of it."""
    admin, rate = client.admin, 2000
    admin.create_namespace("paced")
    topics = [f"/paced/t{number}" for number in range(4)]
    for topic in topics:
        admin.create_topic(topic, durability="os", partitions=2)
    admin.set_namespace_quota("paced", {"namespace_publish_messages_per_second": rate})
    assert workers_of(client, topics) == {0, 1}

    def measure(seconds: float) -> list[Sample]:
        samples = [accepted(client, topics)]
        while samples[-1].after < samples[0].after + seconds:
            samples.append(accepted(client, topics))
        return samples

    with Publishers(server, topics, timeout=WAIT_SECONDS) as publishers:
        wait_until("the first messages", lambda: accepted(client, topics).count, WAIT_SECONDS)
        check("full", measure(6), rate, 1.1)
        admin.set_namespace_quota("paced", {"namespace_publish_messages_per_second": rate // 2})
        check("half", measure(5), rate // 2, 1.1)
    assert not publishers.errors


# ---------------------------------------------------------------- storage


def test_storage_is_bounded_over_all_topics_and_space_that_is_freed_is_taken_again(
    client: danube_fast.Client, server: Server
) -> None:
    """Publishers without a pause on two workers end just where the quota does."""
    admin, limit = client.admin, 20_000_000
    admin.create_namespace("small")
    topics = [f"/small/t{number}" for number in range(4)]
    for topic in topics:
        admin.create_topic(topic, durability="os", partitions=2)
    admin.set_namespace_quota("small", {"namespace_storage_bytes_max": limit})
    assert workers_of(client, topics) == {0, 1}
    with Publishers(server, topics) as publishers:
        publishers.join()
    assert len(publishers.errors) >= 4
    for error in publishers.errors:
        assert isinstance(error, ResourceExhausted), error
        assert "namespace small" in str(error) and "namespace_storage_bytes_max" in str(error)
    kept = sum(admin.topic_stats(topic)["bytes_in"] for topic in topics)
    text = f"{kept} bytes are kept of {limit}: {kept - limit:+d}"
    print(text)
    assert limit - 8 * FRAME_BYTES <= kept <= limit + 2 * FRAME_BYTES, text
    wait_until(
        "the same in what is used",
        lambda: used(client, "small", "namespace_storage_bytes_max") == kept,
        WAIT_SECONDS,
    )
    admin.purge_topic(topics[0])
    begun = time.monotonic()
    with client.producer(topics[1], timeout=WAIT_SECONDS) as producer:
        producer.send_many([PAYLOAD] * 1000)
        producer.flush(timeout=WAIT_SECONDS)
    print(f"space that a purge freed was taken after {time.monotonic() - begun:.2f} s")


def test_a_publisher_hears_that_the_quota_is_full_and_what_to_do(
    client: danube_fast.Client,
) -> None:
    admin = client.admin
    admin.create_namespace("full")
    admin.create_topic("/full/t", durability="os")
    admin.set_namespace_quota("full", {"namespace_storage_bytes_max": "50kB"})
    acked = 0

    def fill(producer: danube_fast.Producer) -> None:
        nonlocal acked
        for _ in range(1000):
            producer.publish(PAYLOAD)
            acked += 1

    with client.producer("/full/t", timeout=1.5) as full, pytest.raises(ResourceExhausted) as caught:  # fmt: skip
        fill(full)
    text = str(caught.value)
    assert text.startswith(
        "the broker refused it when it was last sent, and has not stored it: namespace full keeps"
    ), text
    assert text.endswith("danube-fast namespaces set-quota full namespace_storage_bytes_max=N"), (
        text
    )
    assert "may have been stored" not in text
    assert admin.topic_stats("/full/t")["messages_in"] == acked > 0


def test_a_topic_cannot_set_a_value_over_the_quota_of_its_namespace(
    client: danube_fast.Client,
) -> None:
    admin = client.admin
    admin.create_namespace("bounded")
    admin.create_topic("/bounded/t")
    admin.set_namespace_quota("bounded", {"namespace_storage_bytes_max": "50kB"})
    with pytest.raises(InvalidArgument, match="namespaces set-quota"):
        admin.set_topic_policy("/bounded/t", {"namespace_storage_bytes_max": 1 << 40})
    with pytest.raises(InvalidArgument, match="namespaces set-quota"):
        admin.set_namespace_policy("bounded", {"namespace_storage_bytes_max": 1 << 40})
    with pytest.raises(NotFound):
        admin.set_namespace_quota("nowhere", {"namespace_topics_max": 1})
    admin.set_topic_policy("/bounded/t", {"storage_bytes_max": 1 << 40})
    with pytest.raises(ResourceExhausted, match="namespace bounded"):
        publish(client, "/bounded/t", 100)
    with pytest.raises(InvalidArgument, match="there are:"):
        admin.set_namespace_quota("bounded", {"producers_max": 1})
    assert admin.topic_policy("/bounded/t")["storage_bytes_max"] == 1 << 40


# ---------------------------------------------------------------- topics


def test_topics_are_never_more_than_the_quota_whoever_makes_them_at_once(
    client: danube_fast.Client, server: Server
) -> None:
    """Sixteen clients, half of which create topics, and half of which open producers on missing ones."""
    admin, limit = client.admin, 20
    admin.create_namespace("few")
    admin.set_namespace_quota("few", {"namespace_topics_max": limit})
    refused: list[str] = []

    def make(number: int) -> int:
        made = 0
        with server.client() as own:
            for each in range(5):
                topic = f"/few/t{number}-{each}"
                try:
                    if number % 2:
                        own.admin.create_topic(topic)
                    else:
                        own.producer(topic).close()
                    made += 1
                except ResourceExhausted as error:
                    refused.append(str(error))
        return made

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(make, range(16))) == limit
    assert len(refused) == 60 and all("namespace_topics_max 20" in text for text in refused)
    topics = [each["topic"] for each in admin.list_topics(namespace="few")]
    assert len(topics) == used(client, "few", "namespace_topics_max") == limit
    admin.delete_topic(topics[0])
    admin.create_topic("/few/again")
    with pytest.raises(ResourceExhausted):
        admin.create_topic("/few/more")
    admin.set_namespace_quota("few", {"namespace_topics_max": None})
    admin.create_topic("/few/more")


# ---------------------------------------------------------------- handles


def refused(action: Callable[[], Any]) -> bool:
    """Whether there is no place for one more handle."""
    try:
        action().close()
    except ResourceExhausted as error:
        return "namespace_handles_max" in str(error)
    return False


def test_handles_are_counted_over_both_workers_and_those_that_are_closed_are_free(
    client: danube_fast.Client, server: Server
) -> None:
    admin, limit = client.admin, 10
    admin.create_namespace("crowd")
    topics = [f"/crowd/t{number}" for number in range(4)]
    for topic in topics:
        admin.create_topic(topic, durability="os")
    admin.set_namespace_quota("crowd", {"namespace_handles_max": limit})
    assert workers_of(client, topics) == {0, 1}

    def open_one(number: int) -> Any:
        topic = topics[number % 4]
        try:
            if number % 3 == 0:
                return client.producer(topic, name=f"p{number}")
            if number % 3 == 1:
                return client.consumer(topic, subscription=f"s{number}")
            return client.reader(topic)
        except ResourceExhausted:
            return None

    with ThreadPoolExecutor(16) as pool:
        handles = [handle for handle in pool.map(open_one, range(32)) if handle is not None]
    # of two that take the last place at once, on two workers, both may be refused
    assert limit - 1 <= len(handles) <= limit
    while len(handles) < limit:
        handles.append(client.reader(topics[0]))
    assert used(client, "crowd", "namespace_handles_max") == limit
    for topic in topics:
        assert refused(lambda topic=topic: client.producer(topic, name="late"))
        assert refused(lambda topic=topic: client.consumer(topic, subscription="late"))
        assert refused(lambda topic=topic: client.reader(topic))
    for handle in handles[:5]:
        handle.close()
    wait_until("a place", lambda: not refused(lambda: client.reader(topics[1])), WAIT_SECONDS)
    admin.set_namespace_quota("crowd", {"namespace_handles_max": None})
    assert not refused(lambda: client.producer(topics[0], name="late"))
    for handle in handles[5:]:
        handle.close()


# ---------------------------------------------------------------- moves and kills


def test_moves_and_kills_neither_double_nor_leak(tmp_path: Path) -> None:
    limit = 4_000_000
    with Server(tmp_path / "data", workers=2, session_timeout_ms=30_000) as server:
        with server.client() as client:
            admin = client.admin
            admin.create_namespace("moving")
            topics = [f"/moving/t{number}" for number in range(4)]
            for topic in topics:
                admin.create_topic(topic, durability="os")
            admin.set_namespace_quota(
                "moving", {"namespace_storage_bytes_max": limit, "namespace_handles_max": 4}
            )
            assert workers_of(client, topics) == {0, 1}
            options: dict[str, Any] = {"batch_bytes_max": FRAME_BYTES, "timeout": WAIT_SECONDS}
            producers = [client.producer(topic, name="p", **options) for topic in topics]
            for producer in producers:
                producer.send_many([PAYLOAD] * 500)
                producer.flush(timeout=WAIT_SECONDS)
            names = ("namespace_storage_bytes_max", "namespace_handles_max")
            seen: list[Any] = []

            def is_counted() -> bool:
                known = sum(admin.topic_stats(topic)["bytes_in"] for topic in topics)
                seen[:] = [used(client, "moving", name) for name in names], [known, 4]
                return bool(seen[0] == seen[1])

            wait_until("the count", is_counted, WAIT_SECONDS)
            for topic in topics:
                place = admin.describe_topic(topic)["placement"][0]
                admin.move_topic(topic, worker=1 - place["worker"])
            for producer in producers:  # they open again where their topic is now
                producer.publish(b"")
            try:
                wait_until("the count after moves", is_counted, WAIT_SECONDS)
            except AssertionError as error:
                raise AssertionError(f"{error}: counted and known: {seen}") from error
            known = seen[1][0]
            assert refused(lambda: client.reader(topics[0]))
            for victim in (1, 2):
                server.kill("worker", victim)
                for producer in producers:
                    producer.publish(b"")
            server.kill("coordinator")
            for producer in producers:
                producer.publish(b"")
            wait_until("the coordinator", lambda: answers(client), WAIT_SECONDS)

            def kept() -> int:
                return sum(
                    row["end_offset"]
                    for topic in topics
                    for row in admin.topic_stats(topic)["partition_stats"]
                )

            assert kept() == 4 * (500 + 4)
            # 16 frames of one empty message came since, of less than 200 bytes each
            wait_until(
                "the count after kills",
                lambda: (
                    known <= used(client, "moving", names[0]) <= known + 16 * 200
                    and used(client, "moving", names[1]) == 4
                ),
                WAIT_SECONDS,
            )
            assert refused(lambda: client.reader(topics[0]))
            with pytest.raises(ResourceExhausted, match="namespace moving"):
                publish_until_refused(client, topics[0], producers[0])
            total = used(client, "moving", names[0])
            wait_until(
                "the end",
                lambda: used(client, "moving", names[0]) >= limit - 2 * FRAME_BYTES,
                WAIT_SECONDS,
            )
            assert used(client, "moving", names[0]) <= limit + FRAME_BYTES, total
        server.kill("all")
        server.start()
        with server.client() as client:
            quota = client.admin.describe_namespace("moving")["quota"]
            assert quota["namespace_storage_bytes_max"]["limit"] == limit
            wait_until(
                "the count after a restart",
                lambda: used(client, "moving", names[0]) >= limit - 2 * FRAME_BYTES,
                WAIT_SECONDS,
            )
            assert used(client, "moving", names[0]) <= limit + FRAME_BYTES
            with pytest.raises(ResourceExhausted, match="namespace moving"):
                publish(client, topics[1], 100)


def publish_until_refused(client: danube_fast.Client, topic: str, opened: Any) -> None:
    """Publish by a producer with a short patience in the place of one that is open."""
    opened.close()
    deadline = time.monotonic() + WAIT_SECONDS

    def open_again() -> Any:
        try:
            return client.producer(topic, name="p", timeout=2, batch_bytes_max=FRAME_BYTES)
        except ResourceExhausted:
            return None

    with wait_until("a place", open_again, WAIT_SECONDS) as producer:
        while time.monotonic() < deadline:
            producer.send_many([PAYLOAD] * 16)
