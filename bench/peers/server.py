"""A server of another system: started on 127.0.0.1, waited for, ended by its process id.

It dies with the harness however that ends, and its files are in the harness's temporary folder.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from danube_fast.bench.load import host
from danube_fast.bench.load.processes import Process
from danube_fast.errors import Unavailable

__all__ = ["Server", "free_port", "start_server"]

BECOME = "danube_fast.bench.peers.become"
HOST = "127.0.0.1"
READY_SECONDS = 20.0
READY_STEP_SECONDS = 0.02
STARTS_MAX = 3
"""Between choosing a port and taking it somebody else may take it."""


def free_port() -> int:
    """A port that the system has just had free."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Whether somebody listens."""
    try:
        socket.create_connection((HOST, port), 1.0).close()
    except OSError:
        return False
    return True


class Server:
    """A running server; once it is stopped neither process nor files are left."""

    def __init__(self, process: Process, folder: Path, port: int) -> None:
        self._process = process
        self._folder = folder
        self._helpers: list[Server] = []
        self.port = port

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{HOST}:{self.port}"

    def cpu_seconds(self) -> float:
        """What it has used up to now."""
        return host.cpu_seconds([self._process.process.pid])

    def resident_mb(self) -> float:
        """Its resident memory."""
        return host.memory_bytes(self._process.process.pid, "VmRSS") / 1e6

    def keep(self, helper: Server) -> None:
        """Another server that this one needs: `stop` ends it, too."""
        self._helpers.append(helper)

    def stop(self) -> None:
        """End it and its helpers, and remove what they wrote."""
        try:
            self._process.end()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            while self._helpers:
                self._helpers.pop().stop()


def start_server(
    folder: Path,
    name: str,
    command: Callable[[int, Path], Sequence[str]],
    seconds: float = READY_SECONDS,
) -> Server:
    """Start `command(port, folder of its data)` until it accepts connections, which may take so long.

    Raises Unavailable."""
    words = ""
    for _ in range(STARTS_MAX):
        port = free_port()
        data = folder / f"{name}-{port}"
        data.mkdir()
        process = Process(
            folder, name, BECOME, command(port, data), stdout=subprocess.DEVNULL, cwd=data
        )
        server = Server(process, data, port)
        try:
            deadline = time.monotonic() + seconds
            while process.process.poll() is None and time.monotonic() < deadline:
                if accepts(port) and process.process.poll() is None:
                    return server
                time.sleep(READY_STEP_SECONDS)
            words = process.last_words()
        except BaseException:
            server.stop()
            raise
        server.stop()
    raise Unavailable(f"{name} did not start; its last words: {words}")
