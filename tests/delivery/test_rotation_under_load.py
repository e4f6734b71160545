"""The server key is rotated while a producer and a consumer are at work over tcp: nothing acked is lost, order stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import DanubeError
from tests.delivery.test_security import TOPIC, SecuredServer
from tests.delivery.test_server_key import all_have, pinned, ports, step
from tests.workers.broker import wait_until

PAUSE_SECONDS = 10.0
"""No longer may a publish take: what is stated is 3 s, and the machine may be busy."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    secured = SecuredServer(tmp_path / "data", tmp_path)
    with secured:
        secured.make_ann()
        with secured.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC, partitions=4)
            secured.add(ann.admin, "pia", ("producer", TOPIC))
            secured.add(ann.admin, "carl", ("consumer", TOPIC))
        yield secured


class Load:
    """A producer and a consumer, each with a client and a thread of its own."""

    def __init__(self, server: SecuredServer, pins: str) -> None:
        self._server, self._pins = server, pins
        self._stop = threading.Event()
        self.acked: list[int] = []
        """Number of each message that was acked."""
        self.received: list[tuple[int, int, int]] = []
        """Partition, offset, number."""
        self.faults: list[BaseException] = []
        self.longest_seconds = 0.0
        self._threads = [threading.Thread(target=run) for run in (self._produce, self._consume)]

    def _client(self, user: str) -> Any:
        import danube_fast

        return danube_fast.connect(
            self._server.url, server_key=self._pins, transport="tcp", timeout=20.0,
            key_file=self._server.folder / f"{user}.key", name=user,
        )  # fmt: skip

    def _produce(self) -> None:
        try:
            with self._client("pia") as client:
                producer = client.producer(TOPIC, name="load")
                number = 0
                while not self._stop.is_set():
                    began = time.monotonic()
                    producer.publish(b"%d" % number, key=b"%d" % (number % 7))
                    self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
                    self.acked.append(number)
                    number += 1
        except Exception as error:  # the test tells
            self.faults.append(error)

    def _consume(self) -> None:
        try:
            with self._client("carl") as client:
                consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
                numbers: set[int] = set()  # some may come twice
                while not self._stop.is_set() or len(numbers) < len(self.acked):
                    message = consumer.receive(timeout=1.0)
                    if message is not None:
                        place = message.partition, message.offset
                        number = int(message.payload)
                        self.received.append((*place, number))
                        numbers.add(number)
                        consumer.ack(message)
        except Exception as error:  # the test tells
            self.faults.append(error)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def goes_on(self) -> None:
        """Wait until more was acked and received than up to now."""
        acked, received = len(self.acked), len(self.received)
        wait_until(
            "progress",
            lambda: (
                self.faults or (len(self.acked) > acked + 50 and len(self.received) > received + 50)
            ),
            60.0,
        )
        assert not self.faults, self.faults

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "the load does not end"


def test_nothing_is_lost_while_the_key_is_rotated(server: SecuredServer) -> None:
    old = server.server_key
    new = step(server, old, "prepare")["keys"][0]
    with Load(server, f"{new} {old}") as load:
        load.goes_on()
        step(server, old, "activate")
        wait_until("the new key at every port", lambda: all_have(server, new))
        load.goes_on()
        step(server, new, "revert")
        wait_until("the old key at every port", lambda: all_have(server, old))
        load.goes_on()
        step(server, old, "activate")
        wait_until("the new key at every port", lambda: all_have(server, new))
        step(server, new, "retire")
        load.goes_on()
    assert not load.faults, load.faults
    numbers = load.acked
    assert numbers == list(range(len(numbers)))
    assert {number for *_, number in load.received} >= set(numbers), "acked messages are lost"
    by_place: dict[tuple[int, int], int] = {}
    for partition, offset, number in load.received:
        assert by_place.setdefault((partition, offset), number) == number
    firsts = list(dict.fromkeys(load.received))
    for partition in range(4):
        mine = [number for at, _, number in firsts if at == partition]
        assert mine == sorted(mine), f"order of partition {partition}"
        offsets = sorted(offset for at, offset, _ in firsts if at == partition)
        assert offsets == list(range(len(offsets))), f"published twice in partition {partition}"
    assert len(ports(server)) == 3
    assert load.longest_seconds < PAUSE_SECONDS, f"a publish took {load.longest_seconds:.1f} s"
    print(f"longest publish {load.longest_seconds:.2f} s, {len(numbers)} messages")


def test_clients_that_have_the_first_key_only_come_in_when_it_is_back(
    server: SecuredServer,
) -> None:
    old = server.server_key
    step(server, old, "prepare")
    step(server, old, "activate")
    new = server.data_dir.joinpath("server.pub").read_text().splitlines()[1]
    wait_until("the new key at every port", lambda: all_have(server, new))
    with pytest.raises(DanubeError, match="key"):
        pinned(server, old, timeout=5.0)
    step(server, new, "revert")
    wait_until("the old key at every port", lambda: all_have(server, old))
    pinned(server, old).close()
