"""Kernels that take publishes from a ROUTER which proves its peers: they leave commands of unknown ones to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import pytest
import zmq

from danube_fast.config import Settings
from danube_fast.net.greeting import message_bytes_max
from danube_fast.net.server import Server
from danube_fast.net.zap import ZapThread
from danube_fast.security.curve import KeyPair, new_key_pair
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.shard.routed_peers import RoutedPeers
from tests.workers.ring_client import RingSocket, fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import Publisher, expected, intake_of, warmed
from tests.workers.shard_faults import wait
from tests.workers.shard_rig import RawClient, Rig

HELLO, PING, WELCOME = 1, 2, 64
BROKER, ALICE, BOB = new_key_pair(), new_key_pair(), new_key_pair()
OF_ALICE, OF_BOB = f"curve:{ALICE.public}", f"curve:{BOB.public}"
LARGE = bytes(100_000)


class Proving(Environment):
    """Servers that prove who connects, and what HELLOs have proved."""

    def __init__(self) -> None:
        super().__init__()
        self.proofs: list[str] = []
        self.claimed: list[tuple[str, str]] = []
        """Principal and proof of each HELLO."""
        self.authenticator = self

    def make_server(
        self, context: zmq.Context[zmq.Socket[bytes]], settings: Settings, secured: Any = None
    ) -> Server:
        self.zap = ZapThread(context, {OF_ALICE, OF_BOB}.__contains__)
        self.zap.start()
        self.server = Server(
            context, message_bytes_max=message_bytes_max(settings), handshake_timeout_ms=30_000,
            curve_secret=BROKER.secret, proves=True,
        )  # fmt: skip
        return self.server

    def authenticate(self, claims: Mapping[str, Any], proof: str = "") -> str:
        self.proofs.append(self.server.proof)
        self.claimed.append((claims.get("principal", ""), self.server.proof))
        return self.server.proof or "ring"


class CurveClient(RawClient):
    """A client with a key."""

    def __init__(self, rig: Rig, pair: KeyPair) -> None:
        self.pair = pair
        super().__init__(rig)
        rig.clients.append(self)

    def _connect(self) -> Any:
        return connect(self.rig, self.pair)


def connect(rig: Rig, pair: KeyPair) -> Any:
    sock = rig.context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    sock.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    sock.setsockopt(zmq.CURVE_SERVERKEY, BROKER.public.encode())
    sock.connect(f"tcp://127.0.0.1:{rig.port}")
    return sock


@pytest.fixture
def environment() -> Proving:
    return Proving()


@pytest.fixture
def rig(rigs: Callable[..., Rig], environment: Proving) -> Iterator[Rig]:
    made = rigs(ipc_endpoint=fresh_endpoint(), environment=environment)
    sessions = made.worker.state.sessions
    made.worker.server.is_known = lambda identity: sessions.by_identity(identity) is not None
    made.assign(1, durability="memory")
    yield made
    environment.zap.stop()


@pytest.fixture
def held(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """What kernels leave to Python: the command, whether more parts follow."""
    found: list[tuple[Any, bool]] = []
    keep = rig.worker.server.hold

    def hold(identity: bytes, command: Any, parts: list[Any], *, more: bool) -> None:
        found.append((command, more))
        keep(identity, command, parts, more=more)

    monkeypatch.setattr(rig.worker.server, "hold", hold)
    return found


def publisher_of(rig: Rig, pair: KeyPair = ALICE, name: str = "p") -> Publisher:
    """A publisher whose next message kernels may serve."""
    client: Any = CurveClient(rig, pair)
    publisher = Publisher(rig, 1, name, client)
    for _ in range(2):  # before the first one its peer was not known
        publisher.post()
        publisher.finish()
    return publisher


def test_a_hello_between_publishes_is_handed_out_with_its_proof(
    rig: Rig, environment: Proving, held: list[tuple[Any, bool]]
) -> None:
    publisher = publisher_of(rig)
    assert environment.proofs == [OF_ALICE]
    held.clear()
    for _ in range(20):
        publisher.post(20)
        stranger = CurveClient(rig, BOB)
        assert stranger.ask(PING)[0] != 0
        publisher.finish()
    assert environment.proofs == [OF_ALICE, *[OF_BOB] * 20]
    assert (None, True) in held, "kernels have met no HELLO"
    assert publisher.outcomes == [[0, offset] for offset in range(402)]


def test_kernels_serve_known_peers_as_ever(rig: Rig) -> None:
    publisher, consumer = publisher_of(rig), CurveClient(rig, BOB)
    consumer.subscribe(1)
    assert consumer.receive(2) == expected(0, 2)
    served = warmed(rig, publisher)
    publisher.post(50)
    publisher.finish()
    assert consumer.receive(51) == expected(2, 53)
    assert sum(served.values()) > 0, served


def test_a_hello_that_ends_a_sleep_of_kernels_has_its_proof(
    rig: Rig, environment: Proving, held: list[tuple[Any, bool]]
) -> None:
    publisher_of(rig)
    taking = intake_of(rig)
    held.clear()
    stranger = connect(rig, BOB)
    stranger.send_multipart([msgpack.packb([HELLO, 1, 1, "raw", {}])])
    wait(lambda: rig.worker.server._port.readable(), "a HELLO at the worker")
    assert taking.sleep(1000, lambda timeout_ms: []), "a client's message did not end the sleep"
    assert held == [(None, True)]
    assert rig.worker.transports.readable()
    rig.turn(lambda: stranger.poll(0), "an answer")
    assert msgpack.unpackb(stranger.recv(), strict_map_key=False)[0] == WELCOME
    assert environment.proofs == [OF_ALICE, OF_BOB]
    assert not rig.worker.server.holds
    stranger.close(linger=0)


def test_messages_of_a_stranger_stay_whole(rig: Rig, held: list[tuple[Any, bool]]) -> None:
    publisher = publisher_of(rig)
    found: list[tuple[list[bytes], str]] = []
    receive, server = rig.worker.server.receive, rig.worker.server

    def watched(limit: int) -> Iterator[Any]:
        for identity, command, parts in receive(limit):
            if bytes(command)[:1] == b"?":
                found.append(([bytes(command), *map(bytes, parts)], server.proof))
            yield identity, command, parts

    server.receive = watched  # type: ignore[method-assign]
    held.clear()
    stranger = connect(rig, BOB)
    sent = [
        [b"?%d" % number, *[b"x"] * (number % 4), *[LARGE] * (number % 3)] for number in range(60)
    ]
    for message in sent:
        stranger.send_multipart(message)
        publisher.post()
    rig.turn(lambda: len(found) == len(sent), "all messages of the stranger")
    publisher.finish()
    assert found == [(message, OF_BOB) for message in sent]
    assert (None, True) in held, "kernels have met no message of the stranger"
    stranger.close(linger=0)


def test_a_peer_without_a_row_is_known_by_its_session(
    rig: Rig, environment: Proving, held: list[tuple[Any, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the place of its row is taken, all of its messages go the ordinary way."""
    publisher = publisher_of(rig)
    monkeypatch.setattr(RoutedPeers, "add", lambda *_: None)
    other = publisher_of(rig, BOB, "q")
    held.clear()
    for _ in range(20):
        other.post(3)
        publisher.post(3)
        assert other.client.ask(PING)[0] != 0
        other.finish()
        publisher.finish()
    assert (None, True) in held
    assert environment.proofs == [OF_ALICE, OF_BOB]
    assert all(status == 0 for status, _ in publisher.outcomes + other.outcomes)


