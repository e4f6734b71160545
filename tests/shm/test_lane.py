"""Shared memory between real clients and real brokers: the same promises as over sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.client.values.limits import SLICE_NS
from danube_fast.errors import InvalidArgument, Unavailable
from tests.crash.rig import Server
from tests.shm.children import Held, child, heard, held
from tests.workers.broker import is_running, wait_until

RING_BYTES = 64 * 1024
SIGNALLED = 200
SLICE_SECONDS = SLICE_NS / 1e9
LARGE = [0, 1, 1000, RING_BYTES // 2, RING_BYTES, 3 * RING_BYTES, 400_000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("lane") / "data"
    with Server(
        # workers are stopped for a while, and a busy machine makes it long
        data_dir, workers=2, shm_ring_bytes=RING_BYTES, session_timeout_ms=300_000,
        heartbeat_timeout_ms=300_000,
    ) as made:  # fmt: skip
        yield made


def ways(client: Any) -> set[bool]:
    """Whether the connections to workers go through rings."""
    return {connection.has_rings for connection in client._core.routes.workers.values()}


def take(consumer: Any, count: int, seconds: float = 60) -> list[Any]:
    """That many messages, acked."""
    messages: list[Any] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count and time.monotonic() < deadline:
        batch = consumer.receive_batch(timeout=0.5)
        messages += batch
        if batch:
            consumer.ack(batch)
    assert len(messages) == count, f"{len(messages)} of {count} came within {seconds} s"
    return messages


@pytest.mark.parametrize("durability", ["memory", "os", "fsync", None])
def test_remote_and_local_clients_share_one_topic_in_one_order(
    server: Server, durability: str | None
) -> None:
    topic = f"/default/mixed-{durability}"
    options = {"durability": durability} if durability else {"dispatch": "non_reliable"}
    with server.client(transport="shm") as near, server.client(transport="tcp") as far:
        producers = [client.producer(topic, **options) for client in (near, far)]
        consumers = [
            client.consumer(topic, subscription=name, initial_position="earliest")
            for name, client in (("near", near), ("far", far))
        ]
        for turn in range(30):
            for index, producer in enumerate(producers):
                producer.send_many([b"%d %d %d" % (index, turn, i) for i in range(50)])
        for producer in producers:
            producer.flush()
        seen = [[(m.offset, m.payload) for m in take(consumer, 3000)] for consumer in consumers]
        assert seen[0] == seen[1]
        assert [offset for offset, _ in seen[0]] == list(range(3000))
        for index in (0, 1):
            own = [payload for _, payload in seen[0] if payload.startswith(b"%d " % index)]
            assert own == [b"%d %d %d" % (index, turn, i) for turn in range(30) for i in range(50)]
        assert ways(near) == {True} and ways(far) == {False}


def test_messages_larger_than_the_ring_keep_their_place(server: Server) -> None:
    payloads = [os.urandom(size) for _ in range(4) for size in LARGE]
    with server.client(transport="shm") as client:
        producer = client.producer("/default/large")
        consumer = client.consumer("/default/large", subscription="s", initial_position="earliest")
        for payload in payloads:
            producer.send(payload)
        producer.flush()
        assert [m.payload for m in take(consumer, len(payloads))] == payloads
        assert ways(client) == {True}


def test_a_flood_of_more_than_the_rings_hold(server: Server) -> None:
    """Both rings are full all the time; the consumer begins late."""
    count = 200_000
    with server.client() as client:
        producer = client.producer("/default/flood", durability="os")
        consumer = client.consumer("/default/flood", subscription="s", initial_position="earliest")
        for start in range(0, count, 10_000):
            producer.send_many([b"%d" % i for i in range(start, start + 10_000)])
        producer.flush()
        assert [int(m.payload) for m in take(consumer, count, 60)] == list(range(count))
        assert ways(client) == {True}


@pytest.mark.parametrize("uses_asyncio", [False, True])
def test_who_pours_into_full_rings_waits_and_copies_nothing(
    server: Server, uses_asyncio: bool
) -> None:
    topic = f"/default/full-{uses_asyncio}"
    lists = [[b"%d %d" % (turn, i) + bytes(100) for i in range(500)] for turn in range(60)]
    workers = [server.pid_of(1 + number) for number in range(server.workers)]
    queued: list[int] = []

    def look(client: Any) -> None:
        """The workers stand still: the rings are full soon, and little waits behind them."""
        ports = [connection._port for connection in client._core.routes.workers.values()]
        wait_until("full rings", lambda: any(port._queue for port in ports))
        assert not wait_quietly(lambda: sum(len(port._queue) for port in ports) > 2)
        queued.append(max(len(port._queue) for port in ports))

    def wait_quietly(condition: Any) -> bool:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.01)
        return False

    def stopped_while(body: Any, client: Any) -> None:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=body)
        try:
            thread.start()
            look(client)
            assert thread.is_alive(), "3 MB went into rings of 64 KiB"
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
            thread.join(60)
        assert not thread.is_alive()

    def pour(producer: Any) -> None:
        for payloads in lists:
            producer.send_many(payloads)
        producer.flush()

    async def pour_async() -> None:
        async with await danube_fast.connect_async(server.url, transport="shm") as client:
            producer = await client.producer(topic)
            loop = asyncio.get_running_loop()
            done = asyncio.Event()

            async def body() -> None:
                for payloads in lists:
                    await producer.send_many(payloads)
                await producer.flush()
                done.set()

            def run() -> None:
                asyncio.run_coroutine_threadsafe(body(), loop).result(60)

            await loop.run_in_executor(None, stopped_while, run, client)
            assert done.is_set()

    with server.client(transport="shm") as client:
        if uses_asyncio:
            asyncio.run(pour_async())
        else:
            producer = client.producer(topic)
            stopped_while(lambda: pour(producer), client)
        consumer = client.consumer(topic, subscription="s", initial_position="earliest")
        sent = [payload for payloads in lists for payload in payloads]
        assert [m.payload for m in take(consumer, len(sent))] == sent
    assert queued and queued[0] >= 1


def test_a_producer_that_changes_its_way_keeps_order_and_exactness(server: Server) -> None:
    topic = "/default/changing"
    sent: list[bytes] = []
    with server.client() as reader:
        consumer = None
        for turn, transport in enumerate(["shm", "zmq", "auto", "tcp", "shm"]):
            with server.client(transport=transport) as client:
                producer = client.producer(topic, name="same")
                payloads = [b"%d %d" % (turn, i) for i in range(500)]
                producer.send_many(payloads)
                producer.flush()
                sent += payloads
                assert ways(client) == {transport in ("shm", "auto")}
        consumer = reader.consumer(topic, subscription="s", initial_position="earliest")
        assert [m.payload for m in take(consumer, len(sent))] == sent


def test_asyncio(server: Server) -> None:
    async def run() -> list[bytes]:
        async with await danube_fast.connect_async(server.url, transport="shm") as client:
            producer = await client.producer("/default/async")
            consumer = await client.consumer(
                "/default/async", subscription="s", initial_position="earliest"
            )
            await asyncio.gather(*(producer.publish(b"%d" % i) for i in range(200)))
            got: list[bytes] = []
            while len(got) < 200:
                message = await consumer.receive(timeout=60)
                got.append(message.payload)
                await consumer.ack(message)
            assert ways(client) == {True}
            return got

    assert sorted(asyncio.run(run())) == sorted(b"%d" % i for i in range(200))


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_killed_worker_comes_back_with_new_rings(tmp_path: Path, transport: str) -> None:
    with (
        Server(tmp_path / "data", workers=1) as server,
        server.client(transport=transport) as client,
    ):
        producer = client.producer("/default/t")
        consumer = client.consumer("/default/t", subscription="s", initial_position="earliest")
        for turn in range(3):
            payloads = [b"%d %d" % (turn, i) for i in range(1000)]
            producer.send_many(payloads)
            wait_until("a worker that lives", lambda: is_running(server.pid_of(1)))
            server.kill("worker", 1)
            producer.flush()
            got = {m.payload for m in take_distinct(consumer, payloads)}
            assert got >= set(payloads)
            # All of it may have come before the kill; then the worker is still on its way back.
            wait_until("rings to the new worker", lambda: ways(client) == {True})
            # a consumer that closes before it is back says which acks were lost with the worker
            wait_until("acks at the new worker", lambda: acks_arrive(consumer))


def acks_arrive(consumer: danube_fast.Consumer) -> bool:
    """Whether the worker has all acks; those that were lost with one that ended are told once."""
    try:
        consumer.flush_acks()
    except danube_fast.Unavailable:
        return False
    return True


def take_distinct(consumer: Any, payloads: list[bytes], seconds: float = 60) -> list[Any]:
    """Messages until each of `payloads` was there; some may come twice over a kill."""
    messages: list[Any] = []
    missing = set(payloads)
    deadline = time.monotonic() + seconds
    while missing and time.monotonic() < deadline:
        batch = consumer.receive_batch(timeout=0.5)
        messages += batch
        missing -= {m.payload for m in batch}
        if batch:
            consumer.ack(batch)
    assert not missing, f"{len(missing)} of {len(payloads)} did not come within {seconds} s"
    return messages


_HOLDER = """
import sys, time, danube_fast
client = danube_fast.connect(sys.argv[1], transport="shm")
consumer = client.consumer("/default/held", subscription="s", type="shared", initial_position="earliest")
producer = client.producer("/default/dying")
batch = []
while len(batch) < 100:
    batch += consumer.receive_batch(timeout=1)
