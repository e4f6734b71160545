"""An HTTP server between a broker and its object store that counts what passes."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Iterator

__all__ = ["Relay", "relay"]

HOST = "127.0.0.1"
SECONDS = 60.0
POLL_SECONDS = 0.02
_HOP = ("connection", "expect", "transfer-encoding")


class Relay:
    """A running one."""

    def __init__(self, upstream: str) -> None:
        self.seen: list[tuple[str, str]] = []
        """Method and path of each request."""
        self._upstream = upstream.removeprefix("http://")
        relay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _pass(self) -> None:
                relay.serve(self)

            for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
                locals()[f"do_{method}"] = _pass

        self._server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,))
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SECONDS)

    def serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Pass one request on, and its answer back."""
        if handler.headers.get("Expect") == "100-continue":
            handler.send_response_only(http.HTTPStatus.CONTINUE)
            handler.end_headers()
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.seen.append((handler.command, handler.path))
        connection = http.client.HTTPConnection(self._upstream, timeout=SECONDS)
        try:
            connection.putrequest(
                handler.command, handler.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in handler.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data, is_head = answer.read(), handler.command == "HEAD"
            handler.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP and (is_head or name.lower() != "content-length"):
                    handler.send_header(name, value)
            if not is_head and answer.status != http.HTTPStatus.NO_CONTENT:
                handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        finally:
            connection.close()


@contextlib.contextmanager
def relay(upstream: str) -> Iterator[Relay]:
    """Run one in front of `http://HOST:PORT`."""
    running = Relay(upstream)
    try:
        yield running
    finally:
        running.close()
