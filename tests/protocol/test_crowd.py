"""Garbage and crowds on both sockets while a good producer and a good consumer go on unharmed."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import danube_fast
from tests.protocol.storm import Storm
from tests.protocol.test_hostile import chosen_seed, endpoint, storm_at
from tests.workers.broker import Broker, Client, wait_until

TOPIC = "/default/good"
ROUNDS = int(os.environ.get("DANUBE_STORM_ROUNDS", "2"))
SILENT = 10_000
SPARE_DESCRIPTORS = 500
WAIT_SECONDS = 60.0
MESSAGES_MIN = 50
RSS_GROWTH_MAX = 48 * 1024 * 1024
"""The storm makes partitions, sessions and producers, and glibc keeps what was freed."""


class GoodPair(threading.Thread):
    """Publishes numbered messages one by one and receives each: exactly, in order."""

    def __init__(self, url: str) -> None:
        super().__init__(name="good pair")
        self.url = url
        self.done = threading.Event()
        self.count = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Until `done`, or until something is wrong."""
        try:
            self._work()
        except BaseException as failure:
            self.failure = failure

    def _work(self) -> None:
        with danube_fast.connect(self.url, timeout=WAIT_SECONDS) as client:
            producer = client.producer(TOPIC, name="good")
            consumer = client.consumer(TOPIC, subscription="good", initial_position="earliest")
            while not self.done.is_set():
                payload = b"%d" % self.count
                assert producer.publish(payload).offset == self.count
                message = consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None, f"message {self.count} did not come"
                assert (message.payload, message.redelivery_count) == (payload, 0)
                consumer.ack(message)
                self.count += 1

    def finish(self) -> None:
        """Stop it; fails if it was harmed."""
        self.done.set()
        self.join(2 * WAIT_SECONDS)
        assert not self.is_alive(), "the good pair hangs"
        if self.failure is not None:
            raise AssertionError(f"the good pair was harmed: {self.failure}") from self.failure


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """One for each: what the one test leaves must not count in the other."""
    with Broker(tmp_path / "data", fake="", workers=1, session_timeout_ms=10_000) as started:
        started.wait_ready()
        yield started


def footprint(pid: int) -> tuple[int, int]:
    """(anonymous memory in bytes, descriptors) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = int(status.partition("RssAnon:")[2].split()[0])
    return kib * 1024, len(os.listdir(f"/proc/{pid}/fd"))


def assert_unharmed(broker: Broker) -> None:
    with Client(broker) as client:
        entries = client.admin("cluster_status")["processes"]
    assert not any(entry["restarts"] for entry in entries), broker.error_text()
    assert "Traceback" not in broker.error_text(), broker.error_text()


def test_a_good_pair_in_a_storm(broker: Broker) -> None:
    """Garbage at the worker and at the coordinator; memory and descriptors come back."""
    context: zmq.Context[Any] = zmq.Context()
    with Client(broker) as client:
        (row,) = client.lookup("/default/storm", {"durability": "os"}).value["partitions"]
    seed = chosen_seed()
    pair = GoodPair(broker.ready["url"])
    pair.start()
    try:
        sizes: list[list[tuple[int, int]]] = []
        for turn in range(ROUNDS + 1):  # the first is not measured: it fills caches and tables
            storm = Storm(seed + turn, row[0], (1, 1, 0))
            assert storm_at(context, row[3], storm, is_worker=True, count=1000) > 10
            at = endpoint(broker.ready)
            assert storm_at(context, at, storm, is_worker=False, count=1000) > 10
            sizes.append([footprint(pid) for pid in broker.pids])
        wait_until("traffic", lambda: pair.count > MESSAGES_MIN or pair.failure)
    finally:
        context.destroy(linger=0)
        pair.finish()
    for pid, (memory, _), (memory_then, descriptors_then) in zip(
        broker.pids, sizes[-1], sizes[0], strict=True
    ):
        assert memory - memory_then < RSS_GROWTH_MAX, f"{pid} grew: {sizes}, seed {seed}"
        wait_until(
            f"closed descriptors of {pid} (seed {seed})",
            lambda pid=pid, most=descriptors_then: footprint(pid)[1] <= most + 5,
        )
    assert_unharmed(broker)


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[int]:
    """Raise the limit of this process to `count`, or as far as it may be; how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, soft), hard))
    try:
        yield max(wanted, soft)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_silent_connections(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most at the coordinator, some at the worker: a real client connects and publishes all the same."""
    ports = [int(endpoint(broker.ready).rpartition(":")[2]), *broker.ready["worker_ports"]]
    before = [footprint(pid)[1] for pid in broker.pids]
    with descriptors(SILENT + SPARE_DESCRIPTORS) as allowed, contextlib.ExitStack() as stack:
        count = min(SILENT, allowed - SPARE_DESCRIPTORS)
        if count < SILENT:
            with capsys.disabled():
                print(f"\nNOTE: only {count} connections, RLIMIT_NOFILE is {allowed} here")
        for number in range(count):
            silent = stack.enter_context(socket.socket())
            silent.settimeout(WAIT_SECONDS)
            silent.connect(("127.0.0.1", ports[number % 4 == 3]))
        held = sum(footprint(pid)[1] for pid in broker.pids)
        assert held > count // 2, f"the broker holds only {held} descriptors: no crowd"
        with danube_fast.connect(broker.ready["url"], timeout=WAIT_SECONDS) as client:
            assert client.producer(TOPIC).publish(b"through the crowd").offset == 0
            (message,) = list(client.reader(TOPIC))
            assert message.payload == b"through the crowd"
    for pid, descriptors_before in zip(broker.pids, before, strict=True):
        wait_until(
            f"{pid} closing its side",
            lambda pid=pid, most=descriptors_before: footprint(pid)[1] <= most + 20,
        )
    assert_unharmed(broker)
