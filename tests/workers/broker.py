"""A broker in processes of its own, and the smallest client that can talk to its bootstrap port."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from danube_fast.config import Settings
from danube_fast.net import protocol

WAIT_SECONDS = 60.0
START_SECONDS = 240.0
"""Kernels may have to be compiled first."""
ROOT = Path(__file__).parents[2]

_RUN = """
import sys, msgspec
from danube_fast.config import Settings
from danube_fast.workers.supervisor import spawn
from danube_fast.workers.supervisor import supervisor
fake = sys.argv[2]
if fake:
    spawn.MODULES["worker"] = fake
settings = msgspec.json.decode(sys.argv[1], type=Settings)
sys.exit(supervisor.serve(settings, output="json", accept_rollback=bool(sys.argv[3])))
"""


def wait_until(what: str, condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """The first true value of `condition`; fails naming `what` when the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


class Broker:
    """`serve` in a child process. Fake workers unless `fake` is empty."""

    def __init__(
        self,
        data_dir: Path,
        *,
        fake: str = "tests.workers.fake_shard",
        descriptors: int = 0,
        accept_rollback: bool = False,
        packages: str = "",
        **changes: Any,
    ) -> None:
        """`descriptors`: how many its processes may have at most, 0: as many as we. `packages`: a folder of modules."""
        settings = {"data_dir": str(data_dir), "listen": "127.0.0.1:0", **changes}
        self.settings = Settings(**settings)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{packages}".strip(":")}
        self.errors = (data_dir.parent / f"{data_dir.name}-errors").open("w+b")
        command = [sys.executable, "-c", _RUN, msgspec.json.encode(self.settings).decode(), fake]
        command.append("yes" if accept_rollback else "")
        if descriptors:
            command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            cwd=ROOT,
        )
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> dict[str, Any]:
        """The ready line."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if readable else b""
        assert line, f"no ready line; stderr: {self.error_text()}"
        self.ready = json.loads(line)
        return self.ready

    def error_text(self) -> str:
        """What it wrote to stderr so far."""
        if not self.errors.closed:
            self.errors.flush()
        return Path(self.errors.name).read_text()

    def check_errors(self) -> None:
        """Fail if a process has ended by a fault of the code: the supervisor starts another, and most clients never tell."""
        text = self.error_text()
        assert "Traceback" not in text, text[text.index("Traceback") :][:5000]

    @property
    def pids(self) -> list[int]:
        """Coordinator and workers of the ready line."""
        return [self.ready["coordinator_pid"], *self.ready["worker_pids"]]

    def status(self) -> dict[str, Any]:
        """cluster_status, from a client of its own."""
        with Client(self) as client:
            return client.admin("cluster_status")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.errors.close()
        if exception == (None, None, None):
            self.check_errors()


class Client:
    """DEALER with a session on the bootstrap port."""

    def __init__(self, broker: Broker, context: zmq.Context[Any] | None = None) -> None:
        self._own = context is None
        self._context = context or zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = broker.ready["url"].rpartition(":")[2]
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.last_request = 0
        self.send(protocol.Hello, protocol.PROTOCOL_VERSION, "test")

    def send(self, kind: Any, *fields: Any) -> int:
        """Send a command; its request number."""
        self.last_request += 1
        self.socket.send(protocol.encode(kind(self.last_request, *fields)))
        return self.last_request

    def receive(self, seconds: float = WAIT_SECONDS) -> Any:
        """The next command from the broker that is no WELCOME."""
        while True:
            assert self.socket.poll(int(seconds * 1000)), "the broker did not answer in time"
            command = protocol.decode_server_command(self.socket.recv())
            if not isinstance(command, protocol.Welcome):
                return command

    def ask(self, kind: Any, *fields: Any, seconds: float = WAIT_SECONDS) -> Any:
        """The answer to one command."""
        request = self.send(kind, *fields)
        answer = self.receive(seconds)
        assert answer.request == request
        return answer

    def lookup(self, topic: str, create: dict[str, Any] | None = None, wait_ms: int = 0) -> Any:
        """Result or Error of a LOOKUP."""
        return self.ask(protocol.Lookup, topic, create, wait_ms)

    def admin(self, operation: str, **arguments: Any) -> Any:
        """Value of an operation; raises AssertionError with the broker's text if it failed."""
        answer = self.ask(protocol.Admin, operation, arguments)
        assert isinstance(answer, protocol.Result), answer
        return answer.value

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
        if self._own:
            self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
