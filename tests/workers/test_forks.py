"""The fork server: processes find what they were given, are children of the one who ordered them, and none begins unknown."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import Unavailable
from danube_fast.workers.process.fork_server import DESCRIPTORS_PER_MESSAGE
from danube_fast.workers.supervisor.forks import Adoption, Child, ForkServer, Starting
from danube_fast.workers.supervisor.spawn import MODULES
from tests.workers.broker import WAIT_SECONDS, Broker, is_running, wait_until

MODULE, HOLDING = "tests.workers.forked", "tests.workers.forked_holding"
TITLE = "danube-fast worker-7"
ROUNDS = 25
MANY_WORKERS = 24
HANG_MS = 5000


class Nursery:
    """A fork server, and processes of it that this process ends with."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder, self.count = folder, 0
        self.adoption = Adoption()
        self.adoption.set(is_on=True)
        self.server = ForkServer(modules or (MODULE, HOLDING))
        self.children: list[Child] = []

    def file(self, text: str, number: int = 0) -> int:
        """An open file with that text, under that number or a higher one."""
        fd = os.memfd_create("test")
        os.write(fd, text.encode())
        if number:
            fd, before = fcntl.fcntl(fd, fcntl.F_DUPFD, number), fd
            os.close(before)
        return fd

    def order(self, end: str, *descriptors: int, module: str = MODULE) -> tuple[Starting, Path]:
        """Order a process that ends so; and where it says what it finds."""
        self.count += 1
        path = self.folder / f"found{self.count}"
        arguments = [str(path), end, *map(str, descriptors)]
        return self.server.order(module, TITLE, arguments, list(descriptors)), path

    def begin(self, starting: Starting) -> Child:
        """The process that was ordered, once it is there."""
        try:
            readable, _, _ = select.select([starting], [], [], WAIT_SECONDS)
            assert readable, "no process"
            child = starting.take()
        finally:
            starting.close()
        assert child is not None
        self.children.append(child)
        return child

    def start(self, end: str, *descriptors: int, module: str = MODULE) -> tuple[Child, Path]:
        """The same as `order`, and it begins."""
        starting, path = self.order(end, *descriptors, module=module)
        return self.begin(starting), path

    def hold(self, reader: int) -> Child:
        """A process that ends when a pipe does."""
        return self.begin(self.server.order(HOLDING, TITLE, [str(reader)], [reader]))

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
        self.adoption.set(is_on=False)


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
    assert len(set(found["open"]) - {0, 1, 2, fd}) == 1, "of the folder that is listed"
    assert child.wait() == 3 == child.poll()
    os.close(fd)


def test_descriptors_stand_under_their_numbers_however_many(nursery: Nursery) -> None:
    fds = [nursery.file(f"text {number}") for number in range(2 * DESCRIPTORS_PER_MESSAGE + 7)]
    wanted = [f"text {number}" for number in range(len(fds))]
    high = nursery.file("high", 900)
    for some, texts in (
        (fds, wanted),
        (fds[::-1], wanted[::-1]),
        ([high, *fds], ["high", *wanted]),
    ):
        child, path = nursery.start("0", *some)
        assert nursery.found(path)["texts"] == texts
        assert child.wait() == 0
    assert len(os.listdir(f"/proc/{nursery.pid}/fd")) == 4, "the fork server keeps none of them"
    for fd in (*fds, high):
        os.close(fd)


_PLACING = """
import os, random, sys
from danube_fast.workers.process import fork_server
for seed in range(int(sys.argv[1])):
    draw, base = random.Random(seed), 200
    numbers, came = draw.sample(range(base, base + 12), 8), draw.sample(range(base, base + 12), 8)
    for place, fd in enumerate(came):
        made = os.memfd_create("test")
        os.write(made, str(place).encode())
        os.dup2(made, fd)
        os.close(made)
    fork_server._place(came, numbers)
    assert [os.pread(fd, 9, 0).decode() for fd in numbers] == [*map(str, range(8))], seed
    assert not any(map(os.get_inheritable, numbers)), seed
    for fd in numbers:
        os.close(fd)
    assert max(map(int, os.listdir("/proc/self/fd"))) < base, seed
print("placed")
"""


def test_descriptors_are_placed_wherever_they_came() -> None:
    command = [sys.executable, "-c", _PLACING, "500"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "placed\n"), run.stderr


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("7", 7), ("raise", 1)])
def test_how_a_process_ends_is_told(nursery: Nursery, end: str, code: int) -> None:
    child, _ = nursery.start(end, 0)
    assert child.wait() == code


def test_a_process_that_is_killed_is_told(nursery: Nursery) -> None:
    reader, writer = os.pipe()
    held = nursery.hold(reader)
    assert held.poll() is None and is_running(held.pid)
    held.send_signal(signal.SIGKILL)
    assert held.wait() == -signal.SIGKILL
    held.send_signal(signal.SIGKILL)  # to one that has ended: nothing
    os.close(reader)
    os.close(writer)


def test_a_process_that_is_not_taken_does_not_begin(nursery: Nursery) -> None:
    """Or it would run beside the one that takes its place."""
    paths = []
    for _ in range(ROUNDS):
        starting, path = nursery.order("0", 0)
        select.select([starting], [], [], WAIT_SECONDS)
        starting.close()
        paths.append(path)
    child, last = nursery.start("0", 0)
    assert child.wait() == 0 and last.exists()
    assert not any(path.exists() for path in paths)


def test_a_fork_server_that_is_killed_is_started_again_and_its_processes_go_on(
    nursery: Nursery,
) -> None:
    reader, writer = os.pipe()
    held = nursery.hold(reader)
    before = nursery.pid
    os.kill(before, signal.SIGKILL)
    wait_until("its end", lambda: not is_running(before))
    child, _ = nursery.start("5", 0)
    assert child.wait() == 5
    assert nursery.pid != before and held.poll() is None
    os.close(writer)
    assert held.wait() == 0
    os.close(reader)


