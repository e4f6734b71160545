"""A proxy between a client and a store that fails as told."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
import time
from collections.abc import Callable
from typing import Any

WAIT_SECONDS = 60


class Fault:
    """What the proxy does to the next `count` requests for which `wanted(method, path)` is true."""

    def __init__(
        self,
        wanted: Callable[[str, str], bool],
        count: int = 1,
        *,
        status: int = 0,
        code: str = "",
        text: str = "",
        headers: dict[str, str] | None = None,
        loses_answer: bool = False,
        cut_at: int = -1,
        delay_seconds: float = 0.0,
        held: threading.Event | None = None,
        flips: bool = False,
    ) -> None:
        self.wanted, self.left = wanted, count
        self.status, self.headers = status, headers or {}
        self.text = text or f"<Error><Code>{code}</Code><Message>as planned</Message></Error>"
        self.loses_answer, self.cut_at = loses_answer, cut_at
        self.delay_seconds, self.flips = delay_seconds, flips
        self.held = held
        """What such a request waits for before it goes on."""
        self.met = 0


class FaultyProxy:
    """An HTTP server between a client and a store. It forwards everything, unless a fault says otherwise."""

    def __init__(self, upstream: str) -> None:
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        host, _, port = upstream.removeprefix("http://").partition(":")
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                if self.headers.get("Expect") == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                body = self.rfile.read(size)
                if len(body) < size:  # the client was killed
                    self.close_connection = True
                    return
                proxy.serve(self, host, int(port), body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_SECONDS)

    def fail(self, method: str, part_of_path: str, count: int = 1, **what: Any) -> Fault:
        """Let the next `count` such requests fail. `what`: see Fault."""
        fault = Fault(lambda m, path: m == method and part_of_path in path, count, **what)
        self.faults.append(fault)
        return fault

    def count(self, method: str, part_of_path: str = "") -> int:
        """Requests that were seen."""
        return sum(m == method and part_of_path in path for m, path in self.seen)

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.left and fault.wanted(method, path):
                fault.left -= 1
                fault.met += 1
                return fault
        return None

    def serve(
        self, handler: http.server.BaseHTTPRequestHandler, host: str, port: int, body: bytes
    ) -> None:
        method, path = handler.command, handler.path
        self.seen.append((method, path))
        fault = self._fault(method, path)
        if fault and fault.status:
            headers = {"Content-Type": "application/xml", **fault.headers}
            self._answer(handler, fault.status, headers, fault.text.encode())
            return
        if fault and fault.delay_seconds:
            time.sleep(fault.delay_seconds)  # the fault itself: a slow store
        if fault and fault.held:
            fault.held.wait(WAIT_SECONDS)
        connection = http.client.HTTPConnection(host, port, timeout=WAIT_SECONDS)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
            headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("transfer-encoding", "connection", "content-length")
            }
            if method == "HEAD" and answer.getheader("Content-Length"):
                headers["Content-Length"] = str(answer.getheader("Content-Length"))
        finally:
            connection.close()
        if fault and fault.loses_answer:
            handler.close_connection = True
            return
        if fault and fault.flips and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        self._answer(handler, answer.status, headers, data, fault.cut_at if fault else -1)

    @staticmethod
    def _answer(
        handler: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        cut_at: int = -1,
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if "Content-Length" not in headers and status not in (204, 304):
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if cut_at >= 0:
            handler.wfile.write(data[:cut_at])
            handler.close_connection = True
        elif handler.command != "HEAD":
            handler.wfile.write(data)
