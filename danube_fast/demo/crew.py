"""The processes of the demo: one broker, producers, consumers. Started, listened to, ended, by pid.

                       demo (this process, one thread)
       stdin |  ^ stdout, stderr: pipes, read without blocking, line by line
             v  |
       serve -> coordinator, workers      producers      consumers

Each is in a process group of its own, so that a terminal's Ctrl-C reaches the demo alone, and dies
with the demo however that ends (leash.py).
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator, Sequence

from danube_fast.children import child_environment, module_command
from danube_fast.clock import SystemClock
from danube_fast.config import Settings

__all__ = ["Child", "Crew"]

LEASH = "danube_fast.demo.leash"
READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 24
TAIL_LINES = 12
STOP_SECONDS = 15.0
"""`serve` stops within 10 s; what is still there then is killed."""


class Child:
    """One process, and what it said."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.name = name
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        """Last lines on stderr."""
        self.process = subprocess.Popen(
            module_command(LEASH, str(os.getpid()), module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self._partial = {"stdout": b"", "stderr": b""}

    def order(self, word: str) -> None:
        """Write a line to its stdin; one that has ended hears nothing."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(word.encode() + b"\n")
                self.process.stdin.flush()

    def take(self, stream: str, content: bytes) -> list[bytes]:
        """Whole lines of a stream, now that `content` has come."""
        *lines, rest = (self._partial[stream] + content).split(b"\n")
        self._partial[stream] = rest[-LINE_BYTES_MAX:]
        if stream == "stderr":
            self.tail.extend(line.decode(errors="replace") for line in lines)
        return lines

    def last_words(self) -> str:
        """The end of its stderr in one line."""
        return " / ".join(line.strip() for line in self.tail if line.strip()) or "nothing"

    def close(self) -> None:
        """Close the pipes; the process has ended."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Crew:
    """All of them. A context manager: at its end no process is left."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._environment = _environment()

    def start(self, name: str, module: str, *arguments: str, **variables: str) -> Child:
        """Start a module as a process. Call from the main thread."""
        child = Child(name, module, arguments, {**self._environment, **variables})
        self.children.append(child)
        for stream in ("stdout", "stderr"):
            pipe = getattr(child.process, stream)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (child, stream))
        return child

    def listen(self, timeout: float) -> Iterator[tuple[Child, str, bytes]]:
        """(child, "stdout" | "stderr", line) of all that came within `timeout` seconds.

        (child, "end", b"") once, when both streams of a child have ended.
        """
        for key, _ in self._selector.select(timeout):
            child, stream = key.data
            content = os.read(key.fd, READ_BYTES)
            for line in child.take(stream, content):
                yield child, stream, line
            if not content:
                self._selector.unregister(key.fileobj)
                if not any(other.data[0] is child for other in self._selector.get_map().values()):
                    yield child, "end", b""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """Consumers and producers first, then the broker."""
        members, brokers = self.children[1:], self.children[:1]
        self.stop(members)
        self.stop(brokers)
        self._selector.close()

    def stop(self, children: Sequence[Child]) -> None:
        """SIGTERM to all of these, SIGKILL to those that do not end in time, and reap them."""
        clock = SystemClock()
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        deadline_ns = clock.monotonic_ns() + int(STOP_SECONDS * 1e9)
        for child in children:
            left_seconds = max(0.0, (deadline_ns - clock.monotonic_ns()) / 1e9)
            self._drain_until_end(child, left_seconds)
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            for pipe in (child.process.stdout, child.process.stderr):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(pipe)  # type: ignore[arg-type]
            child.close()

    def _drain_until_end(self, child: Child, seconds: float) -> None:
        """Wait for the end of a process without letting it block on a full pipe."""
        clock = SystemClock()
        pidfd = -1
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(child.process.pid)
        if pidfd < 0:
            return
        deadline_ns = clock.monotonic_ns() + int(seconds * 1e9)
        with selectors.DefaultSelector() as waiting:
            waiting.register(pidfd, selectors.EVENT_READ)
            while child.process.poll() is None and clock.monotonic_ns() < deadline_ns:
                for _ in self.listen(0):
                    pass
                waiting.select(0.05)
        os.close(pidfd)


def _environment() -> dict[str, str]:
    """Ours, without settings for brokers: the demo's is to run with the defaults."""
    environment = child_environment()
    for name in Settings.__struct_fields__:
        environment.pop(f"DANUBE_{name.upper()}", None)
    environment.pop("DANUBE_CONFIG", None)
    return environment
