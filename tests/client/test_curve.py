"""CURVE between a client and a broker in a thread: who is refused, how soon, and that nothing goes out in clear text."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

import danube_fast
from danube_fast.client.link.dialer import Dialer, Rings
from danube_fast.client.link.trust import trust_of
from danube_fast.client.values.limits import KEY_SETTLE_NS
from tests.client import fake_broker
from tests.security.authorizer_rig import Moved

BOUND_SECONDS = 3.0
"""A wrong key is told within so long; a busy machine may take longer once."""
WAIT_SECONDS = 60
AWAY_NS = 3 * 10**9
DIALS_MAX = 24
SERVER = zmq.curve_keypair()
CLIENT = zmq.curve_keypair()
OTHER = zmq.curve_keypair()
NAME = "name-that-can-be-found"
ZAP = "inproc://zeromq.zap.01"


class Guard:
    """Makes a broker's socket a CURVE server, and answers ZAP as `status` says; registered is `CLIENT`."""

    def __init__(self) -> None:
        self.status = {CLIENT[0]: b"200"}
        self.asked = 0

    def __call__(self, context: Any, router: Any) -> None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, SERVER[1])
        router.setsockopt(zmq.ZAP_DOMAIN, b"broker")
        zap = context.socket(zmq.REP)
        zap.bind(ZAP)
        threading.Thread(target=self._run, args=(zap,), name="zap", daemon=True).start()

    def _run(self, zap: Any) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                version, request, *_, key = zap.recv_multipart()
                self.asked += 1
                status = self.status.get(z85.encode(key), b"400")
                zap.send_multipart([version, request, status, b"", b"user", b""])
        zap.close(0)


class Relay:
    """Stands between client and broker and keeps what the client sends."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"danube://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.accepted = 0
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        clients: set[socket.socket] = set()
        while True:
            ready, _, _ = select.select([self._listener, self._stopped, *other], [], [])
            if self._stopped in ready:
                break
            for sock in ready:
                if sock is self._listener:
                    near = sock.accept()[0]
                    self.accepted += 1
                    far = socket.create_connection(("127.0.0.1", self._target))
                    other[near], other[far] = far, near
                    clients.add(near)
                elif sock in other:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = sock.recv(65_536)
                    if sock in clients:
                        self.seen += data
                    peer = other[sock]
                    if data:
                        with contextlib.suppress(OSError):
                            peer.sendall(data)
                        continue
                    del other[sock], other[peer]
                    sock.close()
                    peer.close()
        for sock in (*other, self._listener, self._stopped):
            sock.close()

    def close(self) -> None:
        self._stop.close()
        self._thread.join(WAIT_SECONDS)


@pytest.fixture
def guard() -> Guard:
    return Guard()


@pytest.fixture
def guarded(guard: Guard) -> Iterator[Any]:
    broker = fake_broker.FakeBroker(guard)
    yield broker
    broker.close()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Options of `connect`."""
    return {"server_key": SERVER[0].decode(), "key_file": key_file(tmp_path, CLIENT)}


def key_file(folder: Path, pair: tuple[bytes, bytes]) -> Path:
    path = folder / "client.key"
    path.touch(0o600)
    path.write_text(f'public = "{pair[0].decode()}"\nsecret = "{pair[1].decode()}"\n')
    return path


def refused(url: str, text: str, connect: Callable[..., Any] = danube_fast.connect, **options: Any) -> float:  # fmt: skip
    """Connect, be refused with that text within the bound, at the second attempt at the latest; how many seconds that took."""
    took: list[float] = []
    while not took or (took[-1] >= BOUND_SECONDS and len(took) < 2):
        start = time.monotonic()
        with pytest.raises(danube_fast.PermissionDenied, match=text):
            connect(url, timeout=WAIT_SECONDS, **options)
        took.append(time.monotonic() - start)
    assert took[-1] < BOUND_SECONDS, f"a wrong key is told within {BOUND_SECONDS} s: {took}"
    return took[-1]


def fails(client: danube_fast.Client, connection: Any, text: str) -> None:
    """Wait until a connection is refused with that text."""
    limit_ns = time.monotonic_ns() + WAIT_SECONDS * 10**9
    assert client._pump.wait(lambda: connection.failure is not None, limit_ns), "no refusal came"
    assert isinstance(connection.failure, danube_fast.PermissionDenied)
    assert text in str(connection.failure)


