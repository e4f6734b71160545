"""Processes of a broker: forked by a fork server, which has their code in memory, and children of the supervisor.

    supervisor ---> fork server (`process/fork_server.py`) ---> process
        '<------------------ adopted: PR_SET_CHILD_SUBREAPER -------'

A fork server that has died is started again at the next order. It dies with the supervisor; the processes do so by
themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from danube_fast.checks import COMPONENTS
from danube_fast.children import child_environment, module_command
from danube_fast.config import ENVIRONMENT_PREFIX
from danube_fast.errors import Unavailable
from danube_fast.workers.process.fork_server import DESCRIPTORS_PER_MESSAGE, REPLY, Order

__all__ = ["Child", "ForkServer"]

PR_SET_CHILD_SUBREAPER = 36
STANDARD_ERROR = 2
FORK_SECONDS = 60.0
"""For an answer: the first one comes when all code is imported."""


class Child:
    """A process that was forked for us. Its pid is its own until `poll` or `wait` has told its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        """Readable once it has ended."""
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, the negative of a signal that has killed it; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end; the exit code."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.pidfd)


class ForkServer:
    """The fork server of one supervisor. Call from the main thread: PR_SET_PDEATHSIG fires when the starting thread ends."""

    def __init__(self, modules: Sequence[str]) -> None:
        """`modules`: those that the processes run, imported beforehand. Starts it."""
        self._modules = modules
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, ends of children would not be told
        _adopt(is_wanted=True)
        self._start()

    def _start(self) -> None:
        environment = child_environment()
        for name in COMPONENTS:  # the processes have the settings from their boot
            environment.pop(f"{ENVIRONMENT_PREFIX}{name.upper()}", None)
        environment["OPENBLAS_NUM_THREADS"] = (
            "1"  # NumPy's library starts threads as it is imported
        )
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(FORK_SECONDS)
        with end:
            self._process = subprocess.Popen(
                module_command(
                    "danube_fast.workers.process.fork_server", str(os.getpid()), str(end.fileno()), *self._modules
                ),
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,  # our own output is one ready line
                pass_fds=[end.fileno()],
                env=environment,
                process_group=0,
            )  # fmt: skip

    def fork(self, module: str, title: str, arguments: list[str], descriptors: list[int]) -> Child:
        """Start a process. Raises OSError if there can be none, Unavailable if the fork server cannot run."""
        order = msgspec.json.encode(Order(module, title, arguments, descriptors))
        reply = self._ask(order, descriptors)
        if not reply:  # it was killed
            self._end()
            self._start()
            reply = self._ask(order, descriptors)
        if not reply:
            raise Unavailable(
                f"{title} cannot be started: the fork server has ended with {self._end()}"
            )
        (pid,) = REPLY.unpack(reply)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return Child(pid)

    def _ask(self, order: bytes, descriptors: list[int]) -> bytes:
        """Send an order; the reply, empty if there is none."""
        try:
            self._link.send(order)
            for at in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
                socket.send_fds(self._link, [b"\0"], descriptors[at : at + DESCRIPTORS_PER_MESSAGE])
            return self._link.recv(REPLY.size)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            return b""

    def _end(self) -> int:
        """Let it end; the exit code."""
        self._link.close()
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """End it. The processes go on."""
        self._end()
        _adopt(is_wanted=False)


def _adopt(*, is_wanted: bool) -> None:
    """Become the parent of processes below us whose parent ends, or not any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
