"""Who comes in: by CURVE on tcp, by the user of the process on ipc, and with which proof."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from danube_fast.net import server as server_module
from danube_fast.net.server import Server
from danube_fast.net.zap import NAME_BYTES
from danube_fast.security.curve import new_key_pair
from tests.net.secure_rig import BROKER, WAIT_SECONDS, SecureRig, wait_for

ALICE, BOB, MALLORY = new_key_pair(), new_key_pair(), new_key_pair()
UID = f"uid:{os.getuid()}"
OF_ALICE, OF_BOB = f"curve:{ALICE.public}", f"curve:{BOB.public}"
ADMITTED = {OF_ALICE, OF_BOB, UID}
LARGE = bytes(100_000)
V3_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
V2_GREETING = b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\0\0"
V1_GREETING = b"\x01\x00"


@pytest.fixture
def rigs() -> Iterator[Callable[..., SecureRig]]:
    made: list[SecureRig] = []

    def make(admit: Callable[[str], bool] = ADMITTED.__contains__, **options: object) -> SecureRig:
        made.append(SecureRig(admit, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(rigs: Callable[..., SecureRig]) -> SecureRig:
    return rigs()


def is_well(rig: SecureRig) -> None:
    """Nothing of others is at the server, and who may connect does."""
    rig.client(rig.tcp, ALICE).send(b"well")
    assert rig.outcome(), "the right key was refused"
    assert rig.take()[1:] == ([b"well"], OF_ALICE)


def test_the_right_key_is_admitted_with_its_proof(rig: SecureRig) -> None:
    for pair, proof in ((ALICE, OF_ALICE), (BOB, OF_BOB)):
        rig.client(rig.tcp, pair).send_multipart([b"hello", b"more"])
        assert rig.outcome()
        assert rig.take()[1:] == ([b"hello", b"more"], proof)


def test_an_unknown_key_is_refused(rig: SecureRig) -> None:
    rig.client(rig.tcp, MALLORY).send(b"hello")
    assert not rig.outcome()
    is_well(rig)


def test_tcp_without_a_mechanism_is_refused(rig: SecureRig) -> None:
    rig.client(rig.tcp).send(b"hello")
    assert not rig.outcome()
    is_well(rig)


def test_tcp_without_a_key_of_the_broker_is_refused(rigs: Callable[..., SecureRig]) -> None:
    rig = rigs(lambda proof: True, curve_secret="")
    rig.client(rig.tcp).send(b"hello")
    assert not rig.outcome()
    rig.client(rig.ipc).send(b"near")
    assert rig.outcome()
    assert rig.take()[1:] == ([b"near"], UID)


@pytest.mark.parametrize("place", ["tcp", "ipc"])
def test_passwords_are_refused(rig: SecureRig, place: str) -> None:
    client = rig.dealer()
    client.setsockopt(zmq.PLAIN_USERNAME, b"alice")
    client.setsockopt(zmq.PLAIN_PASSWORD, b"alice")
    client.connect(getattr(rig, place))
    client.send(b"hello")
    assert not rig.outcome()
    is_well(rig)


def test_a_client_that_expects_another_broker_never_connects(rig: SecureRig) -> None:
    client = rig.client(rig.tcp, ALICE, server_key=MALLORY.public)
    client.send(b"hello")
    assert not rig.outcome()
    is_well(rig)


def test_a_peer_on_ipc_is_its_user(rig: SecureRig) -> None:
    rig.client(rig.ipc).send(b"hello")
    assert rig.outcome()
    assert rig.take()[1:] == ([b"hello"], UID)


def test_a_user_that_is_not_admitted_is_refused_on_ipc(rigs: Callable[..., SecureRig]) -> None:
    rig = rigs({OF_ALICE}.__contains__)
    rig.client(rig.ipc).send(b"hello")
    assert not rig.outcome()
    is_well(rig)


def test_a_key_is_of_no_use_on_ipc(rig: SecureRig) -> None:
    rig.client(rig.ipc, ALICE).send(b"hello")
    assert not rig.outcome()
    is_well(rig)


def test_a_known_sender_needs_no_proof(rig: SecureRig) -> None:
    client = rig.client(rig.tcp, ALICE)
    client.send(b"hello")
    identity, _, proof = rig.take()
    assert proof == OF_ALICE
    rig.known.add(identity)
    client.send_multipart([b"again", LARGE])
    assert rig.take() == (identity, [b"again", LARGE], "")
    rig.known.clear()
    client.send(b"forgotten")
    assert rig.take() == (identity, [b"forgotten"], OF_ALICE)


def test_a_proof_ends_with_its_message(rig: SecureRig) -> None:
    """What comes over another transport next has proved nothing."""
    client = rig.client(rig.tcp, ALICE)
    for limit in (1, 2):  # the limit ends it, or there is nothing more
        client.send(b"hello")
        wait_for(rig.server.readable, "a message")
        assert [rig.server.proof for _ in rig.server.receive(limit)] == [OF_ALICE]
        assert rig.server.proof == ""
    client.send(b"hello")
    wait_for(rig.server.readable, "a message")
    for _ in rig.server.receive(2):
        break
    assert rig.server.proof == ""


def test_messages_of_unknown_senders_stay_whole_and_in_order(rig: SecureRig) -> None:
    alice, bob = rig.client(rig.tcp, ALICE), rig.client(rig.ipc)
    sent = [
        [b"%d" % number, *[b"%d" % part for part in range(number % 5)], LARGE, b""]
        for number in range(100)
    ]
    for message in sent:
        alice.send_multipart(message)
        bob.send_multipart(message)
    found = rig.take_all(2 * len(sent))
    for proof in (OF_ALICE, UID):
        assert [parts for _, parts, of in found if of == proof] == sent


def test_known_and_unknown_senders_beside_each_other(rig: SecureRig) -> None:
    alice, bob = rig.client(rig.tcp, ALICE), rig.client(rig.tcp, BOB)
    alice.send(b"hello")
    rig.known.add(rig.take()[0])
    for number in range(50):
        alice.send_multipart([b"a%d" % number, LARGE])
        bob.send_multipart([b"b%d" % number, b"x", LARGE])
    found = rig.take_all(100)
    for name, proof in ((b"a", ""), (b"b", OF_BOB)):
        mine = [(parts[0], of) for _, parts, of in found if parts[0][:1] == name]
        assert mine == [(name + b"%d" % number, proof) for number in range(50)]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_command_that_was_left_to_the_server_is_received_by_it(
    rig: SecureRig, is_known: bool
) -> None:
    """As kernels leave it, with the sender in hand."""
    client = rig.client(rig.tcp, ALICE)
    for message in ([b"hello", b"x", LARGE, b"y"], [b"alone"], [b"next"]):
        client.send_multipart(message)
        wait_for(rig.server.readable, "a message")
        head = rig.server._port.receive_head()
        assert head is not None
        identity = bytes(head)
        if is_known:
            rig.known.add(identity)
        rig.server.hold(identity, None, [], more=True)
        assert rig.server.holds
        assert rig.take() == (identity, message, "" if is_known else OF_ALICE)
        assert not rig.server.holds


def test_a_held_message_that_kernels_received_has_no_proof(rig: SecureRig) -> None:
    client = rig.client(rig.tcp, ALICE)
    client.send(b"hello")
    assert rig.take()[2] == OF_ALICE
    rig.server.hold(b"\0abcdefg", memoryview(b"command"), [b"body"], more=False)
    assert rig.take() == (b"\0abcdefg", [b"command", b"body"], "")


def test_a_peer_that_names_itself_is_ignored(rigs: Callable[..., SecureRig]) -> None:
    rig = rigs(proves=False, curve_secret="")
    client = rig.dealer()
    client.setsockopt(zmq.IDENTITY, b"\x01mine")
    client.connect(rig.tcp)
    client.send_multipart([b"hello", b"x"])
    assert rig.outcome()
    wait_for(rig.server.readable, "a message")
    assert list(rig.server.receive(1)) == []
    rig.client(rig.tcp).send(b"well")
    assert rig.take()[1:] == ([b"well"], "")


@pytest.mark.parametrize("wish", [b"", b"\0abcd", b"\0abcdefg"])
def test_who_connects_behind_curve_does_not_choose_its_name(rig: SecureRig, wish: bytes) -> None:
    names: set[bytes] = set()
    for _ in range(100):
        if len(names) == 20:
            break
        client = rig.dealer()
        if wish:
            client.setsockopt(zmq.ROUTING_ID, wish)
        for option, key in (
            (zmq.CURVE_PUBLICKEY, ALICE.public), (zmq.CURVE_SECRETKEY, ALICE.secret),
            (zmq.CURVE_SERVERKEY, BROKER.public),
        ):  # fmt: skip
            client.setsockopt(option, key.encode())
        client.connect(rig.tcp)
        client.send(b"hello")
        wait_for(rig.server.readable, "a message")
        # none if ZeroMQ's thread was held up, and the wish came behind the name; its client connects again
        names |= {identity for identity, _, _ in rig.server.receive(1)}
    assert len(names) == 20 and wish not in names
    assert {len(name) for name in names} == {NAME_BYTES}
    assert len({name[:-2] for name in names}) == 20, "names differ by their numbers alone"


def test_who_chooses_its_name_by_a_slow_handshake_is_not_heard(rig: SecureRig) -> None:
    """On ipc what a client says of itself can come behind the answer that names it."""
    for name, is_heard in (
        (b"\0abcd", False),
        (b"", False),
        (b"\x01abcdefg", False),
        (b"\0abcdefgh", False),
        (b"\0" + secrets.token_bytes(7), True),
    ):
        with slow_ipc(rig, name) as raw:
            raw.sendall(b"\x00\x05hello")
            if is_heard:
                assert rig.take() == (name, [b"hello"], UID)
            else:
                wait_for(rig.server.readable, "a message")
                assert list(rig.server.receive(1)) == []
    is_well(rig)


def test_the_names_of_routers_begin_at_random() -> None:
    """From libc's own beginning the first one is the same in every process: 6b 8b 45 67."""
    script = "from tests.net.test_server_security import first_name; print(first_name().hex())"
    names = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            timeout=WAIT_SECONDS,
        ).stdout
        for _ in range(3)
    }  # fmt: skip
    assert len(names) == 3


