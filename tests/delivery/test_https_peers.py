"""The admin port over TLS and peers that mean no good: half-open, slow, many, large."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from danube_fast.admin.http_connections import CONNECTIONS_MAX, HANDSHAKES_MAX
from tests.delivery.https_rig import HALF_OPEN, HONEST_SECONDS, WAIT_SECONDS, HttpsServer
from tests.workers.broker import wait_until

HONEST_WAITS_MAX = 10
"""Honest requests that may find no room in the kernel's queue beside a flood, each within HONEST_SECONDS."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpsServer]:
    secured = HttpsServer(tmp_path_factory.mktemp("https"))
    with secured:
        secured.make_ann()
        secured.register()
        yield secured


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def timed(server: HttpsServer) -> float:
    """Seconds of an honest request."""
    began = time.monotonic()
    assert server.ask("/metrics", "viewer").code == 200
    return time.monotonic() - began


def test_half_open_connections_keep_no_honest_request_waiting(server: HttpsServer) -> None:
    connection = server.connect("viewer")  # as a scraper has it
    connection.request("GET", "/healthz")
    assert connection.getresponse().read()
    sock = connection.sock
    alone = timed(server)
    pid = json.loads(server.ask("/readyz", "viewer").body)["processes"][0]["pid"]
    before = descriptors(pid)
    with ExitStack() as crowd:
        for number in range(HALF_OPEN):
            plain = crowd.enter_context(socket.socket())
            plain.setblocking(False)
            with suppress(BlockingIOError):
                plain.connect(("127.0.0.1", server.admin_port))
            if number % 2:  # some begin, and go no further
                with suppress(OSError):
                    plain.send(b"\x16\x03\x01\x02\x00\x01")
        beside = timed(server)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() and connection.sock is sock, "it was closed"
        again = timed(server)
        most = before + HANDSHAKES_MAX + CONNECTIONS_MAX
        wait_until("few connections", lambda: descriptors(pid) <= most, HONEST_SECONDS)
    connection.close()
    print(f"\nalone {alone:.3f} s, beside {HALF_OPEN} half-open {beside:.3f} s, then {again:.3f} s")
    assert beside < HONEST_SECONDS and again < HONEST_SECONDS


FLOOD = """
import socket, sys
port, rest = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
held = []
print("floods", flush=True)
while True:
    plain = socket.socket()
    plain.setblocking(False)
    try:
        plain.connect(("127.0.0.1", port))
    except BlockingIOError:
        pass
    except OSError:
        plain.close()
        continue
    held.append(plain)
    if len(held) > 500:
        old = held.pop(0)
        try:
            old.send(rest)
        except OSError:
            pass
        old.close()
"""


def metrics_from(server: HttpsServer, address: str) -> int:
    """Ask for metrics from an address; the status. Raises TimeoutError while the port has no room, and what a connection
    that was given up raises."""
    connection = http.client.HTTPSConnection(
        "127.0.0.1", server.admin_port, timeout=HONEST_SECONDS, context=server.context("viewer"),
        source_address=(address, 0),
    )  # fmt: skip
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_a_flood_of_one_address_leaves_others_alone(server: HttpsServer) -> None:
    """As many connections as a process can open, on and on; honest requests come from another address, and none of them
    gives way once the port has taken it."""
    flood = subprocess.Popen(
        [sys.executable, "-c", FLOOD, str(server.admin_port), "160301020001"], stdout=subprocess.PIPE
    )  # fmt: skip
    took = []
    try:
        assert flood.stdout is not None and flood.stdout.readline() == b"floods\n"
        waited = 0
        while len(took) < 10:
            began = time.monotonic()
            try:
                assert metrics_from(server, "127.0.0.2") == 200
            except (
                TimeoutError
            ):  # it waits in the kernel's queue of the port, which the flood fills
                waited += 1
                assert waited < HONEST_WAITS_MAX, f"{len(took)} of 10 requests were answered"
            else:
                took.append(time.monotonic() - began)
        assert flood.poll() is None
    finally:
        flood.kill()
        flood.wait()
        if flood.stdout is not None:
            flood.stdout.close()
    print(f"\nbeside a flood: {sorted(took)}; {waited} came to no answer")


@pytest.mark.parametrize("kind", ["silent", "slow handshake", "slow request"])
def test_slow_peers_are_closed_in_time(server: HttpsServer, kind: str) -> None:
    """Each is given 10 s for a step."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.admin_port), WAIT_SECONDS) as plain:
        peer: socket.socket = plain
        if kind == "slow request":
            peer = server.context().wrap_socket(plain, server_hostname="localhost")
        peer.settimeout(1.0)
        # the head of a record of 512 bytes, and of a ClientHello, then on and on
        hello = (
            bytes([byte]) for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400)
        )
        is_open = True
        while is_open:
            assert time.monotonic() - began < 4 * 10, "still open"
            try:
                if kind == "slow handshake":
                    plain.sendall(next(hello))
                elif kind == "slow request":
                    peer.sendall(b"G")
                is_open = bool(peer.recv(100))
            except TimeoutError:
                continue
            except OSError:
                is_open = False
        with suppress(OSError):
            peer.close()
    assert time.monotonic() - began < 4 * 10


def tell(server: HttpsServer, *parts: bytes) -> bytes:
    """What the port answers to bytes over TLS, until it closes."""
    with socket.create_connection(("127.0.0.1", server.admin_port), WAIT_SECONDS) as plain:
        heard = b""
        with suppress(OSError), server.context().wrap_socket(plain, server_hostname="localhost") as peer:  # fmt: skip
            for part in parts:
                peer.sendall(part)
            while data := peer.recv(65536):
                heard += data
    return heard


def test_headers_and_bodies_are_bounded(server: HttpsServer) -> None:
    head = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
    heard = tell(server, head, *[b"X-%d: " % number + b"y" * 8000 + b"\r\n" for number in range(1000)])  # fmt: skip
    assert heard == b"" or b" 400 " in heard.split(b"\r\n")[0]
    post = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n"
    pid = json.loads(server.ask("/readyz", "viewer").body)["processes"][0]["pid"]
    before = resident_bytes(pid)
    heard = tell(server, post, *[bytes(1 << 20)] * 200)
    assert heard == b"" or b" 401 " in heard.split(b"\r\n")[0]
    assert resident_bytes(pid) - before < 100 << 20, "a body was kept"
    assert server.ask("/metrics", "viewer").code == 200


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
