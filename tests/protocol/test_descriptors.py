"""A broker with few file descriptors, and strangers who take as many connections as they get."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import danube_fast
from danube_fast.descriptors import (
    DESCRIPTORS_RESERVED,
    descriptor_limit,
    keep_reserve,
    open_file,
)
from danube_fast.net import server
from danube_fast.ring.handover import RingServer, address_beside, dial
from tests.protocol.attacked import cpu_seconds
from tests.workers.broker import ROOT, Broker, Client, wait_until

DESCRIPTORS = 256
STRANGERS = 400
WAIT_SECONDS = 60
MIB = 1 << 20
SEGMENTS = 4
CPU_SECONDS = 2.0
SHARE_MAX = 0.4
"""Of a core; measured 0.02. One that spins uses all of it."""
TOPIC = "/default/few"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", fake="", descriptors=DESCRIPTORS, workers=1) as started:
        started.wait_ready()
        yield started


def connect_all(family: int, address: Any, said: bytes = b"") -> contextlib.ExitStack:
    """As many connections as the other side lets in, each of which says no more than `said`."""
    stack = contextlib.ExitStack()
    for _ in range(STRANGERS):
        stranger = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        stranger.settimeout(1)
        with contextlib.suppress(OSError):
            stranger.connect(address)
            stranger.sendall(said)
    return stack


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def check_serves(broker: Broker) -> None:
    """A client that comes now is served, by processes that none of it has hurt."""
    with danube_fast.connect(broker.ready["url"], timeout=WAIT_SECONDS) as client:
        client.publish(TOPIC, b"x")
    status = broker.status()["processes"]
    assert [entry["restarts"] for entry in status] == [0, 0], broker.error_text()


def test_half_sent_requests_keep_nobody_out_of_the_admin_port(broker: Broker) -> None:
    admin = broker.ready["admin"]
    with connect_all(socket.AF_INET, ("127.0.0.1", port_of(admin)), b"GET /healthz HTTP/1.1\r\n"):
        with urllib.request.urlopen(f"{admin}/healthz", timeout=WAIT_SECONDS) as answer:
            assert answer.status == 200
        check_serves(broker)
    assert len(broker.error_text()) < 10_000


@pytest.mark.parametrize("door", ["ipc", "shm", "tcp", "bootstrap"])
def test_silent_connections_keep_nobody_out_and_end_no_process(broker: Broker, door: str) -> None:
    with Client(broker) as client:
        _, _, _, tcp, ipc = client.lookup(TOPIC, {}).value["partitions"][0]
    family, address = socket.AF_INET, ("127.0.0.1", port_of(tcp))
    if door == "bootstrap":
        address = ("127.0.0.1", port_of(broker.ready["url"]))
    elif door != "tcp":
        name = ipc.removeprefix("ipc://@") or "nothing-listens-here"
        family = socket.AF_UNIX
        address = address_beside(f"ipc://@{name}") if door == "shm" else f"\0{name}".encode()
    with connect_all(family, address):
        check_serves(broker)
    check_serves(broker)
    # where it could not start for lack of descriptors, it starts now
    with urllib.request.urlopen(f"{broker.ready['admin']}/healthz", timeout=WAIT_SECONDS) as answer:
        assert answer.status == 200
    assert len(broker.error_text()) < 10_000


@contextlib.contextmanager
def strangers_come_again(port: int) -> Iterator[None]:
    """As many connections as there are descriptors, again and again, each silent."""
    ends = threading.Event()

    def come() -> None:
        while not ends.is_set():
            with connect_all(socket.AF_INET, ("127.0.0.1", port)):
                ends.wait(0.02)

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(WAIT_SECONDS)


def test_the_log_goes_on_while_strangers_take_every_descriptor(tmp_path: Path) -> None:
    """They would say nothing for longer than the test takes, and more wait to be let in."""
    small = {"segment_bytes": MIB, "segment_start_bytes": MIB, "handshake_timeout_ms": 600_000}
    with Broker(tmp_path / "data", fake="", descriptors=DESCRIPTORS, workers=1, **small) as broker:
        broker.wait_ready()
        with danube_fast.connect(broker.ready["url"], timeout=WAIT_SECONDS) as client:
            client.publish(TOPIC, b"x")
            with strangers_come_again(broker.ready["worker_ports"][0]):
                for _ in range(SEGMENTS):
                    client.publish(TOPIC, b"x" * (MIB // 3))
                    client.publish(TOPIC, b"x" * (MIB // 3))
        check_serves(broker)


@pytest.mark.parametrize("auth", ["none", "required"])
def test_who_holds_every_descriptor_is_sent_away_and_no_core_spins(
    tmp_path: Path, auth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeroMQ tries to accept without a pause while none is left, so connections that say nothing must not hold all."""
    long = {"handshake_timeout_ms": 600_000, "auth": auth}
    with Broker(tmp_path / "data", fake="", descriptors=DESCRIPTORS, workers=1, **long) as broker:
        broker.wait_ready()
        pid, port = broker.ready["worker_pids"][0], broker.ready["worker_ports"][0]
        held = Path(f"/proc/{pid}/fd")
        before = len(list(held.iterdir()))
        with connect_all(socket.AF_INET, ("127.0.0.1", port)):
            wait_until(
                "room for others", lambda: len(list(held.iterdir())) < before + DESCRIPTORS // 2,
                WAIT_SECONDS,
            )  # fmt: skip
            used, began = cpu_seconds(pid), time.monotonic()
            ended = threading.Event().wait(CPU_SECONDS)
            share = (cpu_seconds(pid) - used) / (time.monotonic() - began)
            kept = len(list(held.iterdir())) - before
            if auth == "none":
                check_serves(broker)
        with capsys.disabled():
            print(
                f"\nauth {auth}: {kept} of {STRANGERS} silent connections are kept, {100 * share:.1f} % of a core"
            )
        assert not ended
        assert 0 < kept < DESCRIPTORS // 2
        assert share < SHARE_MAX, broker.error_text()


