"""Messages over two rings and a socket: shapes, order, wake-ups, room, ends, and a peer that lies."""

from __future__ import annotations

import os
import random
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from danube_fast.errors import DanubeError, Unavailable
from danube_fast.ring import handover
from danube_fast.ring.duplex import PARTS_MAX, Duplex, duplex_bytes
from danube_fast.ring.duplex_kernel import ring_peer, signal_peer
from danube_fast.ring.handover import Refused, RingServer, dial, take
from danube_fast.ring.layout import RING_HEADER_BYTES

RING_BYTES = 1 << 14
MESSAGE_BYTES_MAX = 1 << 20
SECONDS = 60.0
FUZZ_CASES = int(os.environ.get("DANUBE_SCRIBBLE_CASES", "3000"))
FUZZ_SEED = int(os.environ.get("DANUBE_SCRIBBLE_SEED", "1"))


class House:
    """A server of rings and its clients."""

    def __init__(self, **options: int) -> None:
        self.endpoint = f"ipc://@danube-test-{os.getpid()}-{time.monotonic_ns()}"
        chosen = {"ring_bytes": RING_BYTES, "links_max": 64, "message_bytes_max": MESSAGE_BYTES_MAX}
        self.server = RingServer(self.endpoint, **{**chosen, **options})
        self.clients: list[Duplex] = []

    def knock(self) -> socket.socket:
        sock = dial(self.endpoint)
        assert sock is not None
        self.server.look()
        return sock

    def enter(self) -> Duplex:
        client = take(self.knock(), MESSAGE_BYTES_MAX)
        assert client is not None
        self.clients.append(client)
        return client

    def hear(self, limit: int = 1000) -> list[tuple[bytes, list[bytes]]]:
        self.server.look()
        return [(who, [first, *rest]) for who, first, rest in self.server.receive(limit)]

    def identity(self, client: Duplex) -> bytes:
        """How the server calls that client."""
        assert client.send([b"who"])
        ((identity, _),) = self.hear()
        return identity


@pytest.fixture
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    made = House(**getattr(request, "param", {}))
    yield made
    for client in made.clients:
        client.close()
    made.server.close()


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
    raise AssertionError(f"{what} did not happen within {SECONDS} s")


def is_signalled(client: Duplex) -> bool:
    return bool(select.select([client.fileno()], [], [], 0)[0])


