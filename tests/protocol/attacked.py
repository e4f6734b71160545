"""What tests of attacks share: the attacker's process, an honest publisher beside it, and what a process costs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.workers.broker import ROOT

__all__ = ["Attacker", "Honest", "anonymous_bytes", "cpu_seconds", "memory_watched"]

WAIT_SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


class Attacker:
    """A process of `tests.protocol.attack`."""

    def __init__(self, **plan: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.protocol.attack", json.dumps(plan)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.wait_for("ready")

    def wait_for(self, line: str) -> None:
        """Wait until it says that."""
        assert self._process.stdout is not None
        found = self._process.stdout.readline().strip()
        assert found == line, f"the attacker said {found!r} instead of {line!r}"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> dict[str, Any]:
        """Wait for its end; its figures."""
        output, _ = self._process.communicate(timeout=WAIT_SECONDS)
        assert self._process.returncode == 0, "the attacker failed"
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


class Honest(threading.Thread):
    """A publisher that waits for each ack, and counts them."""

    def __init__(self, client: Any, topic: str, size: int = 1000) -> None:
        super().__init__(name="honest", daemon=True)
        self._producer = client.producer(topic)
        self._payload = b"h" * size
        self._ends = threading.Event()
        self.count = 0
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Publish until the end."""
        try:
            while not self._ends.is_set():
                self._producer.publish(self._payload)
                self.count += 1
        except BaseException as failure:
            self.failure = failure

    def rate(self, seconds: float) -> float:
        """Acks a second from now on."""
        before, began = self.count, time.monotonic()
        self._ends.wait(seconds)
        assert self.failure is None, f"the honest publisher failed: {self.failure}"
        return (self.count - before) / (time.monotonic() - began)

    def finish(self) -> None:
        """Stop it; fails if it was harmed."""
        self._ends.set()
        self.join(WAIT_SECONDS)
        assert not self.is_alive(), "the honest publisher hangs"
        assert self.failure is None, f"the honest publisher failed: {self.failure}"


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def cpu_seconds(pid: int) -> float:
    """Time on a core, of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def memory_watched(pid: int) -> Iterator[list[int]]:
    """How much a process grew at most inside of the block; read it behind."""
    before, ends, growth = anonymous_bytes(pid), threading.Event(), [0]

    def watch() -> None:
        while not ends.wait(0.005):
            growth[0] = max(growth[0], anonymous_bytes(pid) - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield growth
    finally:
        ends.set()
        thread.join(WAIT_SECONDS)
