"""Which connection gives way when there are too many, which one for its time, and what the server does beside."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from danube_fast.admin import http_connections
from danube_fast.admin.http_connections import _Waiting, limited_protocol, source_of
from danube_fast.admin.http_server import HttpServer

WAIT_SECONDS = 30.0
STEP_SECONDS = 0.5
"""What a step may take in these tests."""


class Connection:
    """Closes itself as real ones do."""

    def __init__(self, waiting: _Waiting, source: str) -> None:
        self._waiting, self.source = waiting, source
        self.is_open = True

    def give_up(self) -> None:
        self._waiting.discard(self)
        self.is_open = False


def test_the_oldest_of_the_busiest_address_gives_way() -> None:
    async def run() -> None:
        waiting = _Waiting(4)

        def arrive(source: str) -> Connection:
            made = Connection(waiting, source)
            waiting.add(made)
            return made

        honest = arrive("a")
        crowd = [arrive("b") for _ in range(10)]
        assert honest.is_open
        assert [each.is_open for each in crowd] == [False] * 7 + [True] * 3
        second = arrive("c")
        assert second.is_open and not crowd[7].is_open and honest.is_open
        waiting.add(honest)  # waits anew: it is still one
        waiting.discard(second)
        waiting.discard(second)
        third, fourth = arrive("a"), arrive("a")
        assert not honest.is_open, "three of one address now"
        assert third.is_open and fourth.is_open and crowd[8].is_open and crowd[9].is_open
        for each in (third, fourth, *crowd[8:]):
            waiting.discard(each)
        assert not waiting._timers and not waiting._counts

    asyncio.run(run())


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("", "x", False),
    ],
)
def test_a_source_is_an_address_or_a_network(one: str, other: str, is_same: bool) -> None:
    class Transport:
        def __init__(self, address: str) -> None:
            self._address = address

        def get_extra_info(self, name: str) -> Any:
            return (self._address, 1) if self._address else None

    assert (source_of(Transport(one)) == source_of(Transport(other))) is is_same


# ---------------------------------------------------------------- time


class Site:
    """A port of its own, in a thread: reads a body, works for a while, answers."""

    def __init__(self, on_look: Callable[[], object] = lambda: None) -> None:
        self.work_seconds = 0.0
        self.answer = b"done"
        self.parts = 1
        self.started = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            self._app, interface="asgi3", http=limited_protocol(), ws="none", log_config=None, lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = HttpServer(config, on_look)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}
        )
        self._thread.start()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.started.set()
        await asyncio.sleep(self.work_seconds)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left in reversed(range(self.parts)):
            await send({"type": "http.response.body", "body": self.answer, "more_body": left > 0})

    @property
    def protocols(self) -> set[Any]:
        return {*self._server.server_state.connections}

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_SECONDS)

    def close(self) -> None:
        self._server.end()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        self._listener.close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(http_connections, "REQUEST_SECONDS", STEP_SECONDS)
    made = Site()
    yield made
    made.close()


def heard(connection: socket.socket, until: bytes = b"") -> bytes:
    """What comes until the end, or until some text has come."""
    text = b""
    try:
        while not until or until not in text:
            data = connection.recv(1 << 16)
            if not data:
                break
            text += data
    except ConnectionError:
        pass
    return text


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
LAST = b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("said", [GET, POST, GET + GET, POST + GET], ids=["get", "post", "two", "mixed"])  # fmt: skip
def test_the_work_of_a_handler_is_not_the_time_of_its_client(site: Site, said: bytes) -> None:
    site.work_seconds = 2 * STEP_SECONDS
    with site.connect() as connection:
        connection.sendall(said)
        text = b""
        while text.count(LAST) < said.count(b"HTTP/1.1"):
            more = heard(connection, LAST)
            assert more, f"it was cut behind {text!r}"
            text += more


def test_a_request_that_comes_late_has_its_answer(site: Site) -> None:
    site.work_seconds = STEP_SECONDS / 2
    with site.connect() as connection:
        time.sleep(
            STEP_SECONDS * 0.8
        )  # as slow as a client may be, then a handler that goes beyond
        connection.sendall(GET)
        assert b"200 OK" in heard(connection, LAST)


@pytest.mark.parametrize("said", [b"", GET[:-2], POST[:-1], GET + GET[:-2]], ids=["silent", "head", "body", "second"])  # fmt: skip
def test_a_slow_client_is_closed(site: Site, said: bytes) -> None:
    began = time.monotonic()
    with site.connect() as connection:
        connection.sendall(said)
        text = heard(connection)
    assert text.count(b"200 OK") == said.count(GET)
    assert time.monotonic() - began < WAIT_SECONDS


def test_a_client_that_sends_bit_by_bit_is_closed(site: Site) -> None:
    began = time.monotonic()
    with site.connect() as connection:
        try:
            while time.monotonic() - began < WAIT_SECONDS:
                connection.sendall(b"x")
                time.sleep(STEP_SECONDS / 10)
        except ConnectionError:
            pass
    assert time.monotonic() - began < WAIT_SECONDS / 2


@pytest.mark.parametrize("more", [b"", b"G"])
@pytest.mark.parametrize("parts", [1, 64])
def test_a_client_that_reads_nothing_is_closed(site: Site, parts: int, more: bytes) -> None:
    """Whether the answer waits whole, or the handler waits with the rest of it; also if the client says more."""
    site.answer, site.parts = bytes((64 << 20) // parts), parts
    with site.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(GET)
        assert site.started.wait(WAIT_SECONDS)
        time.sleep(STEP_SECONDS / 2)  # its buffers are full meanwhile
        connection.sendall(more)
        deadline = time.monotonic() + WAIT_SECONDS
        while site.connections:
            assert time.monotonic() < deadline, "still open"
            time.sleep(STEP_SECONDS / 10)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_request_that_has_waited_behind_another_needs_trust_too(
    site: Site, is_trusted: bool
) -> None:
    site.work_seconds = STEP_SECONDS / 2
    with site.connect() as connection:
        connection.sendall(GET + GET)
        assert site.started.wait(WAIT_SECONDS)
        (served,) = site.protocols
        served._is_trusted = lambda: is_trusted
        text = heard(connection)
    assert text.count(b"200 OK") == (2 if is_trusted else 1)
    assert text.endswith(LAST), "the answer in the making goes out whole"


def test_requests_are_answered_while_files_are_looked_at() -> None:
    """A file system may hang, and a large list of revoked certificates takes its time."""
    begun, go_on, looks = threading.Event(), threading.Event(), []

    def look() -> None:
        looks.append(threading.active_count())
        begun.set()
        go_on.wait(WAIT_SECONDS)

    site = Site(look)
    try:
        assert begun.wait(WAIT_SECONDS), "no look"
        began = time.monotonic()
        with site.connect() as connection:
            connection.sendall(GET)
            assert b"200 OK" in heard(connection, LAST)
        assert time.monotonic() - began < WAIT_SECONDS / 2 and not go_on.is_set()
        assert len(looks) == 1, "one look at a time"
        go_on.set()
        deadline = time.monotonic() + WAIT_SECONDS
        while len(looks) < 3:
            assert time.monotonic() < deadline, "no more looks"
            time.sleep(0.01)
    finally:
        go_on.set()
        site.close()


def test_a_look_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        raise MemoryError("planted")

    site = Site(look)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while looks < 2:
            assert time.monotonic() < deadline, "no more looks"
            time.sleep(0.01)
        with site.connect() as connection:
            connection.sendall(GET)
            assert b"200 OK" in heard(connection, LAST)
    finally:
        site.close()
    assert "planted" in caplog.text


def test_a_look_that_hangs_holds_no_end_up() -> None:
    """A file system that does not answer, also when the process ends."""
    program = """
import threading, uvicorn
from danube_fast.admin.http_server import HttpServer

hangs = threading.Event()

def look():
    hangs.set()
    threading.Event().wait()

async def app(scope, receive, send): ...

server = HttpServer(uvicorn.Config(app, port=0, lifespan="off", log_config=None), look)
threading.Thread(target=lambda: (hangs.wait(), server.end())).start()
server.run()
print("ended", hangs.is_set())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ended True\n"), done.stderr


def test_a_look_without_a_thread_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked, refused, start = threading.Event(), threading.Event(), threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == "look" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    site = Site(looked.set)
    try:
        assert refused.wait(WAIT_SECONDS) and looked.wait(WAIT_SECONDS), "no look after it"
        with site.connect() as connection:
            connection.sendall(GET)
            assert b"200 OK" in heard(connection, LAST)
    finally:
        site.close()
    assert "can't start new thread" in caplog.text
