"""What the kernel tells of connections that ended before their key was known, whatever way they went."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from danube_fast.bench.load.zmtp import CurvePeer, NullPeer, why_no_sodium
from danube_fast.clock import SystemClock
from danube_fast.net.connection_guard import ConnectionGuard
from danube_fast.net.early_ends import COSTLY, SILENT, EarlyEnds
from danube_fast.net.guarded_connection import Limits
from danube_fast.net.server import Server
from danube_fast.net.zap import ZapThread
from danube_fast.security.curve import new_key_pair
from tests.net.secure_rig import BROKER, SecureRig, wait_for

pytestmark = pytest.mark.skipif(bool(why_no_sodium()), reason=why_no_sodium())

ALICE, MALLORY = new_key_pair(), new_key_pair()
SOURCE = "127.0.0.1"
TIMEOUT_MS = 2000


def admits(proof: str) -> bool:
    return proof == f"curve:{ALICE.public}"


@pytest.fixture
def rig() -> Iterator[SecureRig]:
    made = SecureRig(admits, handshake_timeout_ms=TIMEOUT_MS)
    yield made
    made.close()


@pytest.fixture
def ends(rig: SecureRig) -> Iterator[EarlyEnds]:
    made = EarlyEnds(SOURCE, port_of(rig))
    made.open()
    yield made
    made.close()


def port_of(rig: SecureRig) -> int:
    return int(rig.tcp.rsplit(":", 1)[1])


def silent(port: int) -> NullPeer:
    return NullPeer(port)


def waits_and_closes(port: int) -> NullPeer:
    """A probe that looks at the greeting."""
    peer = NullPeer(port)
    peer.read(10)
    return peer


def speaks_http(port: int) -> NullPeer:
    peer = NullPeer(port)
    peer.socket.sendall(b"GET / HTTP/1.0\r\n\r\n")
    return is_closed(peer)


def babbles(port: int) -> NullPeer:
    peer = NullPeer(port)
    peer.socket.sendall(b"\xff" + b"3" * 63)
    return is_closed(peer)


def greets_without_a_key(port: int) -> NullPeer:
    peer = NullPeer(port)
    with suppress(OSError):
        peer.shake_hands()
    return is_closed(peer)


def is_closed(peer: NullPeer) -> NullPeer:
    """Wait until the broker has closed it."""
    with suppress(ConnectionResetError):
        while peer.socket.recv(100):
            pass
    return peer


def curve(port: int, *, server_key: str = BROKER.public, pair: Any = ALICE) -> CurvePeer:
    return CurvePeer(port, server_key, pair.public, pair.secret)


def takes_another_broker(port: int) -> NullPeer:
    peer = curve(port, server_key=MALLORY.public)
    with pytest.raises(ConnectionResetError):
        peer.say_hello()
    return peer


def goes_after_hello(port: int) -> NullPeer:
    peer = curve(port)
    peer.say_hello()
    return peer


def waits_after_hello(port: int) -> NullPeer:
    return is_closed(goes_after_hello(port))


def proves_nothing(port: int) -> NullPeer:
    """Send an INITIATE as long as it likes."""
    peer = goes_after_hello(port)
    peer.socket.sendall(peer.framed(b"\x08INITIATE" + bytes(400), 4))
    return is_closed(peer)


@pytest.mark.parametrize(
    ("way", "weight"),
    [
        (silent, SILENT), (waits_and_closes, SILENT), (speaks_http, COSTLY), (babbles, COSTLY),
        (greets_without_a_key, COSTLY), (takes_another_broker, COSTLY), (goes_after_hello, COSTLY),
        (waits_after_hello, COSTLY), (proves_nothing, COSTLY),
    ],
)  # fmt: skip
def test_what_ends_before_its_key_is_known_counts_by_its_cost(
    rig: SecureRig, ends: EarlyEnds, way: Callable[[int], NullPeer], weight: int
) -> None:
    way(port_of(rig)).socket.close()
    assert wait_for(ends.take, "word of an end") == [(SOURCE, weight)]


def is_admitted(port: int) -> NullPeer:
    peer = curve(port)
    peer.shake_hands()
    return peer


def is_refused(port: int) -> NullPeer:
    peer = curve(port, pair=MALLORY)
    with pytest.raises(ConnectionRefusedError):
        peer.shake_hands()
    return peer


@pytest.mark.parametrize("way", [is_admitted, is_refused])
@pytest.mark.parametrize("resets", [False, True])
def test_whose_key_was_asked_about_is_not_told_of(
    rig: SecureRig, ends: EarlyEnds, way: Callable[[int], NullPeer], resets: bool
) -> None:
    """A refused key is ZAP's to count, and an admitted one no failure, however soon it goes."""
    for _ in range(10):
        peer = way(port_of(rig))
        if resets:
            peer.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", True, False)
            )
        peer.socket.close()
    babbles(port_of(rig)).socket.close()  # the last to end
    assert wait_for(ends.take, "word of an end") == [(SOURCE, COSTLY)]
    assert ends.take() == []