print("holds")
sys.stdout.flush()
while True:
    producer.send_many([b"x" * 100] * 1000)
"""


HOLDS = b"holds\n"


def test_what_a_killed_client_held_goes_to_others_at_once(server: Server) -> None:
    """Its rings end with it: no consumer waits for the session's timeout, which is 300 s here."""
    with server.client(transport="shm") as client:
        producer = client.producer("/default/held")
        producer.send_many([b"%d" % i for i in range(100)])
        producer.flush()
        with child("-c", _HOLDER, server.url) as holder:
            assert heard(holder, len(HOLDS)) == HOLDS
            other = client.consumer("/default/held", subscription="s", type="shared")
        holder.wait(60)
        again = take(other, 100)
        assert sorted(int(m.payload) for m in again) == list(range(100))
        counts = [m.redelivery_count for m in sorted(again, key=lambda m: m.offset)]
        assert counts == sorted(counts, reverse=True) and counts[63] == 1
        # what it published before is whole
        reader = client.reader("/default/dying", start="earliest")
        whole = [m.payload for m in reader.receive_batch(timeout=2)]
        assert set(whole) <= {b"x" * 100}


def test_rings_go_with_their_clients(server: Server) -> None:
    """Memory and descriptors of the workers are what they were before 40 clients came and went."""
    pids = [server.pid_of(process) for process in (1, 2)]

    def all_held() -> list[Held]:
        return [held(pid) for pid in pids]

    with server.client(transport="shm") as client:
        client.producer("/default/warm").publish(b"x")
    before = wait_until("the end of earlier clients", lambda: settled(all_held))
    for number in range(40):
        with server.client(transport="shm") as client:
            client.producer("/default/warm").publish(b"%d" % number)
    wait_until(f"{before} again, not {all_held()}", lambda: all_held() <= before)


