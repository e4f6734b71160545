"""Signals of rings: each is heard, descriptors come and go in pairs, and clients that misuse their bells harm themselves."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.errors import DanubeError
from danube_fast.ring import handover
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.duplex_kernel import BELL_OUT, signal_peer, word_of
from danube_fast.ring.handover import Refused, dial, take
from tests.ring.test_duplex import (
    MESSAGE_BYTES_MAX,
    SECONDS,
    House,
    house,
    is_signalled,
    until,
)

__all__ = ["house"]

SIGNALS = 10_000
EVENTFD_MAX = (1 << 64) - 2
PIPE_SIGNALS = os.sysconf("SC_PAGE_SIZE") // 8
"""Signals that a pipe of one page holds."""


def descriptors() -> int:
    """How many this process has open, without those that are rubbish already."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def far_side(house: House, client: Duplex) -> Duplex:
    """The worker's side of that client's rings."""
    return house.server._links[house.identity(client)]


def worker_wakes(house: House) -> bool:
    """Whether a worker that sleeps is told of something within bounds."""
    return bool(select.select([house.server.fileno()], [], [], SECONDS)[0])


def bell_of(client: Duplex) -> int:
    """Descriptor by which that side wakes its peer."""
    return word_of(client.row, BELL_OUT)


# ---------------------------------------------------------------- signals


def test_each_of_many_signals_wakes_a_worker_that_sleeps(house: House) -> None:
    client = house.enter()
    for number in range(SIGNALS):
        assert house.hear() == [] and not house.server.awake, "the worker cannot sleep"
        assert client.send([b"%d" % number])
        assert worker_wakes(house), f"signal {number} was lost"
        assert [parts for _, parts in house.hear()] == [[b"%d" % number]]
        assert not select.select([house.server.fileno()], [], [], 0)[0], "it is told again"


def test_signals_that_come_while_the_worker_falls_asleep_are_heard(house: House) -> None:
    """Two clients answer each message at once, from threads of their own."""
    clients = [house.enter() for _ in range(2)]
    identities = [house.identity(client) for client in clients]
    failures: list[BaseException] = []

    def echo(client: Duplex) -> None:
        try:
            for _ in range(SIGNALS // 2):
                while (message := client.receive()) is None:
                    if client.arm():
                        assert select.select([client.fileno()], [], [], SECONDS)[0], "not signalled"
                        assert client.hear()
                assert client.send(message)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=echo, args=(each,), daemon=True) for each in clients]
    for thread in threads:
        thread.start()
    left = dict.fromkeys(identities, SIGNALS // 2)
    for identity in identities:
        assert house.server.send(identity, [b"x"])
    while any(left.values()):
        assert house.server.awake or worker_wakes(house), f"a signal was lost, {left} to come"
        for identity, _ in house.hear():
            left[identity] -= 1
            if left[identity]:
                assert house.server.send(identity, [b"x"])
        assert not failures, failures
    for thread in threads:
        thread.join(SECONDS)
    assert not failures


def test_a_signal_before_the_bell_is_registered_is_heard(house: House) -> None:
    """The client has its rings, and uses them, before the worker goes on."""
    sock = dial(house.endpoint)
    assert sock is not None
    register = house.server._epoll.register
    early: list[Duplex] = []

    class Registering:
        """Has the client signal first."""

        def register(self, fd: int, events: int) -> None:
            if not early:
                client = take(sock, MESSAGE_BYTES_MAX)
                assert client is not None
                early.append(client)
                signal_peer(client.row)
            register(fd, events)

        def __getattr__(self, name: str) -> Any:
            return getattr(epoll, name)

    epoll = house.server._epoll
    house.server._epoll = Registering()  # type: ignore[assignment]
    house.server.look()
    house.server._epoll = epoll
    house.clients += early
    assert worker_wakes(house)


# ---------------------------------------------------------------- descriptors


def test_all_descriptors_go_with_their_links(house: House) -> None:
    before = descriptors()
    for _ in range(20):
        client = house.enter()
        house.clients.clear()
        assert descriptors() == before + 8, "four of each side"
        client.close()
        client.close()
        del client
        house.hear()
        assert descriptors() == before
    liar = house.enter()
    house.clients.clear()
    assert liar._out.try_push(struct.pack("<I", 0))
    house.hear()
    liar.close()
    del liar
    assert descriptors() == before and len(house.server) == 0
    silent = house.knock()
    house.server.close_silent()
    house.server.close_silent()
    silent.close()
    assert descriptors() == before and len(house.server) == 0


def test_bells_do_not_block_and_end_with_the_program(house: House) -> None:
    client = house.enter()
    link = far_side(house, client)
    for side in (client, link):
        for bell in (bell_of(side), side.fileno()):
            assert not os.get_blocking(bell) and not os.get_inheritable(bell)


@contextlib.contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """Leave this process so many. Call `descriptors` before: rubbish must not give any back meanwhile."""
    held = [os.dup(0) for _ in range(count + 1)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1], hard))
    for each in held:
        os.close(each)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spare", range(7))
def test_a_worker_with_few_descriptors_refuses_and_keeps_none(house: House, spare: int) -> None:
    """It needs one for the socket, four for an offer, and one for the map."""
    waiting = dial(house.endpoint)
    assert waiting is not None
    before = descriptors()
    with spare_descriptors(spare):
        house.server.look()
    if spare == 6:
        client = take(waiting, MESSAGE_BYTES_MAX)
        assert client is not None
        client.close()
        return
    assert descriptors() == before and len(house.server) == 0
    with waiting, pytest.raises(Refused, match="ulimit"):
        take(waiting, MESSAGE_BYTES_MAX)