def test_with_the_right_keys_nothing_is_readable(
    guarded: Any, guard: Guard, keys: dict[str, Any]
) -> None:
    relay = Relay(guarded.port)
    with danube_fast.connect(relay.url, name=NAME, timeout=WAIT_SECONDS, **keys) as client:
        client.publish("/default/t", b"payload-that-can-be-found")
        with client.reader("/default/t", start="earliest", stop="latest") as reader:
            assert [m.payload for m in reader] == [b"payload-that-can-be-found"]
    relay.close()
    assert guard.asked and guarded.hellos
    assert len(relay.seen) > 500 and b"can-be-found" not in relay.seen


def test_without_keys_it_is_readable(broker: Any) -> None:
    relay = Relay(broker.port)
    danube_fast.connect(relay.url, name=NAME, timeout=WAIT_SECONDS).close()
    relay.close()
    assert NAME.encode() in relay.seen


def test_a_wrong_server_key(guarded: Any, keys: dict[str, Any]) -> None:
    seconds = refused(
        guarded.url, f"wrong server key.*127.0.0.1:{guarded.port}",
        server_key=OTHER[0].decode(), key_file=keys["key_file"],
    )  # fmt: skip
    assert seconds >= 2, "a failure or two are no verdict"
    assert guarded.hellos == 0


def test_a_client_with_a_wrong_server_key_dials_a_few_times(
    guarded: Any, keys: dict[str, Any]
) -> None:
    """A broker holds off the whole address of clients that fail 100 times in a second."""
    relay = Relay(guarded.port)
    try:
        refused(
            relay.url, "wrong server key", server_key=OTHER[0].decode(), key_file=keys["key_file"]
        )
        # each dial may fail twice before the client has seen it; a second attempt of the test begins anew
        assert 2 <= relay.accepted <= DIALS_MAX
    finally:
        relay.close()


def test_a_second_address_is_tried_where_the_first_is_another_broker(
    guarded: Any, keys: dict[str, Any]
) -> None:
    other = fake_broker.FakeBroker()
    try:
        url = f"danube://127.0.0.1:{other.port},127.0.0.1:{guarded.port}"
        danube_fast.connect(url, timeout=WAIT_SECONDS, **keys).close()
        assert guarded.hellos and not other.hellos
    finally:
        other.close()


def test_a_wrong_server_key_of_an_asynchronous_client(guarded: Any, keys: dict[str, Any]) -> None:
    import asyncio

    async def main(url: str, **options: Any) -> None:
        await danube_fast.connect_async(url, **options)

    keys["server_key"] = OTHER[0].decode()
    refused(
        guarded.url, "wrong server key", lambda *url, **options: asyncio.run(main(*url, **options)), **keys,
    )  # fmt: skip


def test_a_key_that_is_not_registered(guarded: Any, guard: Guard, keys: dict[str, Any]) -> None:
    guard.status.clear()
    refused(guarded.url, "this key is not registered with the broker", **keys)
    assert guarded.hellos == 0


def test_a_key_that_another_process_knows_is_tried_again_for_a_while(
    guarded: Any, guard: Guard, keys: dict[str, Any]
) -> None:
    """Workers hear of a new key a moment after the coordinator."""
    guard.status.clear()
    trust, clock, context = (
        trust_of(keys["server_key"], keys["key_file"], None),
        Moved(),
        zmq.Context(),
    )
    trust.was_let_in = True
    dialer, port, end = Dialer(context, Rings.NEVER, clock, trust), None, None
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while guard.asked < 3:
            assert time.monotonic() < deadline, "it is not tried again"
            if port is None:
                port = dialer.open(f"tcp://127.0.0.1:{guarded.port}")
            assert dialer.verdict(clock.monotonic_ns()) is None
            if dialer.redials and port is not None:
                dialer.settle()
                port.close(0)
                port = None
        clock.moved_ns += KEY_SETTLE_NS
        while end is None:
            assert time.monotonic() < deadline, "no end"
            port = port or dialer.open(f"tcp://127.0.0.1:{guarded.port}")
            end = dialer.verdict(clock.monotonic_ns())
        assert "this key is not registered" in str(end)
    finally:
        dialer.settle()
        if port is not None:
            port.close(0)
        context.destroy(linger=0)