def test_each_answer_wakes_its_client_at_once(server: Server) -> None:
    """A client that is not signalled looks into its rings every 100 ms all the same."""
    with server.client(transport="shm") as client:
        producer = client.producer("/default/woken", durability="memory")
        producer.publish(b"x")
        began = time.monotonic()
        for _ in range(SIGNALLED):
            producer.publish(b"x")
        assert time.monotonic() - began < SIGNALLED * SLICE_SECONDS / 2


def settled(look: Any) -> Any:
    """What `look` says, once it says the same for a while."""
    first = look()
    time.sleep(0.5)
    return first if look() == first else None


def test_who_gets_no_rings_uses_zeromq_or_is_told(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data", workers=1, shm_clients_max=1) as server,
        server.client() as first,
        server.client() as second,
        server.client(transport="shm") as third,
    ):
        first.producer("/default/t").publish(b"1")
        second.producer("/default/t").publish(b"2")
        assert (ways(first), ways(second)) == ({True}, {False})
        with pytest.raises(Unavailable, match="raise shm_clients_max"):
            third.producer("/default/t", timeout=15)


def test_a_broker_without_shared_memory(tmp_path: Path) -> None:
    with Server(tmp_path / "data", workers=1, shm_ring_bytes=0) as server:
        with server.client() as client:
            client.producer("/default/t").publish(b"1")
            assert ways(client) == {False}
        with (
            server.client(transport="shm") as client,
            pytest.raises(danube_fast.DanubeError) as told,
        ):
            client.producer("/default/t", timeout=15)
        assert "shared memory" in str(told.value)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'shm'"):
        danube_fast.connect("danube://127.0.0.1:1", transport="pigeon")