def test_messages_of_any_shape_arrive_whole_and_in_order(house: House) -> None:
    client = house.enter()
    identity = house.identity(client)
    draw = random.Random(7)
    up: list[list[bytes]] = []
    down: list[list[bytes]] = []
    came: list[list[bytes]] = []
    went: list[list[bytes]] = []
    sizes = [0, 1, 7, 8, 9, 100, 4000, RING_BYTES // 2 - 20, RING_BYTES // 2, RING_BYTES, 200_000]
    for turn in range(400):
        count = draw.choice([1, 1, 2, 3, PARTS_MAX])
        message = [
            draw.randbytes(draw.choice(sizes[: 6 if count > 3 else None])) for _ in range(count)
        ]
        if turn % 2:
            until("room on the way up", lambda m=message: client.send(m) or collect())
            up.append(message)
        else:
            until(
                "room on the way down",
                lambda m=message: house.server.send(identity, m) or collect(),
            )
            down.append(message)

        def collect() -> bool:
            client.flush()
            came.extend(parts for _, parts in house.hear())
            while (parts := client.receive()) is not None:
                went.append(parts)
            return False

    until("the rest", lambda: collect() or (len(came) == len(up) and len(went) == len(down)))
    assert came == up and went == down


@pytest.mark.parametrize("house", [{"ring_bytes": 1 << 16}], indirect=True)
@pytest.mark.parametrize("size", [100, 20_000, 200_000])
def test_what_was_received_stays_whatever_its_sender_writes_then(house: House, size: int) -> None:
    """A small record, a large one, and one in slices: what is checked and kept lies in no ring."""
    client = house.enter()
    data = memoryview(client._out._view)[RING_HEADER_BYTES:]
    sent = [[b"head %d" % number, bytes([number]) * size] for number in range(1, 4)]
    came: list[list[Any]] = []

    def collect() -> bool:
        client.flush()
        came.extend(parts for _, parts in house.hear())
        return False

    for number, message in enumerate(sent, 1):
        until("room", lambda m=message: client.send(m) or collect())
        until("the message", lambda n=number: collect() or len(came) == n)
        data[:] = b"\xff" * len(data)
    assert came == sent


def test_parts_may_be_any_buffer_of_bytes(house: House) -> None:
    client = house.enter()
    assert client.send([b"head", memoryview(bytearray(b"body")), bytearray(b"tail")])
    assert [parts for _, parts in house.hear()] == [[b"head", b"body", b"tail"]]


def test_only_who_sleeps_is_woken(house: House) -> None:
    client = house.enter()
    identity = house.identity(client)
    house.server.send(identity, [b"1"])
    assert not is_signalled(client), "it was awake"
    assert not client.arm(), "something is there"
    assert client.receive() == [b"1"] and client.arm()
    house.server.send(identity, [b"2"])
    house.server.send(identity, [b"3"])
    assert is_signalled(client) and client.hear()
    assert not is_signalled(client), "one sleep, one signal"
    assert [client.receive(), client.receive(), client.receive()] == [[b"2"], [b"3"], None]


def test_the_server_sleeps_until_a_client_sends(house: House) -> None:
    first, second = house.enter(), house.enter()
    assert house.hear() == [] and not house.server.awake
    first.send([b"a"])
    assert select.select([house.server.fileno()], [], [], SECONDS)[0]
    second.send([b"b"])
    assert [parts for _, parts in house.hear()] == [[b"a"], [b"b"]]
    assert not house.server.awake
    assert not select.select([house.server.fileno()], [], [], 0)[0]


def test_who_found_no_room_is_told_when_half_the_ring_is_free(house: House) -> None:
    client = house.enter()
    sent = 0
    while client.send([b"x" * 1000]):
        sent += 1
    assert sent >= 14 and client.arm()
    until("half of it", lambda: house.hear(1) and is_signalled(client))
    assert client.hear() and client.send([b"x" * 1000])
    assert not is_signalled(client), "one complaint, one signal"


def test_all_clients_are_heard_in_turn(house: House) -> None:
    busy, other = house.enter(), house.enter()
    for _ in range(100):
        busy.send([b"busy"])
    other.send([b"other"])
    assert b"other" in [parts[0] for _, parts in house.hear(2)]
    assert house.server.awake


def test_what_a_client_sent_before_its_end_still_counts(house: House) -> None:
    client = house.enter()
    identity = house.identity(client)
    client.send([b"last"])
    client.close()
    assert house.hear() + house.hear() == [(identity, [b"last"])]
    assert house.server.gone == [(identity, True)] and len(house.server) == 0
    assert house.server.send(identity, [b"too late"]) is None


def test_what_the_worker_sent_before_its_end_still_counts(house: House) -> None:
    client = house.enter()
    house.server.send(house.identity(client), [b"last"])
    house.server.close()
    assert not client.hear() and client.receive() == [b"last"] and client.receive() is None
    assert dial(house.endpoint) is None
    house.server = RingServer(
        house.endpoint, ring_bytes=RING_BYTES, links_max=1, message_bytes_max=9
    )


def test_a_worker_that_ends_before_it_offers(house: House) -> None:
    sock = dial(house.endpoint)
    assert sock is not None
    assert take(sock, MESSAGE_BYTES_MAX) is None, "nobody has looked yet"
    house.server.close()
    with sock, pytest.raises(Unavailable, match="ended"):
        take(sock, MESSAGE_BYTES_MAX)
    house.server = RingServer(
        house.endpoint, ring_bytes=RING_BYTES, links_max=1, message_bytes_max=9
    )


def test_another_user_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(handover.os, "geteuid", lambda: own + 1)
    with house.knock() as sock, pytest.raises(Refused, match=f"user {own + 1}, not for {own}"):
        take(sock, MESSAGE_BYTES_MAX)
    assert len(house.server) == 0


def test_more_clients_than_there_may_be_are_refused() -> None:
    house = House(links_max=1)
    client = house.enter()
    with house.knock() as sock, pytest.raises(Refused, match="raise shm_clients_max"):
        take(sock, MESSAGE_BYTES_MAX)
    client.close()
    house.hear()
    assert len(house.server) == 0
    house.enter().close()
    house.server.close()


def test_a_worker_without_descriptors_refuses_and_goes_on(house: House) -> None:
    client = house.enter()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = dial(house.endpoint)
    assert waiting is not None
    top = os.dup(0)
    os.close(top)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    try:
        house.server.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with waiting, pytest.raises(Refused, match="ulimit"):
        take(waiting, MESSAGE_BYTES_MAX)
    client.send([b"still here"])
    assert house.hear()[0][1] == [b"still here"]
    house.enter()


def test_nobody_can_change_the_size_of_the_memory(house: House) -> None:
    sock = house.knock()
    data, (fd,), _, _ = socket.recv_fds(sock, 64, 1)
    assert data
    for size in (0, 4096, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    sock.close()


@pytest.mark.parametrize("lead", [
    (0,), (PARTS_MAX + 1,), (2, 1 << 31), (1, 5), (0xFFFF_FFFF,), (0xFFFF_FFFD,), (),
])  # fmt: skip
def test_a_message_that_cannot_be_ends_its_sender_only(house: House, lead: tuple[int, ...]) -> None:
    liar, honest = house.enter(), house.enter()
    assert liar._out.try_push(struct.pack(f"<{len(lead)}I", *lead))
    honest.send([b"ok"])
    assert [parts for _, parts in house.hear()] == [[b"ok"]]
    assert len(house.server.gone) == 1 and len(house.server) == 1


def test_an_endless_message_ends_its_sender(house: House) -> None:
    liar = house.enter()
    slice_bytes = RING_BYTES // 4
    for _ in range(MESSAGE_BYTES_MAX // slice_bytes + 2):
        liar._out.try_push(struct.pack("<I", 0xFFFF_FFFE) + bytes(slice_bytes))
        ring_peer(liar.row)
        house.hear()
    assert len(house.server) == 0


def test_a_client_that_scribbles_harms_itself_only() -> None:
    """Every word of its rings is overwritten while it and others send and receive."""
    draw = random.Random(FUZZ_SEED)
    again = f"DANUBE_SCRIBBLE_SEED={FUZZ_SEED} DANUBE_SCRIBBLE_CASES={FUZZ_CASES}"
    house = House(ring_bytes=1 << 10)
    honest = house.enter()
    identity = house.identity(honest)
    liar: Duplex | None = None
    ended = 0
    for case in range(FUZZ_CASES):
        if liar is None:
            liar = house.enter()
            memory = memoryview(liar._in._view.obj).cast("B").cast("q")
            named = house.identity(liar)
        with_words = draw.randrange(1, 4)
        for _ in range(with_words):
            places = (0, 1, 16, 17, 18, 32, 33, 48, 49, 64, draw.randrange(len(memory)))
            place = draw.choice(places) + draw.choice((0, len(memory) // 2))
            memory[place % len(memory)] = draw.choice(
                (
                    0,
                    1,
                    -1,
                    8,
                    1 << 10,
                    -(1 << 63),
                    (1 << 63) - 1,
                    draw.getrandbits(20),
                    draw.getrandbits(63),
                )
            )
        try:
            liar.send([b"x" * draw.randrange(300)])
            liar.receive()
        except DanubeError:
            pass  # it may notice itself
        house.server.send(named, [b"y" * draw.randrange(300)])
        signal_peer(liar.row)
        assert honest.send([b"%d" % case])
        others = [parts for sender, parts in house.hear(50) if sender == identity]
        others += [parts for sender, parts in house.hear(50) if sender == identity]
        assert others == [[b"%d" % case]], f"case {case}: {others}; again: {again}"
        assert house.server.send(identity, [b"%d" % case]), f"case {case}; again: {again}"
        assert honest.receive() == [b"%d" % case], f"case {case}; again: {again}"
        if named in dict(house.server.gone):
            liar.close()
            liar = None
            ended += 1
    assert ended > FUZZ_CASES // 50, "it was hardly ever noticed"
    assert duplex_bytes(1 << 10) == 2 * 4096
    for client in (honest, liar):
        if client is not None:
            client.close()
    house.server.close()
