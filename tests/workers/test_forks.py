"""The fork server: processes find what they were given, are children of the one who ordered them, and outlive it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import Unavailable
from danube_fast.workers.process.fork_server import DESCRIPTORS_PER_MESSAGE
from danube_fast.workers.supervisor.forks import Child, ForkServer
from danube_fast.workers.supervisor.spawn import MODULES
from tests.workers.broker import is_running, wait_until

MODULE = "tests.workers.forked"
TITLE = "danube-fast worker-7"


class Nursery:
    """A fork server, and processes of it that this process ends with."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder, self.count = folder, 0
        self.server = ForkServer(modules or (MODULE,))
        self.children: list[Child] = []

    def file(self, text: str, number: int = 0) -> int:
        """An open file with that text, under that number or a higher one."""
        fd = os.memfd_create("test")
        os.write(fd, text.encode())
        if number:
            fd, before = fcntl.fcntl(fd, fcntl.F_DUPFD, number), fd
            os.close(before)
        return fd

    def start(self, end: str, *descriptors: int, module: str = MODULE) -> tuple[Child, Path]:
        """Fork a process that ends so; and where it says what it finds."""
        self.count += 1
        path = self.folder / f"found{self.count}"
        arguments = [str(path), end, *map(str, descriptors)]
        child = self.server.fork(module, TITLE, arguments, list(descriptors))
        self.children.append(child)
        return child, path

    def found(self, path: Path) -> dict[str, Any]:
        """What a process has found."""
        wait_until("what it finds", path.exists)
        said: dict[str, Any] = json.loads(path.read_text())
        return said

    @property
    def pid(self) -> int:
        """Of the fork server."""
        return self.server._process.pid

    def close(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.close()
        self.server.close()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    made.close()


def test_a_process_is_our_child_in_a_group_of_its_own(nursery: Nursery) -> None:
    fd = nursery.file("text")
    child, path = nursery.start("3", fd)
    found = nursery.found(path)
    assert (found["pid"], found["parent"], found["group"]) == (child.pid, os.getpid(), child.pid)
    assert (found["command"], found["name"]) == (TITLE, "worker-7")
    assert found["texts"] == ["text"] and found["inherited"] == []
    listing = found["open"][-1] if found["open"][-1] != fd else found["open"][-2]
    assert set(found["open"]) - {listing} <= {0, 1, 2, fd}
    assert child.wait() == 3 == child.poll()
    os.close(fd)


def test_descriptors_stand_under_their_numbers_however_many_and_wherever(nursery: Nursery) -> None:
    fds = [nursery.file(f"text {number}") for number in range(2 * DESCRIPTORS_PER_MESSAGE + 7)]
    wanted = [f"text {number}" for number in range(len(fds))]
    for some, texts in ((fds, wanted), (fds[::-1], wanted[::-1])):
        child, path = nursery.start("0", *some)
        assert nursery.found(path)["texts"] == texts
        assert child.wait() == 0
    high = nursery.file("high", 900)
    child, path = nursery.start("0", high, fds[0])
    assert nursery.found(path)["texts"] == ["high", "text 0"]
    assert len(os.listdir(f"/proc/{nursery.pid}/fd")) == 4, "the fork server keeps none of them"
    for fd in (*fds, high):
        os.close(fd)


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("7", 7), ("raise", 1)])
def test_how_a_process_ends_is_told(nursery: Nursery, end: str, code: int) -> None:
    child, _ = nursery.start(end, 0)
    assert child.wait() == code


def test_a_process_that_is_killed_and_one_that_runs_on(nursery: Nursery) -> None:
    reader, writer = os.pipe()
    file = nursery.file("x")
    child, path = nursery.start("0", file)
    assert child.wait() == 0
    held = nursery.server.fork("tests.workers.forked_holding", TITLE, [str(reader)], [reader])
    nursery.children.append(held)
    assert held.poll() is None and is_running(held.pid)
    held.send_signal(signal.SIGKILL)
    assert held.wait() == -signal.SIGKILL
    held.send_signal(signal.SIGKILL)  # to one that has ended: nothing
    for fd in (reader, writer, file):
        os.close(fd)
    assert path.exists()


def test_a_fork_server_that_is_killed_is_started_again_and_its_processes_go_on(
    nursery: Nursery,
) -> None:
    reader, writer = os.pipe()
    held = nursery.server.fork("tests.workers.forked_holding", TITLE, [str(reader)], [reader])
    nursery.children.append(held)
    before = nursery.pid
    os.kill(before, signal.SIGKILL)
    child, _ = nursery.start("5", 0)
    assert child.wait() == 5
    assert nursery.pid != before and held.poll() is None
    os.close(writer)
    assert held.wait() == 0
    os.close(reader)


def test_one_that_cannot_run_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = Nursery(tmp_path, "tests.workers.no_such_module")
    with pytest.raises(
        Unavailable, match=f"{TITLE} cannot be started: the fork server has ended with 1"
    ):
        made.start("0", 0)
    made.server.close()
    assert "No module named" in capfd.readouterr().err


def test_it_has_one_thread_and_no_descriptors(tmp_path: Path) -> None:
    """Or what another thread holds, a lock of malloc perhaps, is held for ever in a process that is forked."""
    made = Nursery(tmp_path, *MODULES.values(), MODULE)
    try:
        child, _ = made.start("0", 0)
        assert child.wait() == 0
        assert len(os.listdir(f"/proc/{made.pid}/task")) == 1
        assert len(os.listdir(f"/proc/{made.pid}/fd")) == 4
    finally:
        made.close()


def test_ends_are_told_to_one_who_was_started_to_ignore_them(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        made = Nursery(tmp_path)
        child, _ = made.start("3", 0)
        assert child.wait() == 3
        made.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


_FAILING = """
import errno, os, socket, sys
from danube_fast.workers.process import fork_server
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
fork, calls = os.fork, [0]
def failing():
    calls[0] += 1
    if calls[0] == int(sys.argv[1]):
        raise OSError(errno.EAGAIN, "no")
    return fork()
os.fork = failing
assert fork_server._fork(theirs) == -1
ours.settimeout(60)
assert fork_server.REPLY.unpack(ours.recv(4)) == (-errno.EAGAIN,)
print("told")
"""


@pytest.mark.parametrize("call", [1, 2])
def test_a_fork_that_fails_is_told(call: int) -> None:
    """The first of the two, or the second, which is made in the process between."""
    command = [sys.executable, "-c", _FAILING, str(call)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "told\n"), run.stderr
