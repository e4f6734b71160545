"""A client looks whose process listens on its host: a user may take the abstract name of a worker that is down."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import danube_fast
from danube_fast.client.link.guarded_port import GuardedPort
from danube_fast.net import protocol as p
from danube_fast.net.port import Port
from danube_fast.ring.handover import dial, knock
from tests.client import fake_broker
from tests.crash.rig import Server
from tests.shm.children import child, heard
from tests.shm.test_borders import STRANGER, is_mapped
from tests.workers.broker import is_running, wait_until

SECONDS = 60
OWN = os.geteuid()
TOPIC = "/default/t"


@pytest.fixture
def endpoint() -> str:
    return f"ipc://@danube-test-{secrets.token_hex(8)}"


@contextlib.contextmanager
def impostor(endpoint: str) -> Iterator[Any]:
    """A process of a stranger that listens there."""
    if OWN or not is_mapped(STRANGER):
        pytest.skip(f"only root can start a process of user {STRANGER}, where there is such a user")
    with child("-m", "tests.shm.impostor", str(STRANGER), endpoint) as process:
        heard(process, len(b"ready\n"), SECONDS)
        yield process


def rest_of(process: Any) -> bytes:
    """What an impostor has heard, once it is told to end."""
    out: bytes
    out, _ = process.communicate(timeout=SECONDS)
    return out


def test_a_listener_of_another_user(endpoint: str) -> None:
    with impostor(endpoint) as process:
        for ask in (dial, knock):
            text = f"belongs to user {STRANGER}, not to {OWN}; stop it"
            with pytest.raises(danube_fast.PermissionDenied, match=text):
                ask(endpoint, {OWN})
        assert knock(endpoint, {OWN, STRANGER})
        sock = dial(endpoint, {OWN, STRANGER})
        assert sock is not None
        sock.close()
        assert rest_of(process) == b""


def test_nothing_listens(endpoint: str) -> None:
    assert dial(endpoint, {OWN}) is None
    assert not knock(endpoint, {OWN})
    assert not knock("ipc:///nowhere/at/all", {OWN})


@pytest.mark.parametrize("transport", ["auto", "zmq", "shm"])
def test_a_secured_client_tells_an_impostor_nothing(endpoint: str, transport: str) -> None:
    broker = fake_broker.FakeBroker()
    broker.ipc = endpoint
    try:
        with (
            impostor(endpoint) as process,
            danube_fast.connect(
                broker.url, transport=transport, server_uid=OWN, timeout=SECONDS
            ) as client,
        ):
            for _ in range(2):
                with pytest.raises(danube_fast.PermissionDenied, match=f"to user {STRANGER}"):
                    client.producer(TOPIC, timeout=SECONDS)
            assert rest_of(process) == b""
    finally:
        broker.close()


@pytest.mark.parametrize("transport", ["auto", "zmq"])
def test_a_client_without_a_key_tells_an_impostor_nothing(endpoint: str, transport: str) -> None:
    """One that insists on shared memory is told, another one goes by tcp."""
    broker = fake_broker.FakeBroker()
    broker.ipc = endpoint
    try:
        with impostor(endpoint) as process:
            with (
                danube_fast.connect(broker.url, transport="shm", timeout=SECONDS) as client,
                pytest.raises(danube_fast.PermissionDenied, match="pass server_uid="),
            ):
                client.producer(TOPIC, timeout=SECONDS)
            with danube_fast.connect(broker.url, transport=transport, timeout=SECONDS) as client:
                client.producer(TOPIC, timeout=SECONDS).publish(b"to the broker")
                (connection,) = client._core.routes.workers.values()
                assert type(connection._port) is Port
            assert rest_of(process) == b""
    finally:
        broker.close()


class Ends:
    """A guarded port, and the ROUTER that it is connected to."""

    def __init__(self, endpoint: str, users: set[int]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)  # of all its sockets: nothing keeps it from its end
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(endpoint)
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.connect(endpoint)
        self.port = GuardedPort(dealer, endpoint, users)

    def hear(self) -> tuple[bytes, bytes]:
        """Sender and content of the next message."""
        assert self.router.poll(SECONDS * 1000), "no message came"
        sender, content = self.router.recv_multipart()
        return sender, content

    def close(self) -> None:
        self.port.close(0)
        self.router.close(0)
        self.context.term()


def bound(router: zmq.Socket[bytes], endpoint: str) -> bool:
    """Whether that name is free again, and taken now."""
    with contextlib.suppress(zmq.ZMQError):
        router.bind(endpoint)
        return True
    return False


@pytest.fixture
def ends(endpoint: str, request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(endpoint, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("ends", [{OWN}], indirect=True)
def test_what_waits_goes_out_behind_the_answer(ends: Ends, endpoint: str) -> None:
    port = ends.port
    port.post(b"hello")
    port.post(b"two", b"parts")
    sender, content = ends.hear()
    assert isinstance(p.decode_client_command(content), p.Ping)
    assert not ends.router.poll(100), "something was sent before it was known who listens"
    assert port.receive_head() is None
    ends.router.send_multipart([sender, b"any answer"])
    wait_until("the answer", lambda: port.readable())
    assert port.receive_head() is None and port.lost is None, "the answer is the port's own"
    assert ends.hear() == (sender, b"hello")
    assert ends.router.recv_multipart() == [sender, b"two", b"parts"]
    ends.router.send_multipart([sender, b"welcome"])
    wait_until("the next message", lambda: port.readable())
    head = port.receive_head()
    assert head is not None and bytes(head) == b"welcome"
    assert port.receive_head() is None
    ends.router.send_multipart([sender, b"between the two looks"])
    wait_until("a message behind the first look", lambda: port.has_more())
    head = port.receive_head()
    assert head is not None and bytes(head) == b"between the two looks"
    assert port.receive_head() is None and not port.has_more()
    ends.router.close(0)
    with ends.context.socket(zmq.ROUTER) as next_one:
        wait_until("a listener in its place", lambda: bound(next_one, endpoint))
        port.post(b"perhaps for a stranger")
        wait_until("the end", lambda: port.readable())
        assert not next_one.poll(200), "the next one to listen was told something"
    assert port.receive_head() is None and not port.has_more()
    assert isinstance(port.lost, danube_fast.Unavailable)
    port.post(b"too late")


@pytest.mark.parametrize("ends", [{OWN + 1}], indirect=True)
def test_a_stranger_hears_nothing_but_a_ping(ends: Ends) -> None:
    ends.port.post(b"hello")
    sender, _ = ends.hear()
    ends.router.send_multipart([sender, b"welcome", b"more"])
    wait_until("the answer", lambda: ends.port.readable())
    assert ends.port.receive_head() is None
    assert isinstance(ends.port.lost, danube_fast.PermissionDenied)
    assert f"belongs to user {OWN}, not to {OWN + 1}" in str(ends.port.lost)
    ends.port.post(b"secret")
    assert not ends.router.poll(100), "a stranger was told something"


def kill(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    wait_until(f"the end of {worker}", lambda: not is_running(worker))


@pytest.mark.parametrize("transport", ["zmq", "auto", "tcp"])
@pytest.mark.parametrize("options", [{"server_uid": OWN}, {}], ids=["pinned", "default"])
def test_a_client_of_a_real_broker(tmp_path: Path, options: dict[str, int], transport: str) -> None:
    """It publishes and consumes, and finds a worker again that was killed, on the same way."""
    with (
        Server(tmp_path / "data", workers=1) as server,
        server.client(transport=transport, **options) as client,
    ):
        producer = client.producer(TOPIC)
        consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
        (connection,) = client._core.routes.workers.values()
        assert isinstance(connection._port, GuardedPort) == (transport == "zmq")
        assert connection.has_rings == (transport == "auto")
        for number in range(200):
            if number == 100:
                kill(server.pid_of(1))
            producer.send(b"%d" % number)
        producer.flush()
        found: list[int] = []
        while len(set(found)) < 200:
            batch = consumer.receive_batch(timeout=SECONDS)
            assert len(batch), f"{len(found)} messages, and no more within {SECONDS} s"
            found += [int(message.payload or b"") for message in batch]
            consumer.ack(batch)
        assert sorted(set(found)) == list(range(200))
        assert isinstance(connection._port, GuardedPort) == (transport == "zmq")
        assert connection.has_rings == (transport == "auto")
