"""Heartbeats over rings: kernels answer them, an idle worker sleeps on, and Python has what is more than that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from danube_fast.net.protocol import Ping
from danube_fast.net.session import Session
from danube_fast.ring.duplex_kernel import WAITS
from danube_fast.workers.shard.publish.take_kernel import HEARTBEAT_NS_MIN
from danube_fast.workers.shard.publish.turn_layout import EVENTS_MAX
from tests.workers.ring_client import RingClient, fresh_endpoint, ring_client
from tests.workers.ring_turn_rig import intake_of
from tests.workers.shard_faults import wait
from tests.workers.shard_rig import Rig

PING, PONG, ERROR = 2, 65, 66
SLEEP_MS = 300


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    made = rigs(ipc_endpoint=fresh_endpoint())
    made.assign(1)
    return made


@pytest.fixture
def handled(rig: Rig) -> list[Ping]:
    """The heartbeats that Python has answered."""
    seen, handlers = list[Ping](), rig.worker.commands.handlers
    run = handlers[Ping]

    def note(session: object, command: Ping) -> None:
        seen.append(command)
        run(session, command)

    handlers[Ping] = note
    return seen


def session_of(rig: Rig, client: RingClient) -> Session:
    session = rig.worker.state.sessions.by_number(client.session)
    assert session is not None
    return session


def forget_client(rig: Rig, client: RingClient) -> None:
    """Have the worker believe that it heard the client long ago."""
    session_of(rig, client).last_seen_ns = 0


def known_client(rig: Rig) -> RingClient:
    """A client whose session kernels know, and which has said nothing more."""
    client = ring_client(rig)
    client.ask(PING, [])
    rig.turn(lambda: not rig.worker.transports.readable(), "rest")
    return client


def sleep(rig: Rig, timeout_ms: int) -> float:
    """Have the worker sleep once; for how many milliseconds it did."""
    rig.worker.state.boot.mailbox.prepare_sleep()
    began = time.monotonic()
    intake_of(rig).sleep(timeout_ms, lambda timeout_ms: [])
    return (time.monotonic() - began) * 1000


def test_a_heartbeat_in_a_turn_is_answered_by_kernels(rig: Rig, handled: list[Ping]) -> None:
    client = ring_client(rig)
    forget_client(rig, client)
    assert client.ask(PING, [])[0] == PONG
    assert not handled
    assert session_of(rig, client).last_seen_ns > 0, "the session would be given up"


@pytest.mark.parametrize("count", [3, EVENTS_MAX + 6])
def test_an_idle_worker_sleeps_on_behind_heartbeats(
    rig: Rig, handled: list[Ping], count: int
) -> None:
    """Of more clients than one wait lists, too."""
    clients = [known_client(rig) for _ in range(count)]
    handled.clear()
    for client in clients:
        forget_client(rig, client)
    answers: list[bool] = []

    beaten_ns: list[int] = []

    def beat() -> None:
        for client in 2 * clients:
            request = client.post(PING, [])
            wait(lambda: client.pump() or client.waiting, "the answer to a heartbeat")  # noqa: B023
            answers.append(client.waiting == [[PONG, request]])
            client.waiting.clear()
            beaten_ns.append(time.monotonic_ns())
            time.sleep(HEARTBEAT_NS_MIN / 1e9 if len(clients) < 10 else 0)

    beating = threading.Thread(target=beat)
    beating.start()
    slept_ms = sleep(rig, SLEEP_MS)
    rig.turn(lambda: not beating.is_alive(), "the answers to all heartbeats")
    assert slept_ms >= SLEEP_MS, "a heartbeat ended the sleep"
    assert answers == [True] * 2 * len(clients)
    assert not handled
    heard_ns = [session_of(rig, client).last_seen_ns for client in clients]
    assert all(
        0 < heard <= beaten
        for heard, beaten in zip(heard_ns, beaten_ns[-len(clients) :], strict=True)
    )
    assert heard_ns == sorted(heard_ns)


@pytest.mark.parametrize("taken", [[], [[1, 1, 0]]], ids=["second", "report"])
def test_what_is_more_than_a_heartbeat_ends_the_sleep(
    rig: Rig, handled: list[Ping], taken: list[list[int]]
) -> None:
    client = known_client(rig)
    requests = [client.post(PING, []), client.post(PING, taken)]
    assert sleep(rig, 60_000) < 30_000
    assert [client.answer(request)[0] for request in requests] == [PONG, PONG]
    # the next turn's kernels answer a second one
    assert [command.request for command in handled] == (requests[1:] if taken else [])


def test_many_heartbeats_in_a_row_are_answered_in_their_order(
    rig: Rig, handled: list[Ping]
) -> None:
    """A kernel answers one of a client in a turn, so one that sends nothing else does not keep it."""
    client = ring_client(rig)
    requests = [client.post(PING, []) for _ in range(500)]
    rig.turn(lambda: client.pump() or len(client.waiting) == len(requests), "all answers")
    assert [command[:2] for command in client.waiting] == [[PONG, request] for request in requests]
    assert len(handled) > len(requests) // 2


def test_a_heartbeat_waits_behind_what_waits_for_room(rig: Rig, handled: list[Ping]) -> None:
    client = ring_client(rig)
    session = session_of(rig, client)
    link = rig.worker.transports.rings.link(session.identity)
    assert link is not None
    link.words[WAITS] = 1  # as behind a message that found no room
    assert client.ask(PING, [])[0] == PONG
    assert len(handled) == 1


@pytest.mark.parametrize(
    "command",
    [b"\x93\x02\x07\x91", b"\x93\x02\xc1\x90", b"\x93\x02\xff\x90", b"\x94\x02\x07\x90\x00", b"\x93\x02"],
    ids=["cut", "never used", "negative", "too long", "short"],
)  # fmt: skip
def test_what_only_looks_like_a_heartbeat_is_refused_by_python(
    rig: Rig, handled: list[Ping], command: bytes
) -> None:
    client = ring_client(rig)
    client.socket.send_multipart([command])
    rig.turn(lambda: client.pump() or bool(client.waiting), "an answer")
    kinds = [each[0] for each in client.waiting]
    assert kinds == ([PONG] if handled else [ERROR])
    assert client.ask(PING, [])[0] == PONG


def test_heartbeats_whose_answers_find_no_room_are_answered_once(rigs: Callable[..., Rig]) -> None:
    rig = rigs(ipc_endpoint=fresh_endpoint(), shm_ring_bytes=4096)
    rig.assign(1)
    client = known_client(rig)
    link = rig.worker.transports.rings.link(session_of(rig, client).identity)
    assert link is not None
    requests = [client.post(PING, []) for _ in range(1000)]

    def is_full() -> bool:
        client.socket.flush()
        return bool(link.words[WAITS])

    rig.turn(is_full, "a full ring")
    rig.turn(lambda: client.pump() or len(client.waiting) >= len(requests), "all answers")
    assert [command[:2] for command in client.waiting] == [[PONG, request] for request in requests]