def test_an_identity_that_a_peer_brings_is_not_its_name(
    rig: Rig, held: list[tuple[Any, bool]]
) -> None:
    name = b"\x01" + bytes(200)
    publisher = publisher_of(rig)
    held.clear()
    stranger = rig.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.IDENTITY, name)
    stranger.setsockopt(zmq.CURVE_PUBLICKEY, BOB.public.encode())
    stranger.setsockopt(zmq.CURVE_SECRETKEY, BOB.secret.encode())
    stranger.setsockopt(zmq.CURVE_SERVERKEY, BROKER.public.encode())
    stranger.connect(f"tcp://127.0.0.1:{rig.port}")
    stranger.send_multipart([msgpack.packb([HELLO, 1, 1, "raw", {}]), b"x"])
    rig.turn(lambda: held, "kernels to meet the stranger")
    assert held[0] == (None, True)
    publisher.post(20)
    publisher.finish()
    assert not rig.worker.state.sessions.knows(name)
    stranger.close(linger=0)


def test_rings_go_on_beside_it(rig: Rig, environment: Proving) -> None:
    routed, ringed = publisher_of(rig), Publisher(rig, 1, "over rings", ring_client(rig))
    assert environment.proofs == [OF_ALICE, ""]
    for _ in range(20):
        ringed.post(5)
        routed.post(5)
        CurveClient(rig, BOB)
        ringed.finish()
        routed.finish()
    assert environment.proofs[2:] == [OF_BOB] * 20
    assert all(status == 0 for status, _ in routed.outcomes + ringed.outcomes)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_hello_over_rings_does_not_get_the_proof_of_another(
    rig: Rig, environment: Proving, turns: int
) -> None:
    """Either transport goes first in a turn."""
    publisher_of(rig)
    near, far = RingSocket(rig), connect(rig, BOB)
    for _ in range(turns):
        rig.worker.do_work()
    for sock, name in ((far, "far"), (near, "near")):
        sock.send_multipart([msgpack.packb([HELLO, 1, 1, "raw", {"principal": name}])])
    wait(lambda: rig.worker.server._port.readable(), "a HELLO at the worker")
    rig.turn(lambda: len(environment.claimed) == 3, "both HELLOs")
    assert sorted(environment.claimed[1:]) == [("far", OF_BOB), ("near", "")]
    near.close()
    far.close(linger=0)
