"""A sign-on port in a thread: TLS and HTTP as they are, with answers and faults as a test wants them."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_SECONDS = 60.0
Answer = tuple[int, dict[str, str], Any]
"""Status, headers, and a body: bytes, or what becomes JSON."""


def certificate(
    folder: Path, *, names: tuple[str, ...] = ("127.0.0.1", "localhost"), days: int = 30
) -> Any:
    """Make a self-signed certificate; `days` below 0: one that has expired."""
    from danube_fast.clock import SystemClock
    from danube_fast.security.certificates import new_certificate

    class Earlier(SystemClock):
        wall_ns = staticmethod(lambda: time.time_ns() + (days - 30) * 86_400 * 10**9)

    return new_certificate(folder, names, 30, Earlier())


class FakeSignOn:
    """Grants what `grant` registers, unless `behave` answers or `serve` takes the whole connection."""

    def __init__(self, pem: Any, grant: Callable[[str, str], Answer]) -> None:
        """`grant`: token and public key to an answer. `pem`: of `certificate`."""
        self.grant = grant
        self.serve: Callable[[ssl.SSLSocket], None] | None = None
        """Takes a connection instead, after the handshake."""
        self.asked: list[tuple[str, str]] = []
        """Tokens and public keys."""
        self.heads: list[bytes] = []
        self.connections = 0
        self.error: BaseException | None = None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pem.certificate, pem.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}"
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._is_closed = False
        self._accepting = self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="fake-sign-on", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            if self._is_closed:
                connection.close()
                return
            self.connections += 1
            handle = connection.dup()
            self._open.append(handle)
            self._threads.append(self._start(self._serve, connection, handle))

    def _serve(self, plain: socket.socket, handle: socket.socket) -> None:
        # a client that trusts no certificate, or is closed, ends the connection where it is
        with (
            contextlib.suppress(OSError),
            plain,
            self._context.wrap_socket(plain, server_side=True) as connection,
        ):
            (self.serve or self._answer)(connection)
        with contextlib.suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: ssl.SSLSocket) -> None:
        try:
            head, body = read_request(connection)
            self.heads.append(head)
            assert head.startswith(b"POST /v1/sign-on HTTP/1.1\r\n")
            token = head.partition(b"Authorization: Bearer ")[2].partition(b"\r\n")[0].decode()
            key = json.loads(body)["public_key"]
            self.asked.append((token, key))
            connection.sendall(reply(*self.grant(token, key)))
        except AssertionError as error:
            self.error = error
            raise

    def wait_asked(self, count: int) -> None:
        """Until it was asked so often."""
        limit = time.monotonic() + WAIT_SECONDS
        while len(self.asked) < count:
            assert time.monotonic() < limit, f"{len(self.asked)} sign-ons, not {count}"
            time.sleep(0.005)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(WAIT_SECONDS)
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a connection of the fake sign-on port does not end"
        if self.error is not None:
            raise self.error


def read_request(connection: ssl.SSLSocket) -> tuple[bytes, bytes]:
    """Head and body of a request."""
    text = b""
    while b"\r\n\r\n" not in text:
        part = connection.recv(4096)
        if not part:
            raise ConnectionResetError
        text += part
    head, _, body = text.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(4096)
    return head, body


def silent(connection: ssl.SSLSocket) -> None:
    """Take what comes, and say nothing."""
    while connection.recv(4096):
        pass


def reply(status: int, headers: dict[str, str], body: Any) -> bytes:
    """An answer as bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def granted(server_keys: list[str], *, principal: str = "ann", seconds: int = 3600) -> Answer:
    """The answer to a sign-on that was granted."""
    return 200, {}, {"principal": principal, "expires_seconds": seconds, "server_keys": server_keys}


def refusal(status: int, code: str, text: str, **headers: str) -> Answer:
    """The answer to one that was not."""
    return status, headers, {"code": code, "text": text}
