"""Processes of a broker: forked by a fork server, which has their code in memory, and children of the supervisor.

    supervisor ---> fork server (`process/fork_server.py`) ---> process
        '<--- adopted: PR_SET_CHILD_SUBREAPER, while one starts ---'

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
from danube_fast.workers.process.fork_server import (
    DESCRIPTORS_PER_MESSAGE,
    GO,
    READY,
    REPLY,
    Order,
)

__all__ = ["Adoption", "Child", "ForkServer", "Starting"]

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
STANDARD_ERROR = 2
END_SECONDS = 5.0
"""One that does not end by SIGKILL within that time is left alone."""


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


class Starting:
    """A process that was ordered. It ends unless `take` has returned it before `close`."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def fileno(self) -> int:
        """A descriptor that is readable once there is news."""
        return self._line.fileno()

    def take(self) -> Child | None:
        """Return the process, which begins now; None: it is not there yet. Raises OSError if it never will be."""
        try:
            reply = self._line.recv(REPLY.size)
        except BlockingIOError:
            return None
        if not reply:
            raise Unavailable("it ended, or the fork server did, before it had begun")
        (pid,) = REPLY.unpack(reply)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        child = Child(pid)
        try:
            self._line.send(GO)
        except OSError:
            child.close()
            raise
        return child

    def close(self) -> None:
        """Close its line."""
        self._line.close()


class ForkServer:
    """The fork server of one supervisor. Call from the main thread: PR_SET_PDEATHSIG fires when the starting thread ends."""

    def __init__(self, modules: Sequence[str]) -> None:
        """`modules`: those that the processes run, imported beforehand. Starts it."""
        self._modules = modules
        self._killed: list[subprocess.Popen[bytes]] = []
        """Those that we have killed, until they have ended."""
        self._deaths: list[int] = []
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or ends of children would not be told
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        environment = child_environment()
        for name in COMPONENTS:  # the processes have the settings from their boot
            environment.pop(f"{ENVIRONMENT_PREFIX}{name.upper()}", None)
        self._is_ready = False
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
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

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all code."""
        if not self._is_ready:
            with suppress(OSError):
                self._is_ready = self._link.recv(len(READY)) == READY
        return self._is_ready

    def order(
        self, module: str, title: str, arguments: list[str], descriptors: list[int]
    ) -> Starting:
        """Order a process. Raises OSError if that cannot be done now."""
        self._look()
        if self._process is None:
            self._link.close()
            self._start()
        line, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        is_begun = False
        try:
            with end:
                self._link.send(msgspec.json.encode(Order(module, title, arguments, descriptors)))
                is_begun = True
                socket.send_fds(self._link, [b"\0"], [end.fileno()])
                for at in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
                    some = descriptors[at : at + DESCRIPTORS_PER_MESSAGE]
                    socket.send_fds(self._link, [b"\0"], some)
        except OSError:
            line.close()
            if is_begun:
                self.kill()  # it has half of an order
            raise
        return Starting(line)

    def _look(self) -> None:
        """Notice its end."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process = None
            self._deaths.append(code)
        self._killed = [each for each in self._killed if each.poll() is None]

    def death(self) -> int | None:
        """Return, once for each, the exit code with which one has ended by itself; the next order starts another one."""
        self._look()
        return self._deaths.pop(0) if self._deaths else None

    def kill(self) -> None:
        """End it, without waiting for that; the next order starts another one."""
        if self._process is not None:
            self._process.kill()
            self._killed.append(self._process)
            self._process = None

    def close(self) -> None:
        """End it. The processes go on."""
        self._link.close()
        self.kill()
        for process in self._killed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


class Adoption:
    """Makes this process, while it is on, the parent of processes below it whose parent ends."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        before = ctypes.c_int()
        with suppress(OSError):  # not all that run Linux programs know that one
            self._control(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        # the first process of a container is such a parent anyway
        self._before = self._now = bool(before.value) or os.getpid() == 1

    def set(self, *, is_on: bool) -> None:
        """Turn it on, or back to what it was before."""
        wanted = is_on or self._before
        if wanted != self._now:
            self._control(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))
            self._now = wanted

    def _control(self, option: int, argument: object) -> None:
        if self._libc.prctl(option, argument, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
