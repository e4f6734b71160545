"""Partitioned topics that grow while they are used: nothing missed, nothing twice, names that collide."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import DanubeError
from tests.crash.rig import Server
from tests.workers.broker import wait_until

WAIT_SECONDS = 60.0
KEYS = 50


class Publisher:
    """Publishes numbered messages from a thread of its own until it is stopped."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self.count = 0
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for _ in range(50):
                    self.producer.send(b"%d" % self.count, key=b"key-%d" % (self.count % KEYS))
                    self.count += 1
                self.producer.flush(timeout=WAIT_SECONDS)
        except BaseException as error:
            self.error = error

    def wait_for(self, more: int) -> None:
        wanted = self.count + more
        wait_until(
            f"{more} more messages", lambda: self.count >= wanted or self.error, WAIT_SECONDS
        )
        assert self.error is None, self.error

    def stop(self) -> int:
        self._stopping.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the publisher did not end"
        assert self.error is None, self.error
        return self.count


def receive(consumer: Any, count: int) -> list[danube_fast.Message]:
    """So many messages, acked."""
    got: list[danube_fast.Message] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(got) < count:
        batch = consumer.receive_batch(timeout=1)
        got += list(batch)
        consumer.ack(batch)
        assert time.monotonic() < deadline, f"{len(got)} of {count} messages"
    return got


def check(messages: list[danube_fast.Message], count: int) -> None:
    """All of them once, in order in each partition."""
    numbers = collections.Counter(int(message.payload or b"") for message in messages)
    twice = [number for number, times in numbers.items() if times > 1]
    assert not twice, f"{len(twice)} messages came twice, {twice[:5]} among them"
    missing = set(range(count)) - set(numbers)
    assert not missing, f"{len(missing)} messages are missing, {sorted(missing)[:5]} among them"
    last: dict[tuple[str, bytes | None], int] = {}
    for message in messages:
        place = (message.topic, message.key)
        number = int(message.payload or b"")
        assert number > last.get(place, -1), f"{place} went back to {number}"
        last[place] = number


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("growth") / "data", workers=2) as running:
        yield running


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_growth_under_load_reaches_producers_consumers_and_who_is_away(
    server: Server, transport: str
) -> None:
    topic = f"/default/grows-{transport}"
    with (
        server.client(transport=transport) as client,
        client.producer(topic, partitions=1, durability="os") as producer,
        client.consumer(topic, subscription="here", initial_position="latest") as here,
    ):
        client.consumer(topic, subscription="away", type="shared").close()
        reader = client.reader(topic, stop=None)
        publisher = Publisher(producer)
        publisher.wait_for(500)
        assert client.admin.set_topic(topic, partitions=3)["partitions"] == 3
        wait_until("three lanes", lambda: len(producer._publisher.lanes) == 3, WAIT_SECONDS)
        publisher.wait_for(500)
        assert client.admin.set_topic(topic, partitions=5)["partitions"] == 5
        wait_until("five lanes", lambda: len(producer._publisher.lanes) == 5, WAIT_SECONDS)
        publisher.wait_for(500)
        count = publisher.stop()
        got = receive(here, count)
        check(got, count)
        assert {message.partition for message in got} == set(range(5))
        with client.consumer(topic, subscription="away", type="shared") as away:
            check(receive(away, count), count)
        read: list[danube_fast.Message] = []
        deadline = time.monotonic() + WAIT_SECONDS
        while len(read) < count:
            read += list(reader.receive_batch(timeout=1))
            assert time.monotonic() < deadline, f"the reader has {len(read)} of {count}"
        check(read, count)
        reader.close()


def test_who_opens_later_finds_all_partitions_and_may_ask_for_fewer(server: Server) -> None:
    topic = "/default/later"
    with server.client() as client:
        client.admin.create_topic(topic, partitions=2)
        client.admin.set_topic(topic, partitions=4)
        with client.producer(topic, partitions=2) as producer:  # as the program always did
            assert len(producer._publisher.lanes) == 4
            for _ in range(40):
                producer.publish(b"x")
        places = [
            entry["end_offset"] for entry in client.admin.topic_stats(topic)["partition_stats"]
        ]
        assert places == [10, 10, 10, 10], "messages without a key go round"
        for partitions, name in ((5, "4 partitions"), (0, "4 partitions")):
            with pytest.raises(danube_fast.FailedPrecondition, match=name):
                client.producer(topic, partitions=partitions)


