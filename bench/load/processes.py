"""The processes of a run: a broker, and members that produce or consume. All end with the harness.

               harness (this process, one thread)
      socketpair |  ^ orders, reports: pickled dicts         stderr of all: files in the folder
                 v  |
      serve -> coordinator, workers         members: `python -m danube_fast.bench.load.member FD`

Each is in a process group of its own, so that a terminal's Ctrl-C reaches the harness alone, and dies
with the harness however that ends (demo/leash.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import danube_fast
from danube_fast import errors
from danube_fast.bench.load import host
from danube_fast.children import child_environment, module_command
from danube_fast.config import Settings

__all__ = ["HEAR_SECONDS", "Broker", "Crew", "Member", "Process", "Usage", "hear_all"]

LEASH = "danube_fast.demo.leash"
MEMBER = "danube_fast.bench.load.member"
READY_SECONDS = 120.0
"""The first start on a machine compiles the kernels."""
HEAR_SECONDS = 300.0
STOP_SECONDS = 15.0
REST_SECONDS_MAX = 10.0
REST_STEP_SECONDS = 0.3
REST_BYTES_MAX = 1_000_000
"""Zeroing a spare segment writes far more in a step."""
LAST_WORDS_CHARACTERS = 400
REPORT_INTERVAL_SECONDS = 1.1
REPORT_SECONDS_MAX = 3.0
REPORT_STEP_SECONDS = 0.1
"""Workers report what they counted once a second."""


def _environment() -> dict[str, str]:
    """Ours, without settings for brokers: they run with the defaults."""
    environment = child_environment()
    for name in (*(f"DANUBE_{x.upper()}" for x in Settings.__struct_fields__), "DANUBE_CONFIG"):
        environment.pop(name, None)
    return environment


class Process:
    """A child that cannot outlive us, with its stderr in a file."""

    def __init__(
        self, folder: Path, name: str, module: str, arguments: Sequence[str], **options: Any
    ) -> None:
        self.name = name
        descriptor, self._errors = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
        try:
            self.process = subprocess.Popen(
                module_command(LEASH, str(os.getpid()), module, *arguments),
                stdin=subprocess.DEVNULL,
                stderr=descriptor,
                process_group=0,
                **options,
            )
        finally:
            os.close(descriptor)

    def last_words(self) -> str:
        """The end of its stderr in one line."""
        text = " / ".join(Path(self._errors).read_text(errors="replace").split("\n"))
        return text.strip(" /")[-LAST_WORDS_CHARACTERS:] or "nothing"

    def end(self, number: int = signal.SIGTERM) -> None:
        """Signal it, wait, kill what does not end in time, reap."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Member(Process):
    """A producer or consumer."""

    def __init__(
        self, folder: Path, name: str, role: str, options: Mapping[str, Any], fds: Sequence[int]
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            super().__init__(
                folder, name, MEMBER, [str(theirs.fileno())],
                stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno(), *fds], env=_environment(),
            )  # fmt: skip
        self.pipe = Connection(ours.detach())
        self.tell((role, dict(options)))

    def tell(self, what: Any = "go") -> None:
        """Send an order; one that has ended hears nothing (and `hear` says so)."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(what)

    def hear(self, seconds: float = HEAR_SECONDS) -> Any:
        """Its next report. Raises what it failed with, Internal or DeadlineExceeded."""
        if not wait([self.pipe], seconds):
            raise self.silence(seconds)
        try:
            report = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.wait(STOP_SECONDS)
            raise errors.Internal(
                f"the bench's {self.name} ended early, with {self.process.returncode}; its last "
                f"words: {self.last_words()}"
            ) from None
        if isinstance(report, BaseException):
            raise report
        return report

    def silence(self, seconds: float) -> errors.DeadlineExceeded:
        """The error when nothing was heard."""
        return errors.DeadlineExceeded(
            f"the bench's {self.name} said nothing for {seconds:g} s; is this host busy? Its last "
            f"words: {self.last_words()}"
        )


class Usage(NamedTuple):
    """What a broker has used up to a moment."""

    cpu_seconds: float
    messages: int
    syncs: int
    written_bytes: int


class Broker:
    """A broker of our own, or one that is there (`url`)."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        url: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are other than the defaults."""
        self.folder = folder
        self.settings = dict(settings or {})
        self.is_warm = False
        """Its log has been through so much that segments are used again."""
        self.workers = workers
        self.access: dict[str, Any] = {}
        """By what clients of a secured one come in: options of `connect`."""
        self.data_dir = folder / "data"
        self.ready: dict[str, Any] = {"url": url}
        self.ready_seconds = 0.0
        self._process: Process | None = None
        self._client: danube_fast.Client | None = None
        if url is None:
            self.start()

    def start(self) -> None:
        """Start `danube-fast serve` over the data directory; until its ready line."""
        began = time.monotonic()
        self._process = Process(
            self.folder, "broker", "danube_fast.cli.main",
            ["serve", "--workers", str(self.workers), "--listen", "127.0.0.1:0",
             "--data-dir", str(self.data_dir), "--output", "json"],
            stdout=subprocess.PIPE, env=_environment() | {f"DANUBE_{k.upper()}": str(v) for k, v in self.settings.items()},
        )  # fmt: skip
        stdout = self._process.process.stdout
        with selectors.DefaultSelector() as waiting:
            waiting.register(stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            line = stdout.readline() if stdout and waiting.select(READY_SECONDS) else b""
        self.ready_seconds = time.monotonic() - began
        if not line:
            words = self._process.last_words()
            self.stop()
            raise errors.Unavailable(f"the broker of the bench did not start; it said: {words}")
        self.ready = json.loads(line)

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return str(self.ready["url"])

    @property
    def worker_pids(self) -> list[int]:
        """Workers of our own broker."""
        return list(self.ready.get("worker_pids", ()))

    @property
    def pids(self) -> list[int]:
        """All processes of our own broker; none of one that was there."""
        if self._process is None:
            return []
        return [self.ready["pid"], self.ready["coordinator_pid"], *self.worker_pids]

    @property
    def client(self) -> danube_fast.Client:
        """A connection for questions about the broker."""
        if self._client is None:
            self._client = danube_fast.connect(self.url, name="bench", **self.access)
        return self._client

    def rest(self, seconds: float = REST_SECONDS_MAX) -> None:
        """Until the workers have made their spare segments, as any broker has after some seconds; at most
        so long."""
        deadline = time.monotonic() + seconds
        before = -1
        while self.worker_pids and time.monotonic() < deadline:
            written = sum(host.written_bytes(pid) for pid in self.worker_pids)
            if written - before < REST_BYTES_MAX and before >= 0:
                return
            before = written
            time.sleep(REST_STEP_SECONDS)

    def status(self) -> dict[str, Any]:
        """What `danube-fast status` shows."""
        return self.client.admin.cluster_status()

    def usage(self) -> Usage:
        """Counters and CPU as of now."""
        counters = self.status()["counters"]
        return Usage(
            cpu_seconds=host.cpu_seconds(self.pids),
            messages=counters["messages_in"],
            syncs=counters["syncs"],
            written_bytes=counters["log_position"],
        )

    def quiet_usage(self) -> Usage:
        """The same, once the workers have reported whatever they did up to now."""
        time.sleep(REPORT_INTERVAL_SECONDS)
        return self.usage()

    def settled_usage(self, messages: int) -> Usage:
        """The same, once the workers have reported that so many messages came in, and what they wrote: a
        report may stand between the admission of a group and its write, the next one does not."""
        deadline = time.monotonic() + REPORT_SECONDS_MAX
        while self.usage().messages < messages and time.monotonic() < deadline:
            time.sleep(REPORT_STEP_SECONDS)
        return self.quiet_usage()

    def resident_mb(self) -> float | None:
        """Resident memory of all processes."""
        if not self.pids:
            return None
        return sum(host.memory_bytes(pid, "VmRSS") for pid in self.pids) / 1e6

    def kill(self) -> None:
        """SIGKILL to all processes at once, as a power switch would; the data stay."""
        self.close_client()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.end(signal.SIGKILL)

    def close_client(self) -> None:
        """End the connection for questions."""
        if self._client is not None:
            client, self._client = self._client, None
            with contextlib.suppress(errors.DanubeError):
                client.close()

    def stop(self) -> None:
        """End it in order."""
        self.close_client()
        if self._process is not None:
            self._process.end()
            self._process = None


class Crew:
    """The members of one run. A context manager: at its end none is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.members: list[Member] = []

    def start(
        self, name: str, role: str, options: Mapping[str, Any], fds: Sequence[int] = ()
    ) -> Member:
        """Start a member that runs the function `role` (module:function) with these options."""
        member = Member(self._folder, name, role, options, fds)
        self.members.append(member)
        return member

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.pipe.close()  # the end of its orders is the end of a member
            if kind is not None and member.process.poll() is None:
                member.process.kill()
        for member in self.members:
            member.end(0 if kind is None else signal.SIGKILL)


def hear_all(members: Sequence[Member], seconds: float = HEAR_SECONDS) -> list[Any]:
    """A report of each; the first failure is raised whoever it comes from."""
    reports: dict[Any, Any] = {}
    deadline = time.monotonic() + seconds
    by_pipe: dict[Any, Member] = {member.pipe: member for member in members}
    while len(reports) < len(members):
        left = [pipe for pipe in by_pipe if pipe not in reports]
        ready = wait(left, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise by_pipe[left[0]].silence(seconds)
        for pipe in ready:
            reports[pipe] = by_pipe[pipe].hear()
    return [reports[member.pipe] for member in members]
