"""Another server key on a port that is in use: what was connected ends, what comes has the new key, ipc goes on."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from danube_fast.errors import Internal, Unavailable
from danube_fast.net.listener import Listener
from danube_fast.net.server import PeerGone, Server
from danube_fast.security.curve import KeyPair, new_key_pair
from tests.workers.broker import wait_until

CROWD = 30
WAIT_MS = 20_000
OLD, NEW, CLIENT = new_key_pair(), new_key_pair(), new_key_pair()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def ipc() -> str:
    return f"ipc://@danube-test-{secrets.token_hex(8)}"


@pytest.fixture
def server(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Server]:
    made = Server(
        context, message_bytes_max=1 << 20, handshake_timeout_ms=5000, curve_secret=OLD.secret
    )
    yield made
    made.close()


def dial(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key: KeyPair | None
) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if key is not None:
        dealer.setsockopt_string(zmq.CURVE_SERVERKEY, key.public)
        dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, CLIENT.public)
        dealer.setsockopt_string(zmq.CURVE_SECRETKEY, CLIENT.secret)
    dealer.connect(endpoint)
    return dealer


def take(server: Server) -> tuple[bytes, bytes]:
    """The next message that comes in: identity and content."""
    found: list[tuple[bytes, bytes]] = []

    def look() -> bool:
        found.extend((identity, bytes(command)) for identity, command, _ in server.receive(1))
        return bool(found)

    wait_until("a message", look)
    return found[0]


def succeed(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key: KeyPair, count: int
) -> int:
    """How many of that many clients, which come at once, end their handshake well."""
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    dealers = []
    for _ in range(count):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt_string(zmq.CURVE_SERVERKEY, key.public)
        dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, CLIENT.public)
        dealer.setsockopt_string(zmq.CURVE_SECRETKEY, CLIENT.secret)
        dealers.append((dealer, dealer.get_monitor_socket(events)))
    for dealer, _ in dealers:
        dealer.connect(endpoint)
    well = 0
    for dealer, monitor in dealers:
        assert monitor.poll(WAIT_MS), "no handshake, and none that failed"
        well += recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(0)
    return well


def test_a_port_has_the_new_key_alone(
    context: zmq.Context[zmq.Socket[bytes]], server: Server, ipc: str
) -> None:
    endpoint = f"tcp://127.0.0.1:{server.bind('127.0.0.1', 0, ipc)}"
    before, local = dial(context, endpoint, OLD), dial(context, ipc, None)
    before.send(b"by tcp")
    identity, _ = take(server)
    local.send(b"by ipc")
    local_identity, _ = take(server)
    server.rekey(NEW.secret)

    def is_gone() -> bool:
        try:
            server.send(identity, [b"still there?"])
        except PeerGone:
            return True
        return False

    wait_until("the end of the old connection", is_gone)
    assert succeed(context, endpoint, NEW, CROWD) == CROWD
    assert succeed(context, endpoint, OLD, CROWD) == 0
    server.send(local_identity, [b"here"])
    assert local.poll(WAIT_MS) and local.recv() == b"here"
    with dial(context, endpoint, NEW) as after:
        after.send(b"again")
        assert take(server)[1] == b"again"
    before.close(0)
    local.close(0)


def test_clients_that_come_while_the_key_changes_are_not_refused(
    context: zmq.Context[zmq.Socket[bytes]], server: Server
) -> None:
    """The kernel listens on: a plain connect never fails, and the port is no one else's."""
    port = server.bind("127.0.0.1", 0, "")
    for keys in (NEW, OLD) * 50:
        server.rekey(keys.secret)
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with pytest.raises(OSError):
            Listener("127.0.0.1", port, 1)
    assert succeed(context, f"tcp://127.0.0.1:{port}", OLD, 5) == 5


def test_a_port_that_is_taken_is_refused(
    context: zmq.Context[zmq.Socket[bytes]], server: Server
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match="choose another port"):
            server.bind("127.0.0.1", port, "")


def test_descriptors_are_given_back(
    context: zmq.Context[zmq.Socket[bytes]], server: Server
) -> None:
    server.bind("127.0.0.1", 0, "")

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    for keys in (NEW, OLD) * 5:
        server.rekey(keys.secret)
    settled = count()
    for keys in (NEW, OLD) * 100:
        server.rekey(keys.secret)
    wait_until("as many descriptors as before", lambda: count() <= settled)


def test_without_a_descriptor_the_key_before_stays_and_it_is_tried_again(
    context: zmq.Context[zmq.Socket[bytes]],
    server: Server,
    ipc: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A crowd of clients may have taken them all just then."""
    endpoint = f"tcp://127.0.0.1:{server.bind('127.0.0.1', 0, ipc)}"

    def fail(listener: Listener) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Listener, "duplicate", fail)
        with pytest.raises(Internal):
            server.rekey(NEW.secret)
    for key, word in ((OLD, b"before"), (NEW, b"after")):
        if key is NEW:
            server.rekey(NEW.secret)
        client = dial(context, endpoint, KeyPair(key.public, ""))
        client.send(word)
        assert take(server)[1] == word
        client.close(0)