def test_a_forked_child_does_not_hide_the_parents_end(server: Server) -> None:
    """The child inherits the socket; the worker hears of the parent's death all the same."""
    code = """
import os, sys, time, danube_fast
client = danube_fast.connect(sys.argv[1], transport="shm")
consumer = client.consumer("/default/forked", subscription="s", type="shared", initial_position="earliest")
batch = []
while len(batch) < 10:
    batch += consumer.receive_batch(timeout=1)
pid = os.fork()
if pid == 0:
    sys.stdin.read()
    os._exit(0)
print(pid, flush=True)
time.sleep(60)
"""
    with server.client(transport="shm") as client:
        producer = client.producer("/default/forked")
        producer.send_many([b"%d" % i for i in range(10)])
        producer.flush()
        with child("-c", code, server.url) as holder:
            born = int(heard(holder, 2))
            other = client.consumer("/default/forked", subscription="s", type="shared")
            holder.kill()
            assert len(take(other, 10)) == 10
            assert Path(f"/proc/{born}").exists(), "the child was to live on"


def test_a_broker_that_gives_no_rings_any_more(tmp_path: Path) -> None:
    """Who had rings goes on over ZeroMQ."""
    with Server(tmp_path / "data", workers=1) as server, server.client() as client:
        producer = client.producer("/default/t")
        producer.publish(b"1")
        assert ways(client) == {True}
        server.kill("all")
        server.changes["shm_ring_bytes"] = 0
        server.start()
        producer.publish(b"2")
        assert ways(client) == {False}


def test_workers_stay_on_cores_of_their_own(tmp_path: Path) -> None:
    with Server(tmp_path / "data", workers=2, pin=True) as server:
        cores = [os.sched_getaffinity(server.pid_of(process)) for process in (1, 2)]
    here = sorted(os.sched_getaffinity(0))
    assert cores == [{here[worker % len(here)]} for worker in (0, 1)]


def test_spinning_clients_and_workers(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data", workers=1, spin_us=200) as server,
        server.client(spin_us=200) as client,
    ):
        producer = client.producer("/default/t", durability="os")
        consumer = client.consumer("/default/t", subscription="s", initial_position="earliest")
        for number in range(50):
            producer.publish(b"%d" % number)
            message = consumer.receive(timeout=60)
            assert message is not None and message.payload == b"%d" % number
    with pytest.raises(InvalidArgument, match="0 to 10000"):
        danube_fast.connect("danube://127.0.0.1:1", spin_us=10_001)