def test_one_that_is_killed_with_an_order_says_so(nursery: Nursery) -> None:
    os.kill(nursery.pid, signal.SIGSTOP)
    starting, path = nursery.order("0", 0)
    assert starting.take() is None
    nursery.server.kill()
    with pytest.raises(Unavailable, match="before it had begun"):
        nursery.begin(starting)
    child, _ = nursery.start("0", 0)
    assert child.wait() == 0 and not path.exists()


def test_one_that_takes_no_orders_any_more_is_replaced(nursery: Nursery) -> None:
    before = nursery.pid
    os.kill(before, signal.SIGSTOP)
    lines: list[Starting] = []

    def flood() -> None:
        while True:
            lines.append(nursery.order("0", 0)[0])

    with pytest.raises(BlockingIOError):
        flood()
    for line in lines:
        line.close()
    child, _ = nursery.start("0", 0)
    assert child.wait() == 0 and nursery.pid != before


def test_a_module_that_cannot_be_imported_fails_in_its_own_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Nursery(tmp_path, "tests.workers.no_such_module", MODULE)
    try:
        assert made.start("0", 0)[0].wait() == 0
        assert made.start("0", 0, module="tests.workers.no_such_module")[0].wait() == 1
    finally:
        made.close()
    assert capfd.readouterr().err.count("No module named") == 1


def test_it_has_one_thread_and_no_descriptors(tmp_path: Path) -> None:
    """Or what another thread holds, a lock of malloc perhaps, is held for ever in a process that is forked."""
    made = Nursery(tmp_path, *MODULES.values(), MODULE)
    try:
        assert made.start("0", 0)[0].wait() == 0
        assert len(os.listdir(f"/proc/{made.pid}/task")) == 1
        assert len(os.listdir(f"/proc/{made.pid}/fd")) == 4
        environment = Path(f"/proc/{made.pid}/environ").read_text()
        assert "OPENBLAS_NUM_THREADS=1" not in environment
    finally:
        made.close()


def test_beside_another_thread_a_process_gets_an_interpreter_of_its_own(tmp_path: Path) -> None:
    made = Nursery(tmp_path, "tests.workers.threaded")
    fd = made.file("text")
    try:
        child, path = made.start("4", fd)
        found = made.found(path)
        assert child.wait() == 4 and (found["pid"], found["parent"]) == (child.pid, os.getpid())
        assert found["texts"] == ["text"] and "-m\0tests.workers.forked\0" in found["command"]
    finally:
        made.close()
        os.close(fd)


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
        raise OSError(errno.ENOMEM, "no")
    return fork()
os.fork = failing
assert fork_server._fork(theirs) == -1
ours.settimeout(60)
assert fork_server.REPLY.unpack(ours.recv(4)) == (-errno.ENOMEM,)
print("told")
"""


@pytest.mark.parametrize("call", [1, 2])
def test_a_fork_that_fails_is_told(call: int) -> None:
    """The first of the two, or the second, which is made in the process between."""
    command = [sys.executable, "-c", _FAILING, str(call)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "told\n"), run.stderr


# ---------------------------------------------------------------- of a broker


def fork_server_of(broker: Broker) -> int:
    """The pid of a broker's fork server."""
    pid = broker.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        if b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError(f"no fork server among {children}")


def test_a_broker_bears_a_fork_server_that_is_killed(tmp_path: Path) -> None:
    note = "the fork server was killed by SIGKILL; another one starts with the next process"
    with Broker(tmp_path / "data", workers=2) as broker:
        broker.wait_ready()
        for count in (1, 2):
            os.kill(fork_server_of(broker), signal.SIGKILL)
            wait_until("a note", lambda count=count: broker.error_text().count(note) == count)  # type: ignore[misc]
            worker = int(broker.status()["processes"][1]["pid"])
            os.kill(worker, signal.SIGKILL)

            def is_back(worker: int = worker) -> bool:
                row = broker.status()["processes"][1]
                return bool(row["state"] == "ready" and row["pid"] != worker)

            wait_until("another worker", is_back)
        assert broker.stop() == 0


def test_a_broker_that_is_told_to_stop_does_not_wait_for_a_fork_server(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", workers=2) as broker:
        broker.wait_ready()
        fork_server = fork_server_of(broker)
        os.kill(fork_server, signal.SIGSTOP)
        os.kill(broker.pids[1], signal.SIGKILL)
        wait_until("the end of the worker", lambda: not is_running(broker.pids[1]))
        assert broker.stop() == 0
        assert not is_running(fork_server)


def test_a_broker_has_as_many_workers_as_one_likes(tmp_path: Path) -> None:
    """The kernel keeps few orders, and few descriptors that are on their way."""
    with Broker(tmp_path / "data", workers=MANY_WORKERS, descriptors=1024) as broker:
        assert len(broker.wait_ready()["worker_pids"]) == MANY_WORKERS
        assert broker.stop() == 0


def test_a_fork_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", workers=2, heartbeat_timeout_ms=HANG_MS) as broker:
        broker.wait_ready()
        fork_server, worker = fork_server_of(broker), broker.pids[1]
        os.kill(fork_server, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)

        def is_back() -> bool:
            row = broker.status()["processes"][1]
            return bool(row["state"] == "ready" and row["pid"] != worker)

        wait_until("another worker", is_back)
        wait_until("the end of the fork server", lambda: not is_running(fork_server))
        assert (
            f"worker 0 cannot be started (it was not there within {HANG_MS} ms)"
            in broker.error_text()
        )
