"""A real broker for the tests of a program: supervisor, coordinator, workers, in a temporary directory.

    the test's process                    python -m danube_fast.testing.leash
    Broker --SIGTERM-------------------->  supervisor -> coordinator, workers
           <--the ready line, on stdout--  log: broker.log in its folder
    ends, however that comes about ----->  (a pidfd) stops, too, and removes the folder

Its ports are a free row below those that the system hands out by itself, and an abstract Unix socket keeps other
brokers of this kind away from them, so a restart finds them again: clients reconnect.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from danube_fast.checks import check_whole
from danube_fast.children import child_environment, module_command
from danube_fast.clock import SystemClock
from danube_fast.config import load_settings
from danube_fast.errors import DeadlineExceeded, FailedPrecondition, Internal, Unavailable

if TYPE_CHECKING:
    from danube_fast.client.async_client import AsyncClient
    from danube_fast.client.client import Client
    from danube_fast.client.faces import Opening

__all__ = ["Broker"]

START_SECONDS = 180.0
"""The first start on a machine compiles the kernels, up to a minute."""
STOP_SECONDS = 15.0
"""It stops within 10 s."""
STARTS_MAX = 5
"""Another process may take a port between our look and the start."""
PORTS = range(20_000, 32_000, 16)
"""First ports of rows."""
WORKERS_MAX = 14
LOG_BYTES_SHOWN = 2000
MIB = 1024 * 1024
SMALL: dict[str, Any] = {
    "workers": 1, "segment_bytes": 32 * MIB, "spare_segments": 0, "index_map_bytes": 16 * MIB,
    "log_format": "text",
}  # fmt: skip
"""Settings that differ from those of `danube-fast serve`: a test needs little room."""


class _Row:
    """A row of ports that no other Broker takes while this lives."""

    def __init__(self) -> None:
        rows = list(PORTS)
        random.SystemRandom().shuffle(rows)
        for first in rows:
            guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                guard.bind(f"\0danube-fast-testing-{first}")
                with contextlib.ExitStack() as probes:
                    for port in range(first, first + WORKERS_MAX + 2):
                        probe = probes.enter_context(socket.socket())
                        probe.bind(("127.0.0.1", port))
            except OSError:
                guard.close()
                continue
            self.first = first
            self._guard = guard
            return
        raise Unavailable(
            f"no {WORKERS_MAX + 2} ports in a row are free from {PORTS.start} to {PORTS.stop}; end some programs"
        )

    def close(self) -> None:
        """Others may have it."""
        self._guard.close()


class Broker:
    """A running broker. `with Broker() as broker: broker.client()...`, or call `stop()`.

    Ready when the constructor returns, in a second or so (the first start on a machine compiles kernels for up
    to a minute). It ends with this process, whatever happens to it. Not for use after a fork.
    """

    def __init__(self, *, data_dir: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        """`settings` as in tuning.md, `workers` (1) among them. With `data_dir` the data stays there; without it
        everything is removed by `stop()`.

        Raises InvalidArgument for settings that cannot be, Internal if it does not start.
        """
        if "listen" in settings or "admin" in settings:
            raise FailedPrecondition(
                "a Broker for tests chooses its ports; for others run `danube-fast serve`"
            )
        self._clock = SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._row: _Row | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="danube-fast-broker-"))
        self.data_dir = Path(data_dir) if data_dir is not None else self._folder / "data"
        """Where its data is."""
        self._flags = {**SMALL, **settings, "data_dir": str(self.data_dir)}
        self._ready: dict[str, Any] = {}
        try:
            check_whole(self._flags["workers"], "workers of a Broker for tests", 1, WORKERS_MAX)
            self._start_anywhere()
        except BaseException:
            self.stop()
            raise

    # ------------------------------------------------------------ starting and stopping

    def _start_anywhere(self) -> None:
        for attempt in range(STARTS_MAX):
            self._row = _Row()
            try:
                self._start()
                return
            except Unavailable:
                self._row.close()
                if attempt == STARTS_MAX - 1:
                    raise

    def _start(self) -> None:
        """Start it on our ports and wait for its ready line."""
        if self._row is None:
            raise FailedPrecondition("this broker was stopped for good; make another one")
        flags = {**self._flags, "listen": f"127.0.0.1:{self._row.first}"}
        settings = load_settings(flags, os.environ).settings
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                module_command(
                    "danube_fast.testing.leash", str(os.getpid()),
                    str(self._folder), msgspec.json.encode(settings).decode(),
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                process_group=0,  # Ctrl-C in a terminal is for the tests
            )  # fmt: skip
        self._ready = self._ready_line(self._process)

    def _ready_line(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        pipe = process.stdout
        if pipe is None:
            raise Internal("a broker was started without a pipe")
        readable, _, _ = select.select([pipe], [], [], START_SECONDS)
        line = pipe.readline() if readable else b""
        if not line:
            self._end(signal.SIGTERM)
            text = f"the broker did not start; it said: {self.log[-LOG_BYTES_SHOWN:]}"
            raise Unavailable(text) if "cannot listen" in text else Internal(text)
        ready: dict[str, Any] = msgspec.json.decode(line)
        return ready

    def _end(self, number: signal.Signals) -> None:
        """Signal it and wait for its end. DeadlineExceeded, with it killed, if it does not come."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.send_signal(number)
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise DeadlineExceeded(
                f"the broker did not stop within {STOP_SECONDS:g} s; it said: {self.log[-LOG_BYTES_SHOWN:]}"
            ) from None
        finally:
            if process.stdout is not None:
                process.stdout.close()

    def stop(self) -> None:
        """Stop it in order and remove what it wrote (not a `data_dir` that was given). Again: nothing."""
        try:
            self._end(signal.SIGTERM)
        finally:
            if self._row is not None:
                self._row.close()
                self._row = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self) -> None:
        """Stop it in order and start it again: the same data, the same address. Clients reconnect."""
        self._end(signal.SIGTERM)
        self._start()

    def kill(self) -> None:
        """SIGKILL to all of it; `start()` brings it back, on the same data."""
        pids = [self.pid, *self.worker_pids]
        self._end(signal.SIGKILL)
        deadline_ns = self._clock.monotonic_ns() + int(STOP_SECONDS * 1e9)
        while any(map(_is_running, pids)):  # its processes end with it, a moment later
            if self._clock.monotonic_ns() > deadline_ns:
                raise Internal(f"processes of a killed broker are still there: {pids}")
            select.select([], [], [], 0.01)

    def start(self) -> None:
        """Start it again after `kill()`."""
        if self._process is not None:
            raise FailedPrecondition("the broker is running; call kill() or restart()")
        self._start()

    def kill_worker(self, index: int = 0) -> int:
        """SIGKILL to one worker, which the broker starts again at once; its pid."""
        check_whole(index, "the index of a worker", 0, len(self.worker_pids) - 1)
        pid = self.worker_pids[index]
        os.kill(pid, signal.SIGKILL)
        return pid

    # ------------------------------------------------------------ looking at it

    @property
    def ready(self) -> dict[str, Any]:
        """Its ready line: ports, processes, keys."""
        return dict(self._ready)

    @property
    def url(self) -> str:
        """For `danube_fast.connect()`."""
        return str(self._ready["url"])

    @property
    def admin_url(self) -> str:
        """The admin port: /healthz, /readyz, /metrics."""
        return str(self._ready["admin"])

    @property
    def pid(self) -> int:
        """The process that all others end with."""
        return int(self._ready["pid"])

    @property
    def worker_pids(self) -> list[int]:
        """Workers as of now: one that was killed has a successor."""
        with self.client() as client:
            found = client.admin.cluster_status()["processes"]
        return [int(entry["pid"]) for entry in found if entry["process"].startswith("worker")]

    @property
    def log(self) -> str:
        """The text of its log."""
        try:
            return (self._folder / "broker.log").read_text(errors="replace")
        except OSError:
            return ""

    def client(self, **options: Any) -> Client:
        """A client connected to it; options as for `danube_fast.connect()`. Close it."""
        from danube_fast.client.entry import connect

        return connect(self.url, **options)

    def async_client(self, **options: Any) -> Opening[AsyncClient]:
        """A client for the running event loop: await it, or enter it with `async with`."""
        from danube_fast.client.entry import connect_async

        return connect_async(self.url, **options)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Broker at {self._ready.get('url', 'nowhere')} on {self.data_dir}>"


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
