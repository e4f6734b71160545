"""Clients with a key on the broker's host: ipc where the kernel names the same user, and tcp where it does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.client.link.guarded_port import GuardedPort
from tests.delivery.test_security import TOPIC, SecuredServer, refused
from tests.workers.broker import wait_until

OWN = f"uid:{os.geteuid()}"
SECONDS = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    with SecuredServer(tmp_path / "data", tmp_path) as secured:
        secured.make_ann()
        with secured.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            secured.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
            secured.add(ann.admin, "zoe", ("viewer", TOPIC))
        yield secured


def lanes(client: Any) -> set[str]:
    """By which lanes a client reaches its workers now."""
    found = set()
    with client._core.pump.lock:
        for each in client._core.routes.workers.values():
            is_ipc = isinstance(each._port, GuardedPort)
            found.add("rings" if each.has_rings else "ipc" if is_ipc else "tcp")
    return found


def take(consumer: Any, payload: bytes) -> None:
    message = consumer.receive(SECONDS)
    assert message is not None and message.payload == payload
    consumer.ack(message)


def test_the_lane_goes_by_whom_the_kernel_names(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        for owner, lane in ((None, "tcp"), ("zoe", "tcp"), ("pia", "ipc")):
            if owner == "pia":
                ann.admin.delete_security("credential", OWN)
            if owner is not None:
                ann.admin.set_credential(OWN, owner)
            with server.come_in("pia", transport="zmq") as pia:
                consumer = pia.consumer(TOPIC, subscription="s")
                pia.producer(TOPIC).publish(lane.encode())
                take(consumer, lane.encode())
                assert lanes(pia) == {lane}, f"with the local user registered for {owner}"
                refused(lambda client=pia: client.producer("/shop/other").publish(b"no"))


def test_many_messages_and_lists_over_ipc(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.set_credential(OWN, "pia")
    count = 3000
    with server.come_in("pia", transport="zmq") as pia:
        consumer = pia.consumer(TOPIC, subscription="s", initial_position="earliest")
        producer = pia.producer(TOPIC)
        for number in range(200):  # straight
            assert producer.publish(b"%d" % number).offset == number
        producer.send_many([b"%d" % number for number in range(200, count)])
        producer.flush(timeout=SECONDS)
        for number in range(count):
            take(consumer, b"%d" % number)
        assert lanes(pia) == {"ipc"}


@pytest.mark.parametrize("transport", ["zmq", "auto"])
def test_a_local_user_who_is_out_goes_on_by_key(server: SecuredServer, transport: str) -> None:
    """Nothing is lost that was acked, and the client notices nothing else."""
    with server.come_in("ann") as ann:
        ann.admin.set_credential(OWN, "pia")
        with server.come_in("pia", transport=transport) as pia:
            consumer = pia.consumer(TOPIC, subscription="s")
            producer = pia.producer(TOPIC)
            producer.publish(b"one")
            assert lanes(pia) == {"ipc" if transport == "zmq" else "rings"}
            ann.admin.delete_security("credential", OWN)
            wait_until("tcp", lambda: lanes(pia) == {"tcp"}, SECONDS)
            producer.publish(b"two")
            take(consumer, b"one")
            take(consumer, b"two")


def test_a_killed_worker_has_its_clients_back_over_ipc(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.set_credential(OWN, "pia")
    assert server.broker is not None
    with server.come_in("pia", transport="zmq", timeout=SECONDS) as pia:
        consumer = pia.consumer(TOPIC, subscription="s")
        producer = pia.producer(TOPIC, timeout=SECONDS)
        producer.publish(b"one")
        take(consumer, b"one")
        assert lanes(pia) == {"ipc"}
        for pid in server.broker.ready["worker_pids"]:
            os.kill(pid, signal.SIGKILL)
        producer.publish(b"two")
        while (message := consumer.receive(SECONDS)) is not None and message.payload == b"one":
            consumer.ack(message)
        assert message is not None and message.payload == b"two"
        assert lanes(pia) == {"ipc"}


def test_a_publish_on_its_way_hears_of_a_killed_worker_soon(server: SecuredServer) -> None:
    """The end of the one connection is an event that a thread asleep in a kernel must not miss."""
    with server.come_in("ann") as ann:
        ann.admin.set_credential(OWN, "pia")
    assert server.broker is not None
    workers = server.broker.ready["worker_pids"]
    with server.come_in("pia", transport="zmq", timeout=SECONDS) as pia:
        producer = pia.producer(TOPIC, timeout=SECONDS)
        producer.publish(b"one")
        lost = threading.Event()
        (connection,) = pia._core.routes.workers.values()
        on_lost = connection._on_port_lost
        connection._on_port_lost = lambda port: (lost.set(), on_lost(port))
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        publishing = threading.Thread(target=producer.publish, args=(b"two",))
        publishing.start()
        try:
            wait_until("a publish on its way", lambda: bool(connection.bundler.on_way))
            # heartbeats would find out, too, later
            with pia._core.pump.lock:
                pia._core.pump.disarm(connection)
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
        assert lost.wait(SECONDS), "the end of the connection went unnoticed"
        publishing.join(SECONDS)
        assert not publishing.is_alive()
        with pia.consumer(TOPIC, subscription="s", initial_position="earliest") as consumer:
            take(consumer, b"one")
            take(consumer, b"two")