def test_a_broker_without_curve(broker: Any, keys: dict[str, Any]) -> None:
    refused(broker.url, "does not speak CURVE", **keys)
    assert broker.hellos == 0


def test_nothing_listens(keys: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(danube_fast.Unavailable, match="no broker answers"):
        danube_fast.connect(f"danube://127.0.0.1:{port}", timeout=3, **keys)


def test_a_listener_that_says_nothing(keys: dict[str, Any]) -> None:
    """As a broker does that is stopped, and may go on."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"danube://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(danube_fast.Unavailable, match="no broker answers"):
            danube_fast.connect(url, timeout=3, **keys)


def test_a_check_that_fails_is_no_verdict(guarded: Any, guard: Guard, keys: dict[str, Any]) -> None:
    guard.status[CLIENT[0]] = b"500"
    with pytest.raises(
        danube_fast.Unavailable, match=r"cannot tell just now who may come in; try again"
    ):
        danube_fast.connect(guarded.url, timeout=3, **keys)


def test_a_client_without_keys_is_told_so(guarded: Any) -> None:
    seconds = refused(
        guarded.url, f"127.0.0.1:{guarded.port} asks who you are, and no key is given"
    )
    assert seconds < 1, "the broker said at once that it speaks CURVE"
    assert guarded.hellos == 0


def test_a_broker_that_restarts(keys: dict[str, Any]) -> None:
    """It is away for longer than a verdict takes, and found again."""
    broker = fake_broker.FakeBroker(Guard())
    port = broker.port
    try:
        with danube_fast.connect(broker.url, timeout=WAIT_SECONDS, **keys) as client:
            broker.close()
            bootstrap = client._core.routes.bootstrap
            limit_ns = time.monotonic_ns() + AWAY_NS
            gone = client._pump.wait(lambda: bootstrap.failure is not None, limit_ns)
            assert not gone, f"a broker that is away was taken for a wrong one: {bootstrap.failure}"
            broker = fake_broker.FakeBroker(Guard(), port=port)
            client.publish("/default/other", b"3")
            assert broker.hellos
    finally:
        broker.close()


def test_a_broker_that_asks_for_keys_for_a_while() -> None:
    """libzmq gives a peer up that refuses it for good, and then has no queue for it: the client connects anew."""
    broker = fake_broker.FakeBroker()
    port = broker.port
    try:
        with danube_fast.connect(broker.url, timeout=WAIT_SECONDS) as client:
            bootstrap = client._core.routes.bootstrap
            broker.close()
            broker = fake_broker.FakeBroker(Guard(), port=port)
            limit_ns = time.monotonic_ns() + WAIT_SECONDS * 10**9
            lost = client._pump.wait(lambda: not bootstrap.is_open, limit_ns)
            assert lost, "the client does not notice that it is refused"
            broker.close()
            broker = fake_broker.FakeBroker(port=port)
            client.publish("/default/t", b"1")
    finally:
        broker.close()


def test_a_key_that_is_taken_back(keys: dict[str, Any]) -> None:
    """A client that was connected is told when it has to connect again."""
    broker = fake_broker.FakeBroker(Guard())
    try:
        with danube_fast.connect(broker.url, timeout=WAIT_SECONDS, **keys) as client:
            client.publish("/default/t", b"1")
            port = broker.port
            broker.close()
            guard = Guard()
            guard.status.clear()
            broker = fake_broker.FakeBroker(guard, port=port)
            fails(client, client._core.routes.bootstrap, "not registered")
            with pytest.raises(danube_fast.PermissionDenied, match="not registered"):
                client.admin.create_topic("/default/u")
    finally:
        broker.close()


def test_an_endpoint_of_another_kind(guarded: Any, keys: dict[str, Any]) -> None:
    """A broker cannot send a client elsewhere than where it proves its key."""
    with danube_fast.connect(guarded.url, timeout=WAIT_SECONDS, **keys) as client:
        routes = client._core.routes
        with client._core.pump.lock:
            connection = routes._worker("inproc://elsewhere", False, "")
        fails(client, connection, "neither tcp nor ipc")
