"""A socket as kernels see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from danube_fast.net.port import Port

WAIT_MS = 5000


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
