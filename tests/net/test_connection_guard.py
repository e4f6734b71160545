"""The guard of connections beside a server of its own: who is cut, who is not, and that it cuts no other socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq

from danube_fast.clock import MILLISECOND_NS, SystemClock
from danube_fast.errors import Unavailable
from danube_fast.net.connection_guard import ConnectionGuard
from danube_fast.net.guarded_connection import FIRST_BYTES_MAX, Connection, Limits, Reason
from danube_fast.net.peer_socket import bytes_received, cookie_of, cut, host_of, unread_bytes
from danube_fast.net.server import BIND_DESCRIPTORS, Server
from tests.net.secure_rig import fresh_ipc, wait_for
from tests.protocol.attack import NullPeer

STRANGER_MS = 600
STRANGER_NS = STRANGER_MS * MILLISECOND_NS
SESSION_BYTES = 4 << 20
CLIENTS_MAX = 200
CROWD = 60


class Sessions:
    """Who has a session, and when it was last heard."""

    def __init__(self) -> None:
        self.heard: dict[bytes, int] = {}

    def knows(self, identity: bytes) -> bool:
        return identity in self.heard

    def heard_ns(self, identity: bytes) -> int | None:
        return self.heard.get(identity)


class Rig:
    """A server whose loop is the test."""

    def __init__(self, *, stranger_ms: int = STRANGER_MS) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.server = Server(self.context, message_bytes_max=1 << 20, handshake_timeout_ms=60_000)
        limits = Limits(stranger_ms * MILLISECOND_NS, SESSION_BYTES, CLIENTS_MAX)
        clock = SystemClock()
        self.guard = ConnectionGuard(self.context, self.server.socket, limits, clock)
        self.server.guard = self.guard
        self.sessions: Any = Sessions()
        self.drained_ns: Callable[[], int] = clock.monotonic_ns
        self.wakes = 0
        self.server.follow(self.sessions, lambda: self.drained_ns(), self._wake)
        self.ipc = fresh_ipc()
        self.port = self.server.bind("127.0.0.1", 0, self.ipc)
        self.peers: list[NullPeer] = []

    def _wake(self) -> None:
        self.wakes += 1

    def peer(self, port: int | str | None = None) -> NullPeer:
        """A peer that has shaken hands."""
        peer = NullPeer(self.port if port is None else port)
        self.peers.append(peer)
        peer.shake_hands()
        return peer

    def session(self, port: int | str | None = None) -> tuple[NullPeer, bytes]:
        """A peer that the test calls a session; its identity."""
        peer = self.peer(port)
        peer.socket.sendall(peer.message(msgpack.packb([1, 1, 1, "peer"]), more=False))
        (identity,) = wait_for(self.take, "a HELLO")
        self.sessions.heard[identity] = 1
        return peer, identity

    def take(self) -> list[bytes]:
        """Who has sent what waits."""
        return [identity for identity, _, _ in self.server.receive(100)]

    def cuts(self, reason: str) -> int:
        """So many were cut for that reason."""
        return self.guard.cuts[reason]

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close()
        self.server.close()
        self.context.destroy(linger=0)


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def has_ended(peer: NullPeer) -> bool:
    """Whether the broker has closed the connection."""
    peer.socket.settimeout(0.01)
    try:
        return peer.socket.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_who_says_no_hello_is_cut_and_a_session_is_not(
    rigs: Callable[..., Rig], transport: str
) -> None:
    rig = rigs()
    port = rig.ipc.removeprefix("ipc://@") if transport == "ipc" else None
    session, _ = rig.session(port)
    stranger = rig.peer(port)
    wait_for(lambda: has_ended(stranger), "the end of a stranger")
    wait_for(lambda: rig.cuts(Reason.SILENT) == 1, "the count of cuts")
    assert not has_ended(session)


def test_a_connection_whose_session_has_ended_is_a_stranger_again(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs()
    peer, identity = rig.session()
    threading.Event().wait(2 * STRANGER_MS / 1000)
    assert not has_ended(peer)
    del rig.sessions.heard[identity]
    wait_for(lambda: has_ended(peer), "the end of who has no session any more")
    wait_for(lambda: rig.cuts(Reason.SILENT) == 1, "the count of cuts")


def test_a_loop_that_is_behind_is_not_held_against_strangers(rigs: Callable[..., Rig]) -> None:
    """Their HELLO may wait to be read."""
    rig = rigs()
    began = time.monotonic_ns()
    rig.drained_ns = lambda: began
    stranger = rig.peer()
    threading.Event().wait(3 * STRANGER_MS / 1000)
    assert not has_ended(stranger)
    rig.drained_ns = time.monotonic_ns
    wait_for(lambda: has_ended(stranger), "the end of a stranger")


def send_on(peer: NullPeer) -> None:
    """Send a message without an end."""
    part = peer.message(bytes(1000), more=True)
    for _ in range(FIRST_BYTES_MAX):
        peer.socket.sendall(part)


def test_who_sends_too_much_before_hello_is_cut(rigs: Callable[..., Rig]) -> None:
    rig = rigs(stranger_ms=60_000)
    session, _ = rig.session()
    stranger = rig.peer()
    with pytest.raises(OSError):
        send_on(stranger)
    wait_for(lambda: rig.cuts(Reason.BYTES) == 1, "the count of cuts")
    assert not has_ended(session)


def test_whole_messages_before_hello_are_no_reason(rigs: Callable[..., Rig]) -> None:
    """A client that connects again sends first what was queued: more than one message may have."""
    rig = rigs(stranger_ms=60_000)
    stranger = rig.peer()
    whole = stranger.message(bytes(500_000), more=False)
    for _ in range(3 * FIRST_BYTES_MAX // len(whole)):
        stranger.socket.sendall(whole)
        wait_for(rig.take, "a message")
        threading.Event().wait(0.02)  # a look or two
    assert not has_ended(stranger)
    assert not rig.guard.cuts


def test_a_session_is_asked_for_a_whole_message_before_it_is_cut(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube_fast.net.connection_guard.GROWTH_BYTES", -1)  # as if it always grew
    rig = rigs()
    began = time.monotonic_ns()
    rig.drained_ns = lambda: began  # the loop is behind: perhaps the end of the message waits there
    session, identity = rig.session()
    session.socket.settimeout(20)
    threading.Event().wait(0.1)  # the guard has seen the session
    session.socket.sendall(session.message(bytes(100_000), more=True) * 60)
    wait_for(lambda: rig.wakes > 1, "a wake of the loop")
    assert not rig.guard.cuts
    rig.sessions.heard[identity] = 2  # it was
    wait_for(lambda: rig.wakes, "looks")
    threading.Event().wait(0.1)
    assert not rig.guard.cuts
    rig.drained_ns = time.monotonic_ns
    session.socket.sendall(session.message(bytes(100_000), more=True) * 60)
    wait_for(lambda: has_ended(session), "the end of a message without an end")
    wait_for(lambda: rig.cuts(Reason.ENDLESS) == 1, "the count of cuts")


def test_a_sender_without_a_name_of_the_brokers_is_cut(rigs: Callable[..., Rig]) -> None:
    rig = rigs(stranger_ms=60_000)
    rig.server.proves = True  # its connections were named by no ZapThread
    peer = rig.peer()
    peer.socket.sendall(peer.message(msgpack.packb([1, 1, 1, "peer"]), more=False))
    wait_for(lambda: rig.take() or rig.cuts(Reason.NAME), "the cut")
    assert has_ended(peer) and rig.cuts(Reason.NAME) == 1


def test_a_session_that_is_to_end_is_cut_and_no_other(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    (ended, name), (other, _) = rig.session(), rig.session()
    del rig.sessions.heard[name]
    rig.guard.end(name)
    wait_for(lambda: rig.cuts(Reason.RIGHTS), "the cut")
    assert has_ended(ended) and still_open(other) and rig.cuts(Reason.RIGHTS) == 1


@pytest.mark.parametrize("is_ipc", [False, True])
def test_what_is_queued_for_a_session_is_dropped(rigs: Callable[..., Rig], is_ipc: bool) -> None:
    rig = rigs()
    where = rig.ipc.removeprefix("ipc://@") if is_ipc else rig.port
    (reads, quick), (waits, slow), (_, marker) = (
        rig.session(where), rig.session(where), rig.session(where),
    )  # fmt: skip
    part = bytes(1 << 20)
    for _ in range(64):
        rig.server.send(slow, [part])
    rig.server.send(quick, [b"x"])
    assert reads.socket.recv(100).endswith(b"x"), "the message did not come"
    rig.guard.end(quick, if_untaken=True)
    rig.guard.end(slow, if_untaken=True)
    wait_for(lambda: rig.cuts(Reason.RIGHTS), "the cut")
    del rig.sessions.heard[marker]
    rig.guard.end(marker)
    wait_for(lambda: rig.cuts(Reason.RIGHTS) == 2, "a look behind that one")
    assert still_open(reads)
    received = 0
    while data := waits.socket.recv(1 << 20):
        received += len(data)
    assert received < 32 << 20, f"{received} of {64 << 20} bytes came behind the end"


def test_the_oldest_who_say_nothing_go_first(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube_fast.net.connection_guard.SILENT_MAX", 20)
    rig = rigs(stranger_ms=60_000)
    greeted = rig.peer()
    silent = [NullPeer(rig.port) for _ in range(50)]
    rig.peers += silent
    wait_for(lambda: rig.cuts(Reason.CROWD) >= 30, "cuts of the oldest")
    threading.Event().wait(0.1)
    assert rig.cuts(Reason.CROWD) == 30
    assert not has_ended(greeted)
    assert sum(map(still_open, silent)) == 20


def still_open(peer: NullPeer) -> bool:
    """Whether the connection of a silent peer stands; the greeting of the broker may wait there."""
    peer.socket.settimeout(0.05)
    try:
        while peer.socket.recv(64):
            pass
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def test_a_socket_with_another_cookie_is_not_cut() -> None:
    """The descriptor of a connection that has ended may have become another one's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        cookie = cookie_of(far.fileno())
        assert cookie > 0
        assert not cut(far.fileno(), cookie + 1)
        near.sendall(b"abc")
        assert far.recv(3) == b"abc"
        assert bytes_received(far.fileno()) == 3
        assert unread_bytes(far.fileno()) == 0
        assert host_of(far.fileno()) == "127.0.0.1"
        assert cut(far.fileno(), cookie)
        assert near.recv(1) == b""
        near.close()
        far.close()


