"""Connections of a secured broker over raw sockets: names that are others', and what is queued behind a revocation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from danube_fast.security.curve import read_key_file
from tests.delivery.test_security import FELT_SECONDS, SecuredServer
from tests.delivery.test_security_matrix import (
    ADMIN,
    ERROR,
    HELLO,
    LOOKUP,
    PING,
    SUBSCRIBE,
    WELCOME,
    KeyedClient,
    Shop,
)
from tests.workers.broker import wait_until
from tests.workers.test_forward import port_of

TOPIC = "/shop/orders"
FIRST_NAME = 0x6B8B4567
"""Of libzmq's ROUTER in a process that has not called srand()."""
NAMES = 40
MESSAGES, MESSAGE_BYTES = 160, 512 * 1024
KERNEL_BYTES_MAX = 24 << 20
"""Both buffers of a connection in the kernel, and what the client's own ZeroMQ has taken."""
WAIT_MS = 60_000
FLOW, DELIVER = 21, 69


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("connections")
    with SecuredServer(folder / "data", folder) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            shop = Shop(server, ann.admin)
        yield shop
        shop.close()


class NamedSocket:
    """A socket with a user's key that wishes for a name, and says no HELLO."""

    def __init__(self, shop: Shop, user: str, port: int, name: bytes) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        pair = read_key_file(shop.server.folder / f"{user}.key")
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, name)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, shop.server.server_key.encode())
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, *command: Any) -> list[Any] | None:
        """The answer, or None if there is none within half a second."""
        self.socket.send(msgpack.packb(list(command)))
        if not self.socket.poll(500):
            return None
        answer: list[Any] = msgpack.unpackb(self.socket.recv_multipart()[0], strict_map_key=False)
        return answer

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def guesses() -> list[bytes]:
    return [b"\0" + (FIRST_NAME + number).to_bytes(4, "big") for number in range(NAMES)]


def test_who_asks_for_the_name_of_a_lost_connection_has_not_its_session(shop: Shop) -> None:
    ann = shop.raw("ann")
    assert ann.ask(PING)[0] != ERROR
    ann.socket.close(linger=0)  # without BYE: its session stays for a while
    binding = {"binding": "eve", "subject": "user:eve", "role": "admin", "scope": "cluster"}
    for name in guesses():
        eve = NamedSocket(shop, "eve", shop.server.port, name)
        answer = eve.ask(ADMIN, 1, "set_binding", binding)
        eve.close()
        assert answer is None or answer[0] == ERROR, f"{name.hex()} is heard as ann"
    bound = shop.raw("ann").ask(ADMIN, "list_security", {"record_kind": "binding"})
    assert "user:eve" not in str(bound)


@pytest.mark.parametrize("of_worker", [False, True])
def test_who_takes_the_next_names_ends_no_process(shop: Shop, of_worker: bool) -> None:
    port = shop.topic[0].port if of_worker else shop.server.port
    takers = [NamedSocket(shop, "eve", port, name) for name in guesses()]
    try:
        for taker in takers:
            taker.ask(PING, 1)
        before = [shop.raw("pia", port) for _ in range(10)]
        assert [client.ask(PING)[0] for client in before] == [65] * 10
        after = takers[0].ask(HELLO, 2, 1, "eve", {})
        assert after is None or after[0] in (WELCOME, ERROR)
    finally:
        for taker in takers:
            taker.close()
    rows = shop.raw("pia").ask(LOOKUP, TOPIC)[2]["partitions"]
    assert shop.topic[0].port in [port_of(row) for row in rows], "the worker has started again"


class SlowReader(KeyedClient):
    """A consumer whose own ZeroMQ takes next to nothing ahead."""

    def _connect(self) -> Any:
        wire: Any = self.rig
        sock = wire.context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, 1)
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, wire.pair.public.encode())
        sock.setsockopt(zmq.CURVE_SECRETKEY, wire.pair.secret.encode())
        sock.setsockopt(zmq.CURVE_SERVERKEY, wire.server_key.encode())
        wire.sockets.append(sock)
        sock.connect(f"tcp://127.0.0.1:{wire.port}")
        return sock


@pytest.mark.parametrize("revoked", ["key", "right"])
def test_what_is_queued_behind_a_revocation_is_dropped(shop: Shop, revoked: str) -> None:
    place, user = shop.topic[1], f"reader-{revoked}"
    with shop.server.come_in("ann") as ann:
        shop.server.add(ann.admin, user, ("consumer", TOPIC))
        with ann.producer(TOPIC, timeout=60.0) as producer:
            for _ in range(MESSAGES):
                producer.send(bytes(MESSAGE_BYTES))
            producer.flush(timeout=60.0)
        reader = SlowReader(shop.raw(user, place.port).rig)
        assert reader.ask(SUBSCRIBE, 1, 1, place.partition_id, "", "reader", "earliest")[0] != ERROR
        reader.send(FLOW, 1, 1 << 30, 1 << 20)
        assert reader.socket.poll(WAIT_MS), "nothing was delivered"
        if revoked == "key":
            ann.admin.delete_security("credential", f"curve:{shop.server.keys[user]}")
        else:
            ann.admin.delete_security("binding", f"{user}-0")
        wait_until("the end of the connection", lambda: has_ended(place.port), FELT_SECONDS)
    received, quiet_ms = 0, 3000
    while reader.socket.poll(quiet_ms):
        received += sum(len(part) for part in reader.socket.recv_multipart())
    whole = MESSAGES * MESSAGE_BYTES // 2
    assert received < KERNEL_BYTES_MAX < whole, f"{received} bytes came behind the revocation"


def has_ended(port: int) -> bool:
    """Whether a connection of that port was ended while its peer had not taken all (FIN_WAIT1)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "04" for row in rows)
