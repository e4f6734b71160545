"""A host name that this machine does not know is named in the error, with what to do."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link.names import unknown_host
from danube_fast.errors import DeadlineExceeded, Unavailable
from danube_fast.testing import Broker

TOPIC = "/default/names"
NAME = "broker.invalid"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is known but addresses."""
    ask = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        if host == NAME:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_worker_under_an_unknown_name(unknown: None, tmp_path: Path) -> None:
    with Broker(advertise=NAME) as broker:
        client = danube_fast.connect(broker.url.replace(NAME, "127.0.0.1"), transport="tcp")
        with client:
            for call in (
                lambda: client.producer(TOPIC, timeout=1.0),
                lambda: client.consumer(TOPIC, subscription="s", timeout=1.0),
            ):
                with pytest.raises(DeadlineExceeded) as caught:
                    call()
                assert f"the host '{NAME}' is unknown here (Name or service not known)" in str(
                    caught.value
                )
                assert "`--advertise`" in str(caught.value)


def test_a_broker_under_an_unknown_name(unknown: None) -> None:
    with pytest.raises(Unavailable, match=rf"the host '{NAME}' is unknown here .*; check the name"):
        danube_fast.connect(f"danube://{NAME}:6650", timeout=0.2)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc://@name", "shm"]
)
def test_nothing_is_said_of_what_is_known(endpoint: str) -> None:
    assert unknown_host(endpoint) == ""


def test_a_silent_resolver_is_waited_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: ends.wait(60))
    try:
        assert unknown_host(f"tcp://{NAME}:1") == ""
    finally:
        ends.set()