def test_other_ports_other_addresses_and_a_closed_ear_are_not_told_of() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        port = one.getsockname()[1]
        with socket.create_server(("127.0.0.3", port)) as elsewhere:
            ends = EarlyEnds(SOURCE, port)
            wide = EarlyEnds("0.0.0.0", port)
            ends.open()
            ends.open()
            wide.open()
            for listener in (two, elsewhere, one):
                client = socket.create_connection(
                    listener.getsockname(), source_address=("127.0.0.2", 0)
                )
                accepted, _ = listener.accept()
                client.sendall(b"abc")
                assert accepted.recv(3) == b"abc"
                client.close()
                accepted.close()
            assert wait_for(ends.take, "word of an end") == [("127.0.0.2", COSTLY)]
            found: list[Any] = []
            wait_for(lambda: found.extend(wide.take()) or len(found) == 2, "word of both addresses")
            ends.close()
            ends.close()
            wide.close()
            assert ends.take() == []


def test_an_end_over_ipv6_is_told_of() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6")
    with listener:
        ends = EarlyEnds("::1", listener.getsockname()[1])
        ends.open()
        client = socket.create_connection(listener.getsockname()[:2])
        accepted, _ = listener.accept()
        client.close()
        accepted.close()
        assert wait_for(ends.take, "word of an end") == [("::1", SILENT)]
        ends.close()


# ---------------------------------------------------------------- with the guard


MOST = 10


class Guarded:
    """A server with its guard, whose filter is a list."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.zap = ZapThread(self.context, admits)
        self.zap.start()
        self.server = Server(
            self.context, message_bytes_max=1 << 20, handshake_timeout_ms=60_000, curve_secret=BROKER.secret,
            proves=True,
        )  # fmt: skip
        limits = Limits(60_000_000_000, 1 << 20, 100, failures_max=MOST)
        self.guard = ConnectionGuard(self.context, self.server.socket, limits, SystemClock())
        self.server.guard = self.guard
        self.told: list[set[bytes]] = []
        self.port = self.server.bind("127.0.0.1", 0, "")
        self.guard.failed.drop = lambda sources: self.told.append(set(sources))

    def close(self) -> None:
        self.zap.stop()
        self.server.close()
        self.context.destroy(linger=0)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.close()


@pytest.mark.parametrize("way", [babbles, takes_another_broker, goes_after_hello])
def test_the_guard_holds_off_who_fails_before_a_key_is_known(
    guarded: Guarded, way: Callable[[int], NullPeer]
) -> None:
    def goes_on() -> bool:
        way(guarded.port).socket.close()
        return {socket.inet_aton(SOURCE)} in guarded.told

    wait_for(goes_on, "a hold")


def test_the_guard_holds_off_no_probes_and_no_clients_that_come_again(guarded: Guarded) -> None:
    for _ in range(4 * MOST):
        is_admitted(guarded.port).socket.close()
    for _ in range(MOST):
        silent(guarded.port).socket.close()
    assert not guarded.told


def test_a_guard_without_netlink_says_so_and_goes_on(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opens() -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    assert guarded.guard.failed.ends is not None
    monkeypatch.setattr(guarded.guard.failed.ends, "open", opens)

    def goes_on() -> bool:
        babbles(guarded.port).socket.close()
        return "are not counted" in caplog.text

    wait_for(goes_on, "a warning")
    assert not guarded.told
    is_admitted(guarded.port).socket.close()
