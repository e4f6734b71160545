"""The address of a worker's rings: waited for when another process has it, and no fault of it ends the worker."""

from __future__ import annotations

import errno
import secrets
import socket

import pytest

from danube_fast.errors import Unavailable
from danube_fast.ring.handover import RingServer, address_beside, dial
from danube_fast.ring.listener import RingListener


@pytest.fixture
def endpoint() -> str:
    return f"ipc://@danube-test-{secrets.token_hex(8)}"


def served(endpoint: str) -> RingServer:
    return RingServer(endpoint, ring_bytes=4096, links_max=4, message_bytes_max=1 << 20)


def test_an_address_that_is_taken_is_had_once_it_is_free(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address_beside(endpoint))
        server = served(endpoint)
        for _ in range(3):
            server.listen()
            server.look()
        assert dial(endpoint) is None
        assert caplog.text.count("another process listens") == 1
    server.listen()
    sock = dial(endpoint)
    assert sock is not None
    sock.close()
    server.close()


def test_a_fault_is_told_at_the_start_and_ends_nothing_later(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(listener: RingListener) -> bool:
        raise OSError(errno.EINVAL, "Invalid argument")

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address_beside(endpoint))
        server = served(endpoint)
        monkeypatch.setattr(RingListener, "open", fails)
        server.listen()
        server.close()
    with pytest.raises(Unavailable, match="cannot listen beside"):
        served(endpoint)
