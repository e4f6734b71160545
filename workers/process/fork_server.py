"""The fork server: imports the code of a broker's processes once, and forks each of them when the supervisor asks.

    supervisor <------------READY------ fork server
        |--order, line, descriptors------->  |--fork--> one between --fork--> the process
        ^                                                ends at once           |
        |------------ line: its pid, once the supervisor is its parent ---------|
        '------------ line: go ---------------------------------------------->  main()

A fork is safe here: there is one thread, and no socket, no store and no log is open. With another thread, as a debugger's,
a process runs its module in an interpreter of its own. Each order has a line of its own.
A process that is not told to go ends, so none runs of which the supervisor does not know. It finds the descriptors under
the numbers that the supervisor knows them by.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import socket
import struct
import sys
from contextlib import suppress
from errno import EAGAIN, EMFILE
from pathlib import Path

import msgspec

from danube_fast.children import module_command
from danube_fast.workers.process.boot import die_with_parent

__all__ = ["DESCRIPTORS_PER_MESSAGE", "GO", "READY", "REPLY", "Order", "main"]

DESCRIPTORS_PER_MESSAGE = 200
"""The kernel takes 253."""
ORDER_BYTES_MAX = 64 * 1024
REPLY = struct.Struct("=i")
"""Pid of a process, or why there is none: the negative of an errno."""
GO = b"\1"
READY = b"\1"
"""All code is imported."""
NAME_BYTES_MAX = 15
"""Of the name of a process."""
_OPENBLAS = "OPENBLAS_NUM_THREADS"


class Order(msgspec.Struct, frozen=True):
    """A process that shall be forked."""

    module: str
    title: str
    """How `ps` shows it."""
    arguments: list[str]
    descriptors: list[int]
    """Numbers under which it finds the descriptors that follow its line, in messages of DESCRIPTORS_PER_MESSAGE."""


def main() -> int:
    """Process entry: SUPERVISOR-PID LINK MODULE... The exit code of the fork server, or of a process that it has forked."""
    supervisor_pid, link_fd, *modules = sys.argv[1:]
    die_with_parent(int(supervisor_pid))
    with socket.socket(fileno=int(link_fd)) as link:
        _import(modules)
        is_alone = len(os.listdir("/proc/self/task")) == 1
        with suppress(OSError):  # the supervisor is gone
            link.send(READY)
        while True:
            data = _next_order(link)
            if not data:
                return 0
            order = msgspec.json.decode(data, type=Order)
            lines, descriptors = _receive(link, 1), _receive(link, len(order.descriptors))
            if not lines:  # there was no room for it, and its end tells that
                for fd in descriptors:
                    os.close(fd)
                continue
            with socket.socket(fileno=lines[0]) as line:
                is_whole = len(descriptors) == len(order.descriptors)
                gate = _fork(line) if is_whole else _refuse(line, EMFILE)
                if gate >= 0:
                    link.close()
                    _wait_for_go(line, gate)
                    break
            for fd in descriptors:
                os.close(fd)
    return _become(order, descriptors, is_alone=is_alone)


def _import(modules: list[str]) -> None:
    """Import the code of all processes. One that cannot be imported fails in its own process."""
    before = os.environ.get(_OPENBLAS)
    os.environ[_OPENBLAS] = "1"  # NumPy's library starts threads as it is imported
    gc.disable()  # what is imported stays
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # or a collection in a process would copy pages that all share
    del os.environ[_OPENBLAS]
    if before is not None:
        os.environ[_OPENBLAS] = before


def _next_order(link: socket.socket) -> bytes:
    """Wait for an order; none if the supervisor is gone."""
    try:
        return link.recv(ORDER_BYTES_MAX)
    except OSError:
        return b""


def _receive(link: socket.socket, count: int) -> list[int]:
    """Receive descriptors, as many of them as there is room for."""
    found: list[int] = []
    for _ in range(0, count, DESCRIPTORS_PER_MESSAGE):
        data, some, _, _ = socket.recv_fds(link, 1, DESCRIPTORS_PER_MESSAGE)
        if not data:
            break
        found += some
    return found


def _refuse(line: socket.socket, error: int) -> int:
    with suppress(OSError):
        line.send(REPLY.pack(-error))
    return -1


def _fork(line: socket.socket) -> int:
    """Fork a process that the supervisor adopts. In it: a pipe by which it hears of that; in the fork server: -1. A fork
    that fails is told."""
    try:
        gate, opener = os.pipe()
    except OSError as error:
        return _refuse(line, error.errno or EAGAIN)
    try:
        between = os.fork()
    except OSError as error:
        os.close(gate)
        os.close(opener)
        return _refuse(line, error.errno or EAGAIN)
    if between == 0:
        os.close(opener)
        try:
            is_between = os.fork() != 0
        except OSError as error:
            os._exit(error.errno or EAGAIN)
        if is_between:
            os._exit(0)
        return gate
    os.close(gate)
    code = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    if code:
        _refuse(line, code if code > 0 else EAGAIN)
    else:
        with suppress(OSError):  # it was killed
            os.write(opener, GO)
    os.close(opener)
    return -1


def _wait_for_go(line: socket.socket, gate: int) -> None:
    """Wait until the supervisor is the parent, tell it our pid, and wait until it has that; end if it does not want us."""
    try:
        is_adopted = os.read(gate, 1) == GO
        os.close(gate)
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the supervisor alone
        if is_adopted and line.send(REPLY.pack(os.getpid())) and line.recv(1) == GO:
            return
    except OSError:  # it is gone
        pass
    os._exit(1)


def _become(order: Order, descriptors: list[int], *, is_alone: bool) -> int:
    """Be the process of an order, which was forked while no other thread could hold a lock, or else is to begin anew."""
    _place(descriptors, order.descriptors, inheritable=not is_alone)
    if not is_alone:
        command = module_command(order.module, *order.arguments)
        os.execv(command[0], command)  # noqa: S606 - a command of ours
    _show_as(order.title)
    sys.argv = [order.module, *order.arguments]
    found: int = importlib.import_module(order.module).main()
    return found


def _place(descriptors: list[int], numbers: list[int], *, inheritable: bool = False) -> None:
    """Give descriptors these numbers."""
    at = list(descriptors)
    for place, number in enumerate(numbers):
        if at[place] == number:
            os.set_inheritable(number, inheritable)
            continue
        if number in at:  # another one stands there that has its number yet to come
            at[at.index(number)] = os.dup(number)
        os.dup2(at[place], number, inheritable)
        os.close(at[place])
        at[place] = number


def _show_as(title: str) -> None:
    """Let `ps` show that title in place of the fork server's command, and its last word as the name."""
    try:
        Path("/proc/self/comm").write_text(title.rpartition(" ")[2][:NAME_BYTES_MAX])
        # where the kernel finds the arguments: fields 48 and 49, counted from 1, see proc(5)
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(words[45]), int(words[46])
    except (OSError, ValueError, IndexError):  # another kernel's
        return
    if not 0 < start < end - 2:
        return
    # without a zero at the end the kernel takes what stands before the first one for all
    text = title.encode()[: end - start - 2].ljust(end - start - 1, b"\0") + b"."
    ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    sys.exit(main())
