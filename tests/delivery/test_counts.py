"""`redelivery_count` counts what applications were handed: not what waited in the queue of a consumer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import FailedPrecondition
from tests.crash.rig import Server
from tests.workers.broker import ROOT, wait_until

MESSAGES = 500
FRAME = 100
NEXT = 64
"""A death counts so many messages behind those that the broker knows to be taken."""
WAIT_SECONDS = 60.0
KINDS = ("exclusive", "shared", "failover", "key_shared")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("counts") / "data", workers=2) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[danube_fast.Client]:
    with danube_fast.connect(server.url) as connected:
        yield connected


def publish(client: danube_fast.Client, topic: str, count: int = MESSAGES) -> None:
    """So many messages in frames of FRAME."""
    with client.producer(topic) as producer:
        for at in range(0, count, FRAME):
            numbers = range(at, at + FRAME)
            producer.send_many(
                [b"%d" % n for n in numbers], keys=[b"k%d" % (n % 7) for n in numbers]
            )
            producer.flush(timeout=WAIT_SECONDS)


def take_all(consumer: Any, count: int) -> dict[int, int]:
    """Redelivery counts by offset."""
    counts: dict[int, int] = {}
    while len(counts) < count:
        batch = consumer.receive_batch(timeout=WAIT_SECONDS)
        assert batch, f"{len(counts)} of {count} messages came"
        counts.update((message.offset, message.redelivery_count) for message in batch)
        consumer.ack(batch)
    return counts


def dying(server: Server, topic: str, **plan: Any) -> list[int]:
    """Let a process take messages until it is dead; their offsets."""
    defaults = {
        "type": "failover", "transport": "zmq", "take": 0, "reported": False, "killer": "",
        "how": "receive", "last": -1,
    }  # fmt: skip
    process = subprocess.run(
        [
            sys.executable, "-m", "tests.delivery.taking_process",
            json.dumps({"url": server.url, "topic": topic, **defaults, **plan}),
        ],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=4 * WAIT_SECONDS, check=False,
    )  # fmt: skip
    return [int(line) for line in process.stdout.split()]


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_close_counts_what_was_taken(server: Server, kind: str, transport: str) -> None:
    topic = f"/default/closed-{kind}-{transport}"
    with danube_fast.connect(server.url, transport=transport) as client:
        options: dict[str, Any] = {
            "subscription": "s",
            "type": kind,
            "initial_position": "earliest",
        }
        publish(client, topic)
        with client.consumer(topic, **options) as first:
            taken = {first.receive(timeout=WAIT_SECONDS).offset for _ in range(10)}
        with client.consumer(topic, **options) as second:
            batch = second.receive_batch(137, timeout=WAIT_SECONDS)
            assert {m.offset: m.redelivery_count for m in batch if m.redelivery_count} == (
                dict.fromkeys(taken & set(batch.offsets.tolist()), 1)
            )
            again = set(batch.offsets.tolist())
        with client.consumer(topic, **options) as third:
            counts = take_all(third, MESSAGES)
        assert counts == {at: (at in taken) + (at in again) for at in range(MESSAGES)}


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_death_counts_what_was_reported_and_the_next(
    server: Server, client: danube_fast.Client, transport: str
) -> None:
    topic = f"/default/died-{transport}"
    publish(client, topic)
    taken = dying(server, topic, take=2 * FRAME, reported=True, transport=transport)
    assert taken == list(range(2 * FRAME))
    with client.consumer(topic, subscription="s", type="failover") as consumer:
        counts = take_all(consumer, MESSAGES)
    assert counts == {at: int(at < 2 * FRAME + NEXT) for at in range(MESSAGES)}


def test_a_death_before_the_first_heartbeat_counts_the_first_messages(
    server: Server, client: danube_fast.Client
) -> None:
    topic = "/default/died-at-once"
    publish(client, topic)
    assert dying(server, topic, take=1) == [0]
    with client.consumer(topic, subscription="s", type="failover") as consumer:
        counts = take_all(consumer, MESSAGES)
    assert counts == {at: int(at < NEXT) for at in range(MESSAGES)}


@pytest.mark.parametrize("how", ["receive", "batch", "handler", "async_handler"])
def test_a_message_that_kills_its_process_becomes_a_dead_letter(
    server: Server, client: danube_fast.Client, how: str
) -> None:
    topic, dead = f"/default/deadly-{how}", f"/default/deadly-letters-{how}"
    client.admin.create_topic(topic)
    policy: dict[str, Any] = {
        "max_redelivery_count": 2, "poison_policy": "dead_letter", "dead_letter_topic": dead,
    }  # fmt: skip
    client.consumer(topic, subscription="s", type="failover", failure_policy=policy).close()
    payloads = [b"%d" % n for n in range(2 * FRAME)]
    payloads[3] = b"killer"
    with client.producer(topic) as producer:
        producer.send_many(payloads)
        producer.flush(timeout=WAIT_SECONDS)
    plan = {"killer": "killer", "how": how, "last": len(payloads) - 1}
    assert dying(server, topic, **plan) == [0, 1, 2, 3]
    lives = []
    while (taken := dying(server, topic, **plan))[-1] == 3:
        lives.append(taken)
        assert len(lives) <= policy["max_redelivery_count"] + 1, f"it goes on and on: {lives}"
    assert len(lives) == policy["max_redelivery_count"] + 1, "one death is not a failure"
    assert lives[-1] == [3], "what was acked does not come again"
    assert taken[-1] == len(payloads) - 1 and taken == sorted(set(taken))
    assert 3 not in taken, "all others come, in order, when it has gone"
    with client.consumer(dead, subscription="s", initial_position="earliest") as letters:
        message = letters.receive(timeout=WAIT_SECONDS)
        assert message is not None and message.payload == b"killer"
        assert message.attributes["x-failure-reason"] == "its consumer died"
    wait_until(  # it counts when its cursor knows that the letter is there
        "the count", lambda: client.admin.describe_subscription(topic, "s")["dead_letters"] == 1
    )


def test_messages_that_come_again_have_batches_of_their_own(client: danube_fast.Client) -> None:
    topic = "/default/apart"
    publish(client, topic, 2 * FRAME)
    options: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}
    for counts, sizes in (([0], [10]), ([1], [10]), ([2] * 10 + [0], [1] * 10 + [FRAME - 10])):
        with client.consumer(topic, **options) as consumer:
            for count, size in zip(counts, sizes, strict=True):
                limit = 10 if len(sizes) == 1 else FRAME
                batch = consumer.receive_batch(limit, timeout=WAIT_SECONDS)
                assert [m.redelivery_count for m in batch] == [count] * size
    # one is taken by `receive`, the others in batches
    with client.consumer(topic, **options) as consumer:
        first = consumer.receive(timeout=WAIT_SECONDS)
        assert (first.offset, first.redelivery_count) == (0, 3)
        rest = take_all(consumer, 2 * FRAME - 1)
    assert rest == {at: 3 if at < 10 else int(at < FRAME) for at in range(1, 2 * FRAME)}


def test_a_move_keeps_the_counts(client: danube_fast.Client) -> None:
    topic = "/default/moved"
    options: dict[str, Any] = {"subscription": "s", "initial_position": "earliest"}
    publish(client, topic)
    (place,) = client.admin.describe_topic(topic)["placement"]
    with client.consumer(topic, **options) as consumer:
        for _ in range(10):
            assert consumer.receive(timeout=WAIT_SECONDS) is not None
        client.admin.move_topic(topic, 1 - place["worker"])
        for at in range(20):
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert (message.offset, message.redelivery_count) == (at, int(at < 10))
        client.admin.move_topic(topic, place["worker"])
        counts = take_all(consumer, MESSAGES)
    assert counts == {at: (at < 10) + (at < 20) for at in range(MESSAGES)}


def test_what_waits_for_a_handler_was_not_handed_out(client: danube_fast.Client) -> None:
    topic = "/default/handled"
    publish(client, topic, FRAME)
    may_end, has_begun = threading.Event(), threading.Event()

    def handle(message: danube_fast.Message) -> None:
        has_begun.set()
        may_end.wait(WAIT_SECONDS)

    subscription = client.subscribe(
        topic, "s", handle, type="shared", concurrency=1, initial_position="earliest"
    )
    assert has_begun.wait(WAIT_SECONDS)
    with pytest.raises(FailedPrecondition, match="1 handlers were still running"):
        subscription.close(timeout=0.2)
    may_end.set()
    with client.consumer(topic, subscription="s", type="shared") as consumer:
        counts = take_all(consumer, FRAME)
    assert counts == {at: int(at == 0) for at in range(FRAME)}
