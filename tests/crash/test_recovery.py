"""Clients go on by themselves when a worker or the whole broker is killed; and a client's own death
gives back what it held. Every bound is SLACK times what is promised, for machines that are busy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import DanubeError, FailedPrecondition
from tests.crash.payloads import RECEIVED, ident_of, number_of, payload_of, read_records
from tests.crash.rig import SLACK, Member, Server
from tests.workers.broker import wait_until

TOPIC = "/default/t"
HELD_TOPIC = "/default/held"
WORKER_RECOVERY_SECONDS = 4.0
"""Restart, recovery of the log, reconnect and the first message at a client."""
SESSION_TIMEOUT_SECONDS = 2.5
PAUSE_SECONDS = 0.005


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("recovery") / "data") as started:
        yield started


class Crowd:
    """One producer and every kind of receiver, each in a thread of its own that nobody helps."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.published = 0
        self.acked: dict[int, int] = {}
        """Offset -> number"""
        self.seen: dict[str, list[tuple[int, int]]] = {}
        """Receiver -> (offset, number) in order"""
        self.errors: list[str] = []
        self.publishing = threading.Event()
        self.publishing.set()
        self.stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        with self._client() as client:
            client.admin.create_topic(TOPIC, durability="fsync")
        for name in ("publish", "receive", "iterate", "read", "handle", "await_"):
            if name != "publish":
                self.seen[name] = []
            self._start(name)

    def _client(self) -> danube_fast.Client:
        return danube_fast.connect(self.url, timeout=60)

    def _start(self, name: str) -> None:
        def run() -> None:
            try:
                getattr(self, name)()
            except Exception as error:
                if not self.stopping.is_set():
                    self.errors.append(f"{name}: {error!r}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _note(self, name: str, message: Any) -> None:
        self.seen[name].append((message.offset, number_of(ident_of(message.payload))))

    # ------------------------------------------------------------ the crowd

    def publish(self) -> None:
        """A message every few milliseconds."""
        with self._client() as client, client.producer(TOPIC, name="p", timeout=60) as producer:
            while self.publishing.is_set():
                number = self.published
                message_id = producer.publish(payload_of(1, number))
                self.acked[message_id.offset] = number
                self.published = number + 1
                time.sleep(PAUSE_SECONDS)

    def receive(self) -> None:
        """A loop of `receive` and `ack`, exclusive."""
        with self._client() as client, self._consumer(client, "exclusive") as consumer:
            while not self.stopping.is_set():
                message = consumer.receive(timeout=0.1)
                if message is not None:
                    self._note("receive", message)
                    consumer.ack(message)

    def iterate(self) -> None:
        """`for message in consumer`."""
        with self._client() as client, self._consumer(client, "shared") as consumer:
            for message in consumer:
                self._note("iterate", message)
                consumer.ack(message)
                if self.stopping.is_set():
                    return

    def read(self) -> None:
        """`for message in client.reader(..., stop=None)`."""
        with self._client() as client:
            for message in client.reader(TOPIC, stop=None):
                self._note("read", message)
                if self.stopping.is_set():
                    return

    def handle(self) -> None:
        """`client.subscribe` with a handler."""
        with self._client() as client:
            subscriber = client.subscribe(
                TOPIC, "handler", lambda message: self._note("handle", message),
                initial_position="earliest",
            )  # fmt: skip
            self.stopping.wait()
            subscriber.close()
            if subscriber.error is not None:
                raise subscriber.error

    def await_(self) -> None:
        """`async for message in consumer`."""

        async def loop() -> None:
            async with (
                await danube_fast.connect_async(self.url, timeout=60) as client,
                await client.consumer(
                    TOPIC, subscription="async", initial_position="earliest"
                ) as consumer,
            ):
                async for message in consumer:
                    self._note("await_", message)
                    await consumer.ack(message)
                    if self.stopping.is_set():
                        return

        asyncio.run(loop())

    @staticmethod
    def _consumer(client: Any, kind: str) -> Any:
        return client.consumer(TOPIC, subscription=kind, type=kind, initial_position="earliest")

    # ------------------------------------------------------------ from outside

    def wait_until_all_have(self, number: int, seconds: float) -> float:
        """Until every receiver saw message `number` or a later one; the seconds it took."""
        began = time.monotonic()

        def behind() -> list[str]:
            return [n for n, seen in self.seen.items() if not seen or seen[-1][1] < number]

        while behind():
            assert not self.errors, self.errors
            waited = time.monotonic() - began
            assert waited < seconds, (
                f"after {waited:.1f} s {behind()} have not seen message {number}, "
                f"{self.published} are acked"
            )
            time.sleep(0.01)
        return time.monotonic() - began

    def end_of_publishing(self) -> None:
        """No message after this."""
        self.publishing.clear()
        self._threads[0].join(60)

    def stop(self) -> None:
        """End all threads."""
        self.end_of_publishing()
        self.stopping.set()
        deadline = time.monotonic() + 60
        with self._client() as client:
            while any(thread.is_alive() for thread in self._threads):
                assert time.monotonic() < deadline, "some receivers do not end"
                client.publish(TOPIC, payload_of(2, 0))  # wakes who sits in an iteration
                time.sleep(0.05)


def check(crowd: Crowd) -> None:
    """Nobody missed a message; the reader saw each once, in order."""
    assert not crowd.errors, crowd.errors
    for name, seen in crowd.seen.items():
        mine = [(offset, number) for offset, number in seen if offset in crowd.acked]
        assert {crowd.acked[offset] for offset, _ in mine} == set(range(crowd.published)), name
        assert all(crowd.acked[offset] == number for offset, number in mine), name
    reader = [offset for offset, _ in crowd.seen["read"]]
    assert reader == list(range(len(reader)))


def test_everybody_goes_on_by_himself(server: Server) -> None:
    crowd = Crowd(server.url)
    try:
        crowd.wait_until_all_have(50, 60)
        with server.client() as client:
            (stats,) = client.admin.topic_stats(TOPIC)["partition_stats"]
            owners = {log["log_id"]: log["worker"] for log in server.status()["logs"]}
            worker = owners[stats["log_id"]]
        for victim in ("worker", "all", "worker"):
            before = crowd.published
            server.kill(victim, 1 + worker)
            if victim == "all":
                server.start()
            crowd.wait_until_all_have(before + 50, SLACK * WORKER_RECOVERY_SECONDS)
        crowd.end_of_publishing()
        crowd.wait_until_all_have(crowd.published - 1, 60)
    finally:
        crowd.stop()
    check(crowd)


def until(what: str, attempt: Callable[[], Any], refused: type[DanubeError], seconds: float) -> Any:
    """The result of `attempt` once it is no longer refused, and how long that took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            return attempt(), time.monotonic() - began
        except refused as error:
            last = error
            time.sleep(0.05)
    raise AssertionError(f"{what} took more than {seconds} s: {last}")


def holder(server: Server, folder: Path, kind: str) -> tuple[Member, Path]:
    """A consumer process that acks nothing, at work."""
    record = folder / f"{kind}.seen"
    plan = {"url": server.url, "topic": HELD_TOPIC, "subscription": kind, "type": kind, "name": "doomed",
            "record": str(record), "acks": False, "seed": 0}  # fmt: skip
    return Member("consumer_process", plan, folder / f"{kind}.errors"), record


def test_what_a_dead_client_held_is_given_to_others(server: Server, tmp_path: Path) -> None:
    """An exclusive slot is free, and held messages come again with a count of 1."""
    with server.client() as client:
        with client.producer(HELD_TOPIC) as producer:
            producer.send_many([payload_of(1, number) for number in range(500)])
        holders = {kind: holder(server, tmp_path, kind) for kind in ("exclusive", "shared")}
        for kind, (member, record) in holders.items():
            with member:
                member.wait_ready()
                wait_until("deliveries", lambda record=record: len(read_records(record)) == 500)
                assert set(read_records(record)["kind"].tolist()) == {RECEIVED}
                if kind == "exclusive":
                    with pytest.raises(FailedPrecondition, match="doomed"):
                        client.consumer(HELD_TOPIC, subscription=kind, initial_position="earliest")
                else:
                    second = client.consumer(HELD_TOPIC, subscription=kind, type=kind)
                    assert second.receive(timeout=0.2) is None
                member.kill()
            if kind == "exclusive":
                second, _ = until(
                    "the slot's release",
                    lambda: client.consumer(HELD_TOPIC, subscription="exclusive"),
                    FailedPrecondition,
                    SLACK * SESSION_TIMEOUT_SECONDS,
                )
            again: list[Any] = []
            deadline = time.monotonic() + SLACK * SESSION_TIMEOUT_SECONDS
            while len(again) < 500 and time.monotonic() < deadline:
                again += second.receive_batch(timeout=0.2)
            assert [m.offset for m in again] == list(range(500)), f"{kind}: {len(again)} came"
            counts = [m.redelivery_count for m in again]
            assert counts == sorted(counts, reverse=True), f"{kind}: all that was taken counts"
            assert counts[0] == counts[63] == 1, f"{kind}: and what may have been taken"
            second.ack(again)
            second.flush_acks()
            assert second.lag() == 0
            second.close()
