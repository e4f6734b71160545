"""Clients over rings whose worker or neighbours stand still, die, or crowd them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from danube_fast.net.protocol import Status
from tests.crash.payloads import producer_of
from tests.crash.rig import Server
from tests.faults.rig import Background, RawProducer
from tests.faults.ring_rig import FSYNC, OS, RingLoad, check_log
from tests.shm.children import Held, held, script
from tests.workers.broker import wait_until

SETTINGS: dict[str, Any] = {"workers": 1, "segment_bytes": 4 << 20}
ACKS = 40
LATENCY_SECONDS_MAX = 5.0
"""For one publish() beside others that have trouble or make it, on a machine that may be busy."""
PIPELINE = 64
DYING = """
import os, sys, threading, danube_fast
url, topics = sys.argv[1], sys.argv[2:]
client = danube_fast.connect(url, transport="shm", timeout=60)
taken, answered = threading.Event(), threading.Event()

def publish(topic):
    producer = client.producer(topic)
    while True:
        producer.publish(b"dying")
        answered.set()

def take():
    consumer = client.consumer(topics[0], subscription="dying", type="shared")
    while True:
        consumer.ack(consumer.receive())
        taken.set()

threading.Thread(target=take, daemon=True).start()
for topic in topics:
    threading.Thread(target=publish, args=(topic,), daemon=True).start()
taken.wait()
answered.wait()
print("busy", flush=True)
sys.stdin.read()
"""
DEATHS = 2


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def stands_still(pid: int) -> bool:
    """Whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """That process stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until("the stop", lambda: stands_still(pid))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def longest(load: RingLoad, since_ns: int, *topics: str) -> float:
    """Seconds that the longest publish() took that began since then."""
    chosen = load.of(*topics) if topics else load.publishers
    times = [
        (call.ended_ns - call.began_ns) / 1e9
        for each in chosen
        for call in [*each.calls]
        if call.began_ns >= since_ns
    ]
    return max(times, default=0.0)


def check_all(server: Server, load: RingLoad, about: str) -> None:
    """Every call ended acked, and all of it is there."""
    for publisher in load.publishers:
        assert not publisher.errors, f"{publisher.topic} {about}: {publisher.errors[:3]}"
    with server.client() as client:
        load.check(client, FSYNC, OS, about=about)
    load.stop_takers()


def test_a_worker_that_stands_still_for_a_while(tmp_path: Path, stack: ExitStack) -> None:
    """Twice: so shortly that sessions stay, and longer than they live."""
    settings = {**SETTINGS, "heartbeat_timeout_ms": 300_000}
    server = stack.enter_context(Server(tmp_path / "data", session_timeout_ms=2000, **settings))
    load = RingLoad(server, stack)
    pid = server.pid_of(1)
    with load.running():
        for seconds in (0.3, 3.0):
            load.wait_acks(ACKS)
            with stopped(pid):
                time.sleep(seconds)  # that is the fault
            load.wait_acks(ACKS)
    assert server.pid_of(1) == pid
    check_all(server, load, "of a worker that stood still")


def test_a_client_that_stands_still_holds_no_other_up(tmp_path: Path, stack: ExitStack) -> None:
    """Its consumer takes nothing and its session ends; the others' publishes and deliveries go on."""
    server = stack.enter_context(Server(tmp_path / "data", **SETTINGS))
    load = RingLoad(server, stack)
    sleeper = stack.enter_context(script(DYING, server.url, "/default/its-own"))
    sleeper.hear("busy")
    pid = server.pid_of(1)
    with load.running():
        load.wait_acks(ACKS)
        for seconds in (0.3, 3.0):
            with stopped(sleeper.process.pid):
                began_ns = time.monotonic_ns()
                while time.monotonic_ns() < began_ns + seconds * 1e9:
                    load.wait_acks(ACKS)
            load.wait_acks(ACKS)
            took = longest(load, began_ns)
            assert took < LATENCY_SECONDS_MAX, f"a publish() took {took:.1f} s"
    assert server.pid_of(1) == pid
    check_all(server, load, "beside a client that stood still")