def test_what_cannot_be(server: Server) -> None:
    with server.client() as client:
        admin = client.admin
        admin.create_topic("/default/plain")
        admin.create_topic("/default/wide", partitions=2)
        with pytest.raises(danube_fast.FailedPrecondition, match="never shrinks"):
            admin.set_topic("/default/wide", partitions=1)
        with pytest.raises(danube_fast.FailedPrecondition, match="--partitions 3"):
            admin.set_topic("/default/plain", partitions=3)
        with pytest.raises(danube_fast.InvalidArgument, match="partitions_per_topic_max"):
            admin.set_topic("/default/wide", partitions=1 << 20)
        with pytest.raises(danube_fast.InvalidArgument, match="nothing to change"):
            admin.set_topic("/default/wide")
        with pytest.raises(danube_fast.NotFound):
            admin.set_topic("/default/missing", partitions=2)
        assert admin.set_topic("/default/wide", partitions=2)["partitions"] == 2
        changed = admin.set_topic("/default/wide", partitions=3, durability="os")
        assert (changed["partitions"], changed["durability"]) == (3, "os")


def test_topics_that_are_named_like_partitions(server: Server) -> None:
    """Before growth, after it, and in its way."""
    with server.client() as client:
        admin = client.admin
        admin.create_topic("/default/t", partitions=2)
        with pytest.raises(danube_fast.AlreadyExists, match="is a partition"):
            admin.create_topic("/default/t-part-1")
        client.publish("/default/t-part-3", b"somebody's own")
        with pytest.raises(danube_fast.AlreadyExists, match="partition 3 of /default/t"):
            admin.set_topic("/default/t", partitions=5)
        assert admin.describe_topic("/default/t")["partitions"] == 2
        assert admin.set_topic("/default/t", partitions=3)["partitions"] == 3
        with pytest.raises(danube_fast.AlreadyExists, match="is a partition"):
            admin.create_topic("/default/t-part-2")
        with pytest.raises(danube_fast.AlreadyExists, match="partition 3 of"):
            admin.set_topic("/default/t", partitions=4)
        (own,) = client.reader("/default/t-part-3")
        assert (own.topic, own.partition) == ("/default/t-part-3", None)
        admin.delete_topic("/default/t-part-3")
        assert admin.set_topic("/default/t", partitions=5)["partitions"] == 5
        assert list(client.reader("/default/t-part-3")) == []
        with client.producer("/default/t") as producer:
            ids = [producer.publish(b"x") for _ in range(5)]
        assert {message_id.topic for message_id in ids} == {
            f"/default/t-part-{n}" for n in range(5)
        }
        (one,) = client.reader("/default/t-part-4")
        assert (one.topic, one.partition) == ("/default/t-part-4", 4)


def grow(server: Server, topic: str, partitions: int) -> None:
    """Until it is done; each refusal must leave the topic as it was or as it is to be."""
    deadline = time.monotonic() + WAIT_SECONDS
    before = None
    while True:
        try:
            with server.client() as client:
                before = before or client.admin.describe_topic(topic)["partitions"]
                assert client.admin.describe_topic(topic)["partitions"] in (before, partitions)
                client.admin.set_topic(topic, partitions=partitions)
                return
        except (danube_fast.Unavailable, danube_fast.DeadlineExceeded):
            assert time.monotonic() < deadline, "the topic did not grow"
        except danube_fast.FailedPrecondition as error:
            if "just being given" not in str(error):
                raise


