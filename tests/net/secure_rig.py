"""What tests of the transport's security share: one context, a server that proves, and who connects to it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from danube_fast.net.server import Server
from danube_fast.net.zap import ZapThread
from danube_fast.security.curve import KeyPair, new_key_pair

WAIT_SECONDS = 60
BROKER = new_key_pair()
_numbers = itertools.count()
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Message = tuple[bytes, list[bytes], str]
"""Identity, parts, proof."""


def fresh_ipc() -> str:
    return f"ipc://@danube-secure-{os.getpid()}-{next(_numbers)}"


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.002)
    raise AssertionError(f"{what} did not happen within {WAIT_SECONDS} s")


class SecureRig:
    """A server on tcp and ipc, and the ZapThread before it."""

    def __init__(
        self, admit: Callable[[str], bool], *, curve_secret: str = BROKER.secret,
        proves: bool = True, handshake_timeout_ms: int = 30_000,
    ) -> None:  # fmt: skip
        self.context: zmq.Context[Any] = zmq.Context()
        self.zap = ZapThread(self.context, admit)
        self.zap.start()
        self.server = Server(
            self.context, message_bytes_max=1 << 20, handshake_timeout_ms=handshake_timeout_ms,
            curve_secret=curve_secret, proves=proves,
        )  # fmt: skip
        self._clients: list[zmq.Socket[bytes]] = []
        self.known: set[bytes] = set()
        self.server.is_known = self.known.__contains__
        self._monitor = self.server.socket.get_monitor_socket(
            _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.ipc = fresh_ipc()
        self.tcp = f"tcp://127.0.0.1:{self.server.bind('127.0.0.1', 0, self.ipc)}"

    def client(
        self, endpoint: str, pair: KeyPair | None = None, server_key: str = BROKER.public
    ) -> zmq.Socket[bytes]:
        """A client, with a key or without one."""
        client = self.dealer()
        if pair is not None:
            client.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            client.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
            client.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        client.connect(endpoint)
        return client

    def dealer(self) -> zmq.Socket[bytes]:
        """A socket that lives as long as the rig, and does not connect a second time before its end."""
        made: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 10 * WAIT_SECONDS * 1000)
        self._clients.append(made)
        return made

    def take(self) -> Message:
        """The next message at the server."""
        return self.take_all(1)[0]

    def take_all(self, count: int) -> list[Message]:
        """That many messages at the server."""
        found: list[Message] = []

        def enough() -> bool:
            for identity, command, parts in self.server.receive(count - len(found)):
                whole = [bytes(command), *map(bytes, parts)]
                found.append((identity, whole, self.server.proof))
            return len(found) == count

        wait_for(enough, f"{count} messages at the server")
        return found

    def outcome(self) -> bool:
        """Whether the next handshake succeeds."""
        assert self._monitor.poll(WAIT_SECONDS * 1000), "no handshake ended in time"
        event = recv_monitor_message(self._monitor)
        return int(event["event"]) == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        self.zap.stop()
        self.server.socket.disable_monitor()
        for client in self._clients:
            client.close(linger=0)
        self.server.close()
        self.context.destroy(linger=0)