def first_name() -> bytes:
    """The name that ROUTER gives its first peer, without a ZapThread."""
    with zmq.Context() as context:
        server = Server(context, message_bytes_max=1 << 20, handshake_timeout_ms=30_000)
        port = server.bind("127.0.0.1", 0, "")
        with context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"hello")
            (identity, _, _) = wait_for(lambda: [*server.receive(1)], "a message")[0]
        server.close()
    return bytes(identity)


def test_ipc_is_opened_again_without_a_mechanism(
    rig: SecureRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = 1000
    monkeypatch.setattr(server_module, "descriptor_limit", lambda: 1000)
    monkeypatch.setattr(server_module, "lowest_free_descriptor", lambda: used)
    rig.server.mind_descriptors()
    assert not rig.server._ipc_is_open
    used = 0

    def is_open() -> bool:
        rig.server.mind_descriptors()
        return rig.server._ipc_is_open

    wait_for(is_open, "to open ipc again")
    rig.client(rig.ipc).send(b"hello")
    assert rig.outcome()
    assert rig.take()[1:] == ([b"hello"], UID)
    is_well(rig)


def test_without_the_thread_no_client_is_admitted(rig: SecureRig) -> None:
    is_well(rig)
    rig.zap.stop()
    assert not rig.zap.is_alive
    for place, pair in ((rig.tcp, ALICE), (rig.ipc, None)):
        rig.client(place, pair).send(b"hello")
        assert not rig.outcome()
    assert not rig.server.readable()


def test_a_thread_that_does_not_answer_admits_no_client(rigs: Callable[..., SecureRig]) -> None:
    """The handshake ends when its time is up, whatever is said later."""
    asked, may_answer = threading.Event(), threading.Event()

    def admit(proof: str) -> bool:
        asked.set()
        return may_answer.wait(WAIT_SECONDS)

    rig = rigs(admit, handshake_timeout_ms=100)
    try:
        rig.client(rig.tcp, ALICE).send(b"hello")
        assert asked.wait(WAIT_SECONDS), "the thread was not asked"
        assert not rig.outcome()
    finally:
        may_answer.set()
    rig.zap.stop()
    assert not rig.server.readable()


def test_encryption_alone_takes_any_key(rigs: Callable[..., SecureRig]) -> None:
    rig = rigs(proves=False)
    rig.zap.stop()
    rig.client(rig.tcp).send(b"plain")
    assert not rig.outcome()
    rig.client(rig.tcp, MALLORY).send(b"hello")
    assert rig.take()[1:] == ([b"hello"], "")


def raw_ipc(rig: SecureRig) -> socket.socket:
    """A connection without ZeroMQ."""
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(WAIT_SECONDS)
    raw.connect("\0" + rig.ipc.removeprefix("ipc://@"))
    return raw


def raw_tcp(rig: SecureRig) -> socket.socket:
    host, _, port = rig.tcp.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)