@pytest.mark.parametrize("victim", ["worker", "coordinator"])
def test_growth_while_a_process_is_killed(tmp_path: Path, victim: str) -> None:
    topic = "/default/killed"
    with Server(tmp_path / "data", workers=2) as server, server.client() as client:
        with client.producer(
            topic, partitions=2, durability="os", timeout=WAIT_SECONDS
        ) as producer:
            client.consumer(topic, subscription="away").close()
            publisher = Publisher(producer)
            publisher.wait_for(200)
            for partitions in (4, 9):
                errors: list[BaseException] = []
                killer = _thread(errors, server.kill, victim)
                grower = _thread(errors, grow, server, topic, partitions)
                for one in (killer, grower):
                    one.join(WAIT_SECONDS)
                    assert not one.is_alive(), "growth did not end"
                assert not errors, errors
                publisher.wait_for(200)
            wait_until("nine lanes", lambda: len(producer._publisher.lanes) == 9, WAIT_SECONDS)
            publisher.wait_for(500)
            count = publisher.stop()
        # what an aborted growth left behind is dropped
        deadline = time.monotonic() + WAIT_SECONDS
        while server.status()["partitions"] != 9:
            assert time.monotonic() < deadline, server.status()["partitions"]
            time.sleep(0.05)
        check(list(client.reader(topic)), count)
        with client.consumer(topic, subscription="away") as away:
            got = _numbers(away, count)
        assert got == set(range(count)), f"{count - len(got)} are missing"


def _thread(errors: list[BaseException], call: Any, *arguments: Any) -> threading.Thread:
    """A thread that is running; what goes wrong in it is kept."""

    def run() -> None:
        try:
            call(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _numbers(consumer: Any, count: int) -> set[int]:
    """The payloads that come, until there are `count`."""
    got: set[int] = set()
    while len(got) < count and (batch := consumer.receive_batch(timeout=WAIT_SECONDS)):
        got |= {int(message.payload or b"") for message in batch}
        consumer.ack(batch)
    return got


def test_growth_outlives_the_whole_broker(tmp_path: Path) -> None:
    topic = "/default/lasting"
    server = Server(tmp_path / "data", workers=2)
    with server:
        with server.client() as client:
            client.admin.create_topic(topic, partitions=2)
            client.consumer(
                topic, subscription="away", type="shared",
                failure_policy={"max_redelivery_count": 3},
            ).close()  # fmt: skip
            client.admin.set_topic(topic, partitions=6)
        server.kill("all")
        server.start()
        with server.client() as client:
            assert client.admin.describe_topic(topic)["partitions"] == 6
            with client.producer(topic) as producer:
                for number in range(60):
                    producer.send(b"%d" % number, key=b"%d" % number)
            (away,) = client.admin.list_subscriptions(topic)
            assert (away["subscription"], away["type"]) == ("away", "shared")
            assert away["lag_messages"] == 60
            assert away["failure_policy"]["max_redelivery_count"] == 3
            with pytest.raises(DanubeError, match="shared"):
                client.consumer(topic, subscription="away", type="exclusive")


def test_growth_while_partitions_move(tmp_path: Path) -> None:
    topic = "/default/moving"
    with Server(tmp_path / "data", workers=2) as server, server.client() as client:
        with client.producer(
            topic, partitions=1, durability="os", timeout=WAIT_SECONDS
        ) as producer:
            client.consumer(topic, subscription="away").close()
            publisher = Publisher(producer)
            publisher.wait_for(200)
            for partitions in range(2, 8):
                errors: list[BaseException] = []
                movers = [_thread(errors, _move_once, server, topic, n) for n in range(2)]
                _grow_while_moving(server, topic, partitions)
                for one in movers:
                    one.join(WAIT_SECONDS)
                    assert not one.is_alive(), "a move did not end"
                assert not errors, errors
                publisher.wait_for(100)
            wait_until("seven lanes", lambda: len(producer._publisher.lanes) == 7, WAIT_SECONDS)
            publisher.wait_for(200)
            count = publisher.stop()
        check(list(client.reader(topic)), count)
        with client.consumer(topic, subscription="away") as away:
            got = _numbers(away, count)
        assert got == set(range(count)), f"{count - len(got)} are missing"


def _move_once(server: Server, topic: str, worker: int) -> None:
    with server.client() as client:
        try:
            client.admin.move_topic(topic, worker=worker, partition=0)
        except (danube_fast.FailedPrecondition, danube_fast.Unavailable):
            pass  # it is there already, or the topic is just growing


def _grow_while_moving(server: Server, topic: str, partitions: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    with server.client() as client:
        while True:
            try:
                client.admin.set_topic(topic, partitions=partitions)
                return
            except (danube_fast.FailedPrecondition, danube_fast.Unavailable) as error:
                assert time.monotonic() < deadline, error  # noqa: PT017
