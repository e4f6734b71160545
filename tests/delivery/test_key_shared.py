"""key_shared over a real broker: one consumer a key, in order, across joins, leaves and a worker's death."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server

TOPIC = "/default/keyed"
KEYS = 200
MESSAGES = 40_000
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("keyed") / "data", workers=1, session_timeout_ms=30_000
    ) as running:
        yield running


class Taker:
    """A consumer in a thread: notes what it gets, acks it, until told to leave."""

    def __init__(self, server: Server, topic: str, name: str, transport: str, **options: Any):
        self.client = danube_fast.connect(server.url, transport=transport)
        self.consumer = self.client.consumer(
            topic, subscription="s", type="key_shared", initial_position="earliest", name=name,
            **options,
        )  # fmt: skip
        self.got: list[tuple[float, bytes, int]] = []
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while not self._leaving.is_set():
            batch = self.consumer.receive_batch(500, timeout=0.05)
            now = time.monotonic()
            self.got += [(now, m.key or b"", m.offset) for m in batch]
            self.consumer.ack(batch)

    def leave(self) -> None:
        self._leaving.set()
        self._thread.join(WAIT_SECONDS)
        self.client.close()


def keyed(start: int, count: int) -> dict[str, Any]:
    numbers = range(start, start + count)
    return {
        "payloads": [b"%d" % n for n in numbers],
        "keys": [b"key-%d" % (n * 7919 % KEYS) for n in numbers],
    }


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_every_key_keeps_its_order_while_consumers_come_and_go(
    server: Server, transport: str
) -> None:
    topic = f"{TOPIC}-{transport}"
    topic_of(server, topic)
    takers = [Taker(server, topic, f"c{n}", transport) for n in range(2)]
    with danube_fast.connect(server.url) as client, client.producer(topic) as producer:
        for part in range(8):
            producer.send_many(**keyed(part * MESSAGES // 8, MESSAGES // 8))
            if part == 2:
                takers.append(Taker(server, topic, "c2", transport))
            if part == 5:
                takers[0].leave()
        producer.flush(timeout=WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while len({o for taker in takers for _, _, o in taker.got}) < MESSAGES:
            assert time.monotonic() < deadline, sum(len(taker.got) for taker in takers)
            time.sleep(0.02)
        for taker in takers[1:]:
            taker.leave()
        state = client.admin.describe_subscription(topic, "s")
    assert state["lag_messages"] == 0
    for taker in takers:
        last: dict[bytes, int] = {}
        for _, key, offset in taker.got:
            assert offset > last.get(key, -1), f"{key!r} went back at {offset}"
            last[key] = offset
    # across consumers: what came earlier in the topic was taken earlier, key by key
    seen = collections.defaultdict(list)
    for taker in takers:
        for moment, key, offset in taker.got:
            seen[key].append((offset, moment))
    for key, entries in seen.items():
        entries.sort()
        moments = [moment for _, moment in entries]
        assert moments == sorted(moments), f"{key!r} was with two consumers at a time"
    shares = [len(taker.got) for taker in takers]
    assert min(shares) > 0, shares


def topic_of(server: Server, topic: str) -> str:
    """The topic, made now."""
    with danube_fast.connect(server.url) as client:
        client.admin.create_topic(topic, durability="os")
    return topic


def test_filters_are_told_and_skipped_keys_are_counted(server: Server) -> None:
    topic = topic_of(server, f"{TOPIC}-filters")
    taker = Taker(server, topic, "even", "auto", key_filters=["key-*[02468]"])
    with danube_fast.connect(server.url) as client, client.producer(topic) as producer:
        producer.send_many(**keyed(0, 1000))
        producer.flush()
        deadline = time.monotonic() + WAIT_SECONDS
        while client.admin.describe_subscription(topic, "s")["lag_messages"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        state = client.admin.describe_subscription(topic, "s")
    taker.leave()
    assert len(taker.got) == 500 == state["skipped"]
    assert all(key[-1:] in b"02468" for _, key, _ in taker.got)


def test_a_topic_that_keeps_nothing_has_affinity_and_filters_too(server: Server) -> None:
    topic = "/default/keyed-lossy"
    options: dict[str, Any] = {"subscription": "s", "type": "key_shared"}
    with (
        danube_fast.connect(server.url) as client,
        client.producer(topic, dispatch="non_reliable") as producer,
        client.consumer(topic, **options, key_filters=["a*"]) as first,
        client.consumer(topic, **options, key_filters=["a*", "b*"]) as second,
    ):
        keys = [f"{'abc'[n % 3]}{n % 30}" for n in range(900)]
        for at in range(0, 900, 90):
            producer.send_many([b"x"] * 90, keys=keys[at : at + 90])
            producer.flush()
        wanted = sum(key[0] != "c" for key in keys)
        owners: dict[bytes, Any] = {}
        got = 0
        deadline = time.monotonic() + WAIT_SECONDS
        while got < wanted:
            for consumer in (first, second):
                for message in consumer.receive_batch(timeout=0.05):
                    assert message.key is not None
                    assert owners.setdefault(message.key, consumer) is consumer
                    got += 1
            assert time.monotonic() < deadline, f"{got} of {wanted} in {WAIT_SECONDS} s"
        assert {key[:1] for key, owner in owners.items() if owner is first} == {b"a"}
        assert client.admin.describe_subscription(topic, "s")["skipped"] == 900 - wanted