def test_what_is_no_socket_is_never_cut() -> None:
    read, write = os.pipe()
    assert cookie_of(read) == 0
    assert not cut(read, 0)
    assert bytes_received(read) == -1
    os.close(read)
    os.close(write)
    assert bytes_received(read) == -1
    assert unread_bytes(read) == -1
    assert host_of(read) == ""


def test_a_guard_that_watches_nobody_ends_at_once(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    began = time.monotonic()
    rig.guard.stop()
    rig.guard.stop()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("watch_ms", [10, 3000], ids=["seen as they come", "seen at once"])
def test_many_large_messages_on_their_way_are_no_reason(
    rigs: Callable[..., Rig], watch_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process grows by what all of them have sent so far; each of them is about to end its message."""
    monkeypatch.setattr("danube_fast.net.connection_guard.WATCH_NS", watch_ms * MILLISECOND_NS)
    rig = rigs(stranger_ms=60_000)
    sessions = [rig.session() for _ in range(CROWD)]
    threading.Event().wait(0.3)  # the guard has seen them
    parts = b"".join(sessions[0][0].message(bytes([7]) * 1_900_000, more=True) for _ in range(2))
    for peer, _ in sessions:
        peer.socket.sendall(parts)
    wait_for(lambda: rig.guard._grows, "growth")
    threading.Event().wait(0.5)  # looks, with a loop that has taken all there is
    assert not rig.guard.cuts
    for peer, _ in sessions:
        peer.socket.sendall(peer.message(b"end", more=False))
    done: set[bytes] = set()
    wait_for(lambda: done.update(rig.take()) or len(done) == CROWD, "all messages")


def test_the_guard_goes_on_behind_a_look_that_failed(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(stranger_ms=100)
    failures = 0

    def drained_ns() -> int:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise MemoryError
        return time.monotonic_ns()

    rig.drained_ns = drained_ns
    stranger = rig.peer()
    wait_for(lambda: has_ended(stranger), "the end of a stranger")
    assert "tried again" in caplog.text


def test_a_process_that_was_stopped_hears_its_strangers_first() -> None:
    """Their HELLO came while it was, and waits to be read."""
    guard = ConnectionGuard(
        Any, Any, Limits(STRANGER_NS, SESSION_BYTES, CLIENTS_MAX), SystemClock()
    )  # type: ignore[arg-type]
    near, far = socket.socketpair()
    with near, far:
        stranger = Connection(far.fileno(), cookie_of(far.fileno()), 0)
        guard._connections[far.fileno()] = guard._strangers[far.fileno()] = stranger
        for now_ns in (1, STRANGER_NS - 1):
            guard._look_at_strangers(now_ns, now_ns)
        stopped_ns = 3600 * 1_000_000_000
        guard._look_at_strangers(stopped_ns, STRANGER_NS)
        assert not guard.cuts
        guard._next_look_ns = stopped_ns
        guard._look_at_strangers(stopped_ns + 2 * STRANGER_NS, stopped_ns + 2 * STRANGER_NS)
        assert guard.cuts[Reason.SILENT] == 1


STARVED = """
import os, resource, sys, threading, time
from tests.net.test_connection_guard import bare_server, cuts_strangers, open_descriptors
import zmq
from danube_fast.errors import Unavailable

context = zmq.Context()
server = bare_server(context)
threads, highest = threading.active_count(), max(map(int, open_descriptors()))
while (free := os.dup(0)) < highest:  # no gaps, so that a limit says how many there are
    pass
os.close(free)
before = open_descriptors()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + int(sys.argv[1]), hard))
try:
    if sys.argv[2] == "bind":
        server.bind("127.0.0.1", 0, "")
    else:
        server.guard.start()