def test_clients_killed_while_they_publish_and_consume(tmp_path: Path, stack: ExitStack) -> None:
    """Their rings go with them, in the middle of the others' turns, on the same topics and on their own."""
    server = stack.enter_context(Server(tmp_path / "data", **SETTINGS))
    load = RingLoad(server, stack)
    pid = server.pid_of(1)
    with load.running():
        load.wait_acks(ACKS)
        before = held(pid)
        began_ns = time.monotonic_ns()
        for number in range(DEATHS):
            own = f"/default/dying-{number % 2}"
            with script(DYING, server.url, own, own, "/default/dying-os") as dying:
                dying.hear("busy")
                load.wait_acks(20)
                dying.process.kill()
                dying.process.wait()
            load.wait_acks(ACKS)
        took = longest(load, began_ns)
        assert took < LATENCY_SECONDS_MAX, f"a publish() took {took:.1f} s"
        wait_until("the end of their rings", lambda: is_released(pid, before))
    assert server.pid_of(1) == pid, "the worker died of its clients"
    check_all(server, load, "beside clients that were killed")


def is_released(pid: int, before: Held) -> bool:
    """Whether the worker holds no more rings than before."""
    return held(pid).maps <= before.maps


# ---------------------------------------------------------------- ZeroMQ and rings on one topic


def say_figures(text: str) -> None:
    """Shown with `pytest -s`."""
    print(text, file=sys.stderr)


def flood(producer: RawProducer, stopping: Any) -> None:
    """Many frames of one message on their way, always."""
    while not stopping.is_set():
        while len(producer.on_way) < PIPELINE:
            producer.send()
        producer.take(0.05)
    producer.settle()


def test_rings_beside_a_flood_by_zeromq(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(Server(tmp_path / "data", **SETTINGS))
    load = RingLoad(server, stack, {FSYNC: 3, OS: 1})
    busy = stack.enter_context(RawProducer(server, FSYNC, 90, durability="fsync"))
    with load.running():
        load.wait_acks(ACKS)
        with Background(lambda stopping: flood(busy, stopping)):
            wait_until("the flood", lambda: len(busy.answers) > PIPELINE)
            began_ns, answers = time.monotonic_ns(), len(busy.answers)
            load.wait_acks(5 * ACKS)
            seconds = (time.monotonic_ns() - began_ns) / 1e9
            flooded = len(busy.answers) - answers
        took = longest(load, began_ns)
    say_figures(
        f"beside {flooded / seconds:.0f} frames/s by ZeroMQ {5 * ACKS} publishes over rings of each "
        f"of {len(load.publishers)} threads took {seconds:.2f} s, the longest {took * 1e3:.1f} ms"
    )
    assert flooded > 5 * PIPELINE, f"ZeroMQ got only {flooded} answers beside rings"
    assert took < LATENCY_SECONDS_MAX, f"a publish() over rings took {took:.1f} s"
    check_both(server, load, busy)


def test_zeromq_beside_a_flood_over_rings(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(Server(tmp_path / "data", **SETTINGS))
    load = RingLoad(server, stack, {FSYNC: 8, OS: 2})
    single = stack.enter_context(RawProducer(server, FSYNC, 90, durability="fsync"))
    with load.running():
        load.wait_acks(ACKS)
        began, acked = time.monotonic(), len(load.acked(FSYNC))
        answers = [single.publish() for _ in range(5 * ACKS)]
        seconds = time.monotonic() - began
        rings = len(load.acked(FSYNC)) - acked
    took = max(answer.answered_ns - answer.sent_ns for answer in answers) / 1e9
    say_figures(
        f"beside {rings / seconds:.0f} publishes/s over rings {5 * ACKS} publishes by ZeroMQ took "
        f"{seconds:.2f} s, the longest {took * 1e3:.1f} ms"
    )
    assert rings > ACKS, f"rings got only {rings} acks beside ZeroMQ"
    assert took < LATENCY_SECONDS_MAX, f"a publish by ZeroMQ took {took:.1f} s"
    check_both(server, load, single)


def check_both(server: Server, load: RingLoad, raw: RawProducer) -> None:
    """What either has published stands in the topic once, in order, and the consumer got all."""
    assert {answer.status for answer in raw.answers} == {Status.OK}
    check_all(server, load, "beside ZeroMQ")
    expected = {offset: raw.index << 48 | number for offset, number in raw.acked.items()}
    with server.client() as client:
        found = check_log(client, FSYNC, expected | load.acked(FSYNC), "beside ZeroMQ")
    mine = [ident for ident in found.values() if producer_of(ident) == raw.index]
    assert len(mine) == len(expected), "ZeroMQ's messages are there twice, or unasked for"
    assert len(found) == len(expected) + len(load.acked(FSYNC)), "some are there without an ack"
