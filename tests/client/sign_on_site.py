"""A broker and a sign-on port in threads, and how a client fails there."""

from __future__ import annotations

import io
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

import danube_fast
from danube_fast.errors import (
    DanubeError,
)
from tests.client import fake_broker
from tests.client.fake_sign_on import FakeSignOn, certificate, granted, refusal
from tests.client.test_curve import SERVER, WAIT_SECONDS, Guard

TOKEN = "dfk_0123456789abcdef_" + "S3cret-_" * 5 + "abc"
KEY = SERVER[0].decode()
OTHER_KEY = zmq.curve_keypair()[0].decode()
NOWHERE = "danube://127.0.0.1:1"
OF_ARGUMENTS = ("parse_address", "__init__", "_checked")
SOON_SECONDS = 15.0
"""Refusals are due at once; a busy machine may take longer."""


class Site:
    """A broker that knows no key at first, and the port where keys are signed on."""

    def __init__(self, folder: Path) -> None:
        self.pem = certificate(folder)
        self.guard = Guard()
        self.guard.status.clear()
        self.broker = fake_broker.FakeBroker(self.guard)
        self.server_keys = [KEY]
        self.seconds = 3600
        self.principal = "ann"
        self.refusals: list[Any] = []
        """Answers to be given first."""
        self.tokens = {TOKEN}
        self.port = FakeSignOn(self.pem, self._grant)

    def _grant(self, token: str, key: str) -> Any:
        if self.refusals:
            return self.refusals.pop(0)
        if token not in self.tokens:
            return refusal(401, "PermissionDenied", "no such key")
        self.guard.status[key.encode()] = b"200"
        return granted(self.server_keys, principal=self.principal, seconds=self.seconds)

    @property
    def options(self) -> dict[str, Any]:
        """Of `connect`."""
        return {
            "url": self.broker.url, "token": TOKEN, "sign_on": self.port.url,
            "tls": str(self.pem.certificate), "timeout": WAIT_SECONDS,
        }  # fmt: skip

    def connect(self, **options: Any) -> danube_fast.Client:
        return danube_fast.connect(**{**self.options, **options})

    def restart_broker(self, server: Any = None) -> None:
        """As after a restart of everything: no key is known any more."""
        last = self.broker
        last.close()
        self.guard = Guard()
        self.guard.status.clear()
        prepare: Any = self.guard
        if server is not None:

            def prepare(context: Any, router: Any) -> None:
                self.guard(context, router)
                router.setsockopt(zmq.CURVE_SECRETKEY, server[1])

        broker = fake_broker.FakeBroker(prepare, port=last.port)
        with broker.lock:  # the topics are durable
            broker.topics, broker.by_partition = last.topics, last.by_partition
            broker._next_session = last._next_session
        self.broker = broker

    def close(self) -> None:
        self.port.close()
        self.broker.close()


def fails(connect: Callable[[], Any], kind: type[DanubeError], *words: str, seconds: float = SOON_SECONDS) -> DanubeError:  # fmt: skip
    """Connect, and see it fail like that, soon, without a word of the token."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        connect()
    assert time.monotonic() - began < seconds
    error = caught.value
    for word in words:
        assert word in str(error)
    assert TOKEN not in everything(error)
    return error


def everything(error: BaseException) -> str:
    """An error with its causes and the variables of their frames."""
    text, seen = io.StringIO(), set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text.write(f"{link!r}\n")
        for frame, _ in traceback.walk_tb(link.__traceback__):
            # frames of calls of the application itself have its arguments
            if (
                "client/sign_on/" in frame.f_code.co_filename
                and frame.f_code.co_name not in OF_ARGUMENTS
            ):
                text.write(f"{frame.f_locals!r}\n")
        link = link.__cause__ or link.__context__
    return text.getvalue()
