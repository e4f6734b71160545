"""The fork server: imports the code of a broker's processes once, and forks each of them when the supervisor asks.

    supervisor --order, descriptors--> fork server --fork--> one between --fork--> the process
        ^                                                     ends at once           |
        '-------------------- its pid, once the supervisor is its parent ------------'

A fork is safe here: there is one thread, and no socket, no store and no log is open. Each process finds the descriptors
under the numbers that the supervisor knows them by, and calls `main()` of its module.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import socket
import struct
import sys
from errno import EAGAIN
from pathlib import Path

import msgspec

from danube_fast.workers.process.boot import die_with_parent

__all__ = ["DESCRIPTORS_PER_MESSAGE", "ORDER_BYTES_MAX", "REPLY", "Order", "main"]

DESCRIPTORS_PER_MESSAGE = 200
"""The kernel takes 253."""
ORDER_BYTES_MAX = 64 * 1024
REPLY = struct.Struct("=i")
"""Pid of a process, or why there is none: the negative of an errno."""
NAME_BYTES_MAX = 15
"""Of the name of a process."""


class Order(msgspec.Struct, frozen=True):
    """A process that shall be forked."""

    module: str
    title: str
    """How `ps` shows it."""
    arguments: list[str]
    descriptors: list[int]
    """Numbers under which it finds the descriptors that follow, in messages of DESCRIPTORS_PER_MESSAGE."""


def main() -> int:
    """Process entry: SUPERVISOR-PID LINK MODULE... The exit code of the fork server, or of a process that it has forked."""
    supervisor_pid, link_fd, *modules = sys.argv[1:]
    die_with_parent(int(supervisor_pid))
    gc.disable()  # what is imported stays
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # or a collection in a process would copy pages that all share
    with socket.socket(fileno=int(link_fd)) as link:
        while data := link.recv(ORDER_BYTES_MAX):
            order = msgspec.json.decode(data, type=Order)
            descriptors = _receive(link, len(order.descriptors))
            gate = _fork(link)
            if gate >= 0:
                break
            for fd in descriptors:
                os.close(fd)
        else:
            return 0
        os.read(gate, 1)  # until the supervisor is the parent
        os.close(gate)
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the supervisor alone
        link.send(REPLY.pack(os.getpid()))
    _place(descriptors, order.descriptors)
    _show_as(order.title)
    sys.argv = [order.module, *order.arguments]
    found: int = importlib.import_module(order.module).main()
    return found


def _receive(link: socket.socket, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        data, some, _, _ = socket.recv_fds(link, 1, DESCRIPTORS_PER_MESSAGE)
        if not data:
            break
        found += some
    return found


def _fork(link: socket.socket) -> int:
    """Fork a process that the supervisor adopts. In it: a pipe that ends when it is adopted; in the fork server: -1. A
    fork that fails is told to the supervisor."""
    gate, opener = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        link.send(REPLY.pack(-(error.errno or EAGAIN)))
        os.close(gate)
        os.close(opener)
        return -1
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
        link.send(REPLY.pack(-abs(code)))
    os.close(opener)
    return -1


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors these numbers."""
    free = max(numbers) + 1
    lifted = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(lifted, numbers, strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def _show_as(title: str) -> None:
    """Let `ps` show that title in place of the fork server's command, and its last word as the name."""
    Path("/proc/self/comm").write_text(title.rpartition(" ")[2][:NAME_BYTES_MAX])
    # where the kernel finds the arguments: fields 48 and 49, counted from 1, see proc(5)
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(words[45]), int(words[46])
    text = title.encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main())