def slow_ipc(rig: SecureRig, name: bytes) -> socket.socket:
    """A connection that has shaken hands, and claimed the name of another user when it was admitted."""
    claims = {b"Socket-Type": b"DEALER", b"Identity": name, b"User-Id": OF_ALICE.encode()}
    ready = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in claims.items()
    )
    raw = raw_ipc(rig)
    raw.sendall(V3_GREETING)
    with raw.makefile("rb", buffering=0) as answers:
        left = len(V3_GREETING)
        while left:
            left -= len(answers.read(left)) or pytest.fail("no greeting")
        assert answers.read(1), "the handshake was refused"  # READY of the server: it was admitted
        raw.sendall(bytes([4, len(ready)]) + ready)
    return raw


def test_what_a_handshake_claims_is_not_the_proof(rig: SecureRig) -> None:
    with slow_ipc(rig, b"\0" + secrets.token_bytes(7)) as raw:
        raw.sendall(b"\x00\x05hello")
        assert rig.take()[1:] == ([b"hello"], UID)


@pytest.mark.parametrize("connect", [raw_ipc, raw_tcp])
@pytest.mark.parametrize("greeting", [V1_GREETING, V2_GREETING])
def test_protocols_from_before_the_mechanisms_are_refused(
    rig: SecureRig, connect: Callable[[SecureRig], socket.socket], greeting: bytes
) -> None:
    with connect(rig) as raw:
        raw.sendall(greeting + b"\x00\x05hello" * 3)
        try:
            while raw.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert not rig.server.readable()
    rig.client(rig.tcp, ALICE).send(b"well")
    assert rig.take()[1:] == ([b"well"], OF_ALICE)


def test_the_key_of_the_broker_is_not_shown(rig: SecureRig) -> None:
    assert BROKER.secret not in repr(rig.server)