except Unavailable as error:
    said = str(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert sys.argv[3] in said and "ulimit -n" in said, said
assert threading.active_count() == threads
deadline = time.monotonic() + 30
while open_descriptors() != before:  # ZeroMQ closes its own in a thread
    assert time.monotonic() < deadline, (before, open_descriptors())
    time.sleep(0.01)
cuts_strangers(server.bind("127.0.0.1", 0, ""))
server.close()
context.destroy(linger=0)
print("went on")
"""


def bare_server(context: zmq.Context[Any]) -> Server:
    server = Server(context, message_bytes_max=1 << 20, handshake_timeout_ms=60_000)
    limits = Limits(STRANGER_NS, SESSION_BYTES, CLIENTS_MAX)
    server.guard = ConnectionGuard(context, server.socket, limits, SystemClock())
    return server


def open_descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def cuts_strangers(port: int) -> None:
    stranger = NullPeer(port)
    stranger.shake_hands()
    wait_for(lambda: has_ended(stranger), "the end of a stranger: the guard is at work")
    stranger.socket.close()


@pytest.mark.parametrize(
    ("left", "what", "said"),
    [
        *[(left, "guard", "Too many open files") for left in range(4)],
        *[(left, "bind", f"{left} file descriptors are left") for left in (0, 4, BIND_DESCRIPTORS - 1)],
    ],
)  # fmt: skip
def test_a_start_without_descriptors_says_so_and_leaves_nothing(
    left: int, what: str, said: str
) -> None:
    """In a process of its own, which can start later."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(left), what, said], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_a_start_without_threads_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    context: zmq.Context[Any] = zmq.Context()
    server = bare_server(context)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Unavailable, match="can't start new thread"):
            server.bind("127.0.0.1", 0, "")
    server.close()
    context.destroy(linger=0)
