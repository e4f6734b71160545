"""Brokers to be killed, and the processes that keep them busy meanwhile."""

from __future__ import annotations

import collections
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import danube_fast
from tests.workers.broker import ROOT, Broker, is_running, wait_until

__all__ = ["SMALL", "Member", "Server", "free_port", "rounds"]

SMALL: dict[str, Any] = {
    "segment_bytes": 1 << 20,
    "segment_start_bytes": 256 << 10,
    "group_bytes_max": 1 << 18,
    "spare_segments": 1,
    "index_flush_entries": 64,
}
"""Settings that make a broker go through many segments and index writes in a short test."""
SLACK = 5
"""Bounds are this many times what is promised: the machine may be busy."""
MEMBER_SECONDS = 60.0
_PORTS = range(20_000, 32_000, 16)
"""Below the ports that the kernel hands out by itself, so nobody takes one during a restart."""
_given: collections.deque[int] = collections.deque(maxlen=64)
"""Those that were given last: their servers may not have started yet."""


def rounds(default: int) -> int:
    """How many kills: DANUBE_CRASH_ROUNDS makes it more."""
    return int(os.environ.get("DANUBE_CRASH_ROUNDS", "0")) or default


def free_port(count: int) -> int:
    """The first of `count` ports in a row that are free now; each process of a test run has a share of them."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    bases = list(_PORTS)[process :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    random.SystemRandom().shuffle(bases)
    for base in bases:
        if base in _given:
            continue
        with ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.append(base)
            return base
    raise AssertionError("no free ports")


class Server:
    """A broker on ports and a data directory that stay the same however often it dies."""

    def __init__(self, data_dir: Path, *, workers: int = 2, **changes: Any) -> None:
        self.data_dir = data_dir
        self.workers = workers
        self.port = free_port(workers + 2)
        self.url = f"danube://127.0.0.1:{self.port}"
        self.changes = {**SMALL, **changes}
        self.broker: Broker | None = None
        self.start_seconds = 0.0

    def start(self) -> Broker:
        """Start it and wait until it is ready."""
        assert self.broker is None
        began = time.monotonic()
        self.broker = self._broker()
        self.broker.wait_ready()
        self.start_seconds = time.monotonic() - began
        return self.broker

    def _broker(self) -> Broker:
        return Broker(
            self.data_dir, fake="", workers=self.workers, listen=f"127.0.0.1:{self.port}",
            **self.changes,
        )  # fmt: skip

    def start_and_kill(self, seconds: float) -> bool:
        """Start it and SIGKILL everything so much later, ready or not; whether it was ready."""
        assert self.broker is None
        self.broker = self._broker()
        output = self.broker.process.stdout
        assert output is not None
        ready = bool(select.select([output], [], [], seconds)[0])
        children = self._children()
        self.broker.process.kill()
        self.broker.process.wait(MEMBER_SECONDS)
        wait_until("end of all", lambda: not any(map(is_running, children)))
        self._release()
        return ready

    def _children(self) -> list[int]:
        assert self.broker is not None
        pid = self.broker.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]

    def stop(self) -> None:
        """SIGTERM; it must end with 0."""
        broker, self.broker = self.broker, None
        assert broker is not None
        with broker:
            code = broker.stop()
            assert code == 0, f"the broker ended with {code}: {broker.error_text()}"

    def status(self) -> dict[str, Any]:
        """cluster_status."""
        assert self.broker is not None
        return self.broker.status()

    def pid_of(self, process: int) -> int:
        """Present pid of a process: 0 is the coordinator, i + 1 worker i."""
        assert self.broker is not None
        return int(self.broker.status()["processes"][process]["pid"])

    def kill(self, victim: str, process: int = 1) -> int:
        """SIGKILL "worker" (with index `process`), "coordinator", "supervisor" or "all"; the time of it
        (monotonic ns). After the last two nothing runs any more, and `start` may be called."""
        broker = self.broker
        assert broker is not None
        pids = [int(entry["pid"]) for entry in broker.status()["processes"]]
        if victim in ("worker", "coordinator"):
            pid = pids[process if victim == "worker" else 0]
            os.kill(pid, signal.SIGKILL)
            killed_ns = time.monotonic_ns()
            wait_until(f"end of {victim}", lambda: not is_running(pid))
            return killed_ns
        supervisor = broker.process.pid
        doomed = [supervisor] if victim == "supervisor" else [*pids, supervisor]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        killed_ns = time.monotonic_ns()
        broker.process.wait(MEMBER_SECONDS)
        # the kernel must take the children with it
        wait_until("end of all", lambda: not any(map(is_running, pids)))
        self._release()
        return killed_ns

    def _release(self) -> None:
        broker, self.broker = self.broker, None
        assert broker is not None and broker.process.stdout is not None
        broker.process.stdout.close()
        broker.errors.close()
        broker.check_errors()

    @contextmanager
    def client(self, **options: Any) -> Iterator[danube_fast.Client]:
        """A client of it."""
        with danube_fast.connect(self.url, timeout=60, **options) as client:
            yield client

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        broker = self.broker
        if broker is not None:
            with broker:
                pass


class Member:
    """A producer or consumer process. It says "ready", works until its stdin is closed, and must end
    with 0 unless it is killed."""

    def __init__(self, module: str, plan: dict[str, Any], errors: Path) -> None:
        plan = {**plan, "parent": os.getpid()}
        self._errors = errors.open("w+b")
        self.name = errors.name
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.crash.{module}", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def wait_ready(self) -> None:
        """Until it is at work."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], MEMBER_SECONDS)
        line = self.process.stdout.readline() if readable else b""
        assert line == b"ready\n", f"{self.name} said {line!r}: {self.error_text()}"

    def error_text(self) -> str:
        """What it wrote to stderr."""
        return Path(self._errors.name).read_text()

    def finish(self) -> bytes:
        """Tell it to end; what it said on stdout."""
        try:
            out, _ = self.process.communicate(timeout=MEMBER_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end in {MEMBER_SECONDS} s: {self.error_text()}"
            ) from None
        assert self.process.returncode == 0, f"{self.name}: {self.error_text()}"
        return out

    def kill(self) -> None:
        """SIGKILL, if it is still there."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._errors.close()
