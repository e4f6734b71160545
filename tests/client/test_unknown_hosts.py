"""A host name that this machine does not know is named in the error, with what to do."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link.names import unknown_host_steps
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


def test_a_worker_under_an_unknown_name(unknown: None) -> None:
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


def test_nothing_is_said_of_what_is_known() -> None:
    with Broker() as broker, danube_fast.connect(broker.url) as client:
        pump = client._core.pump
        for endpoint in (
            "tcp://127.0.0.1:1",
            "tcp://[::1]:1",
            "tcp://localhost:1",
            "ipc://@name",
            "shm",
        ):
            assert pump.run(unknown_host_steps(pump, endpoint)) == ""


def test_a_silent_resolver_is_waited_for_a_second_and_holds_up_no_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = threading.Event()

    async def open_several(url: str) -> float:
        async with danube_fast.connect_async(url, transport="tcp") as client:
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args: ends.wait(60))
            began, late = time.monotonic(), 0.0

            async def tick() -> None:
                nonlocal late
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(0.05)
                    late = max(late, time.monotonic() - before)

            ticker = asyncio.ensure_future(tick())
            opens = [client.producer(TOPIC, timeout=0.5) for _ in range(8)]
            found = await asyncio.gather(*opens, return_exceptions=True)
            ticker.cancel()
            assert {type(each) for each in found} == {DeadlineExceeded}
            assert time.monotonic() - began < 8 * 1.0, "one after the other"
            return late

    try:
        with Broker(advertise=NAME) as broker:
            late = asyncio.run(open_several(broker.url.replace(NAME, "127.0.0.1")))
    finally:
        ends.set()
    assert late < 0.9, "the event loop has waited for the resolver"