@pytest.mark.parametrize("spare", range(4))
def test_a_client_with_few_descriptors_keeps_none(house: House, spare: int) -> None:
    with house.knock() as sock:
        before = descriptors()
        with spare_descriptors(spare), pytest.raises(Refused, match="ulimit"):
            take(sock, MESSAGE_BYTES_MAX)
        assert descriptors() == before


# ---------------------------------------------------------------- versions


def test_a_client_of_another_version_finds_no_rings(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to ZeroMQ at once, whichever side is the older one."""
    monkeypatch.setattr(handover, "_SUFFIX", b".shm")
    assert dial(house.endpoint) is None


def test_an_offer_of_another_version_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house.knock() as sock:
        before = descriptors()
        monkeypatch.setattr(handover, "_VERSION", 3)
        with pytest.raises(Refused, match="of version 2, not 3"):
            take(sock, MESSAGE_BYTES_MAX)
        assert descriptors() == before


@pytest.mark.parametrize("count", [1, 2])
def test_an_offer_without_bells_is_no_offer(count: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        fds = [os.dup(0) for _ in range(count)]
        head = handover._HEAD.pack(b"DFsm", handover._VERSION, 1 << 14)
        socket.send_fds(far, [head], fds)
        for fd in fds:
            os.close(fd)
        before = descriptors()
        with pytest.raises(DanubeError, match=f"with {count} descriptors"):
            take(near, MESSAGE_BYTES_MAX)
        assert descriptors() == before


# ---------------------------------------------------------------- hostile clients


def serves(house: House, honest: Duplex) -> bool:
    """Whether a client gets what it asks for, from a worker that sleeps first."""
    until("the worker's rest", lambda: house.hear() == [] and not house.server.awake)
    assert honest.send([b"question"]) and worker_wakes(house)
    ((identity, _),) = house.hear()
    assert honest.arm() and house.server.send(identity, [b"answer"])
    assert select.select([honest.fileno()], [], [], SECONDS)[0] and honest.hear()
    return honest.receive() == [b"answer"]


def test_a_full_bell_that_blocks_is_of_no_concern_to_the_worker(house: House) -> None:
    liar, honest = house.enter(), house.enter()
    link = far_side(house, liar)
    bell = bell_of(liar)
    os.set_blocking(bell, True)
    os.eventfd_write(bell, EVENTFD_MAX)
    assert os.get_blocking(link.fileno()), "both have the same open file"
    for _ in range(3):
        assert serves(house, honest)
    assert house.server.send(house.server._by_side[link.row], [b"x"])
    os.eventfd_read(bell)
    for _ in range(3):  # and an empty one blocks who reads it
        assert serves(house, honest)
    liar.close()
    until("its end", lambda: house.hear() or len(house.server) == 1)


def test_a_full_bell_does_not_hold_up_its_client(house: House) -> None:
    client = house.enter()
    os.eventfd_write(bell_of(client), EVENTFD_MAX)
    with pytest.raises(BlockingIOError):
        os.eventfd_write(bell_of(client), 1)
    assert client.send([b"x"])
    assert signal_peer(client.row) == 1
    assert [parts for _, parts in house.hear()] == [[b"x"]]


def test_who_never_reads_its_pipe_holds_up_nothing(house: House) -> None:
    deaf, honest = house.enter(), house.enter()
    link = far_side(house, deaf)
    os.set_blocking(deaf.fileno(), True)  # its end alone: each end is an open file of its own
    for _ in range(4 * PIPE_SIGNALS):
        signal_peer(link.row)
    with pytest.raises(BlockingIOError):
        os.write(bell_of(link), bytes(8))
    for _ in range(3):
        assert serves(house, honest)
    assert deaf.arm() and house.server.send(house.server._by_side[link.row], [b"x"])
    assert is_signalled(deaf), "a full pipe has woken it already"
    while is_signalled(deaf):
        assert deaf.hear()
    assert deaf.receive() == [b"x"]


@pytest.mark.parametrize("closed", ["bell", "pipe", "both"])
def test_who_closes_its_bells_harms_itself(house: House, closed: str) -> None:
    liar, honest = house.enter(), house.enter()
    link = far_side(house, liar)
    null = os.open(os.devnull, os.O_RDWR)
    for name, fd in (("bell", bell_of(liar)), ("pipe", liar.fileno())):
        if closed in (name, "both"):
            os.dup2(null, fd)
    os.close(null)
    if closed != "bell":
        with pytest.raises(BrokenPipeError):
            os.write(bell_of(link), bytes(8))
    for _ in range(3):
        signal_peer(link.row)
        assert serves(house, honest)
    assert liar.send([b"x"])
    liar.close()
    until("its end", lambda: house.hear() or len(house.server) == 1)
    assert serves(house, honest)


def test_who_writes_into_its_socket_is_gone(house: House) -> None:
    """Nothing goes through it: to read it would be a call for each byte that such a client sends."""
    liar, honest = house.enter(), house.enter()
    identity = house.identity(liar)
    assert liar.send([b"last"])
    liar._socket.send(b"x" * 100)
    assert [parts for _, parts in house.hear() + house.hear()] == [[b"last"]]
    assert [gone for gone, _ in house.server.gone] == [identity]
    assert not liar.hear(), "its pipe has ended"
    signal_peer(liar.row)
    house.server.look()
    assert not house.server.awake
    assert serves(house, honest)


def test_a_worker_that_ends_is_seen_in_the_pipe(house: House) -> None:
    client = house.enter()
    identity = house.identity(client)
    assert client.arm() and not is_signalled(client) and client.hear()
    house.server._close(identity)
    assert is_signalled(client) and not client.hear()
    assert client.send([b"x"]), "there is nothing that such a signal could raise"
    client.close()
    assert (bell_of(client), client.fileno()) == (-1, -1), "the numbers may soon be another's"
    assert signal_peer(client.row) == 1