def test_ipc_is_closed_to_new_clients_before_descriptors_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ would end the process."""
    used = 10
    monkeypatch.setattr(server, "descriptor_limit", lambda: 1000)
    monkeypatch.setattr(server, "lowest_free_descriptor", lambda: used)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    name = f"danube-test-{os.getpid()}"
    door = server.Server(context, message_bytes_max=1024, handshake_timeout_ms=1000)

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            return stranger.connect_ex(f"\0{name}") == 0

    def mind(until: bool, what: str) -> None:
        def look() -> bool:
            door.mind_descriptors()
            return listens() is until

        wait_until(what, look, WAIT_SECONDS)

    try:
        door.bind("127.0.0.1", 0, f"ipc://@{name}")
        assert listens()
        used = 501
        mind(False, "the end of listening")
        used = 400
        door.mind_descriptors()
        assert not listens(), "it comes and goes"
        used = 374
        mind(True, "listening again")
    finally:
        door.close()
        context.destroy(linger=0)


def test_rings_of_who_says_nothing_are_given_back() -> None:
    server = RingServer(
        "ipc://@danube-test-rings", ring_bytes=1 << 16, links_max=2, message_bytes_max=1024
    )
    try:
        silent = dial("ipc://@danube-test-rings")
        assert silent is not None
        server.look()
        assert len(server) == 1
        server.close_silent()
        assert len(server) == 1, "it has had no time to speak"
        server.close_silent()
        assert len(server) == 0
        silent.close()
    finally:
        server.close()


def open_all_but_the_reserve(folder: str) -> str:
    """In a process of its own: what `open_file` opens when no descriptor is left below the reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS), min(hard, DESCRIPTORS)))
    keep_reserve()
    limit = descriptor_limit()
    taken = 0
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)
            taken += 1
    opened = 0
    try:
        while True:
            open_file(f"{folder}/{opened}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            opened += 1
    except OSError as error:
        return f"{opened} {descriptor_limit() == limit} {error.errno == errno.EMFILE}"


def test_files_come_from_the_reserve_when_all_else_is_taken(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.protocol.test_descriptors import open_all_but_the_reserve as f; "
        "print(f(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(DESCRIPTORS_RESERVED), "True", "True"], done.stderr
