"""A socket as kernels see it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from danube_fast.net.port import Part, Port

WAIT_MS = 60_000


@pytest.fixture
def ports() -> Iterator[tuple[Port, Port]]:
    """A ROUTER and a DEALER."""
    with zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.bind("inproc://port")
        dealer.connect("inproc://port")
        pair = Port(router), Port(dealer)
        yield pair
        for port in pair:
            port.close(0)


def wait(port: Port) -> None:
    assert port.socket.poll(WAIT_MS), f"nothing came within {WAIT_MS} ms"


@pytest.mark.parametrize("size", [0, 1, 100, 16 * 1024, 16 * 1024 + 1, 1_000_000])
def test_parts_arrive_as_they_were_sent(ports: tuple[Port, Port], size: int) -> None:
    router, dealer = ports
    data, tail = bytes(range(251)) * (size // 251 + 1), b"behind"
    dealer.send_more(data[:size])
    dealer.send(memoryview(tail))
    wait(router)
    identity = router.receive_head()
    assert identity is not None and router.more
    name = bytes(identity)
    head = router.receive_head()
    assert head == data[:size] and router.more
    assert router.receive_rest() == [tail]
    assert not router.more and router.receive_rest() == []
    router.send_more(name)
    router.send(data[:size])
    wait(dealer)
    assert dealer.receive_head() == data[:size] and not dealer.more


@pytest.mark.parametrize("size", [1, 30, 100, 1_000_000])
def test_a_part_is_sent_from_where_it_was_written(ports: tuple[Port, Port], size: int) -> None:
    router, dealer = ports
    data = bytes(range(251)) * (size // 251 + 1)
    part = Part(size)
    ctypes.memmove(part.address, data, size)
    dealer.give(part)
    wait(router)
    assert router.receive_head() is not None and router.receive_head() == data[:size]


def test_a_part_that_cannot_be_sent_can_be_tried_again(ports: tuple[Port, Port]) -> None:
    part = Part(100_000)
    ctypes.memmove(part.address, b"y" * len(part), len(part))
    with zmq.Context() as context:
        lonely = Port(context.socket(zmq.PUSH))
        for _ in range(3):
            with pytest.raises(zmq.Again):
                lonely.give(part)
        lonely.close(0)
        with pytest.raises(zmq.ZMQError):
            lonely.give(part)
    router, dealer = ports
    dealer.give(part)
    wait(router)
    assert router.receive_head() is not None and router.receive_head() == b"y" * 100_000


def test_parts_give_their_memory_back() -> None:
    def anonymous_mb() -> float:
        text = Path("/proc/self/status").read_text()
        return int(next(line for line in text.splitlines() if "RssAnon" in line).split()[1]) / 1024

    before = anonymous_mb()
    for _ in range(200):
        part = Part(5_000_000)
        ctypes.memset(part.address, 1, len(part))
        del part
    assert anonymous_mb() - before < 100, "a gigabyte was written"


def test_small_parts_keep_no_buffer_of_the_socket(ports: tuple[Port, Port]) -> None:
    router, dealer = ports
    sizes = (0, 1, 300, 8192, 8193, 1_000_000)
    for size in sizes:
        dealer.send_more(b"head")
        dealer.send(bytes(size))
    for size in sizes:
        wait(router)
        assert router.receive_head() is not None and router.receive_head() == b"head"
        (part,) = router.receive_rest()
        assert isinstance(part, bytes) == (size <= 8192), "libzmq's buffer would be kept with it"
        assert len(part) == size


def test_an_empty_socket_has_nothing_to_read(ports: tuple[Port, Port]) -> None:
    router, dealer = ports
    assert router.receive_head() is None and not router.readable()
    dealer.send(b"x")
    wait(router)
    assert router.readable()
    assert router.receive_head() is not None and router.receive_head() == b"x"
    assert router.receive_head() is None and not router.readable()


def test_what_cannot_be_sent_raises(ports: tuple[Port, Port]) -> None:
    router, dealer = ports
    router.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_more(b"nobody")
    assert caught.value.errno == zmq.EHOSTUNREACH
    with zmq.Context() as context:
        lonely = Port(context.socket(zmq.PUSH))
        with pytest.raises(zmq.Again):
            lonely.send(b"x")
        lonely.close(0)


def test_a_closed_port_is_not_touched(ports: tuple[Port, Port]) -> None:
    port = ports[1]
    port.close(0)
    for use in (port.readable, port.receive_head, lambda: port.send(b"x")):
        with pytest.raises(zmq.ZMQError) as caught:
            use()
        assert caught.value.errno == zmq.ENOTSOCK
