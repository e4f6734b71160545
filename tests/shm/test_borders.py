"""Clients beyond a border of the kernel: in pid namespaces of their own, and of another user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.crash.rig import Server
from tests.shm.children import child, heard, held
from tests.shm.stranger import COUNT
from tests.workers.broker import is_running, wait_until

STRANGER = 65_534
GREETING = bytes((1, True))
"""Of tests.shm.confined: it is process 1, and has rings."""
ROUNDS = 5
SECONDS = 60


def pid_namespace() -> list[str]:
    """The program that starts another one in a new pid namespace, and takes it along when it dies."""
    program = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        program += ["--user", "--map-current-user"]
    try:
        tried = subprocess.run(
            [*program, "true"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no program `unshare` here: install util-linux")
    if tried.returncode:
        pytest.skip(f"no pid namespace may be made here, run as root: {tried.stderr.strip()}")
    return program


def inmost(process: subprocess.Popen[bytes]) -> int:
    """Pid, as seen from here, of the process 1 that `unshare` has started."""
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pid)


def is_mapped(user: int) -> bool:
    """Whether this user namespace has that user."""
    rows = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= user < first + count for first, _, count in rows)


def test_clients_in_other_pid_namespaces(tmp_path: Path) -> None:
    """Both are process 1 where they live. One is killed: its rings end, and nobody else notices."""
    program = pid_namespace()
    with Server(tmp_path / "data", workers=1) as server, server.client(transport="shm") as near:
        worker = server.pid_of(1)
        producer = near.producer("/default/near", durability="os")
        consumer = near.consumer("/default/near", subscription="s", initial_position="earliest")

        def exchange(payload: bytes) -> None:
            producer.publish(payload)
            message = consumer.receive(timeout=SECONDS)
            assert message is not None and message.payload == payload
            consumer.ack(message)

        def confined(topic: str) -> tuple[str, ...]:
            return "-m", "tests.shm.confined", server.url, topic

        exchange(b"before")
        alone = held(worker)
        assert alone.maps == 1
        with child(*confined("/default/b"), through=program) as other:
            assert heard(other, len(GREETING), SECONDS).startswith(GREETING)
            before = held(worker)
            assert before.maps == 2
            with child(*confined("/default/a"), through=program) as doomed:
                said = heard(doomed, len(GREETING) + ROUNDS, SECONDS)
                assert said.startswith(GREETING)
                assert held(worker).maps == 3
                pid = inmost(doomed)
                assert os.stat(f"/proc/{pid}/ns/pid").st_ino != os.stat("/proc/self/ns/pid").st_ino
                os.kill(pid, signal.SIGKILL)
                exchange(b"while it dies")
            wait_until(f"the end of {pid}", lambda: not is_running(pid))
            wait_until(f"{before} again after a kill", lambda: held(worker) == before)
            heard(other, 1)  # what it wrote up to now
            heard(other, ROUNDS)
            exchange(b"after")
            pid = inmost(other)
        wait_until("the end of the other namespace", lambda: not is_running(pid))
        wait_until(f"{alone} again", lambda: held(worker) == alone)
        assert server.pid_of(1) == worker, "the worker died too"
        exchange(b"at last")


def test_a_client_of_another_user(tmp_path: Path) -> None:
    """It gets no rings, is told so if it insists, and goes over ZeroMQ if not."""
    if os.geteuid() or not is_mapped(STRANGER):
        pytest.skip(f"only root can start a client of user {STRANGER}, where there is such a user")
    with Server(tmp_path / "data", workers=1) as server:
        worker = server.pid_of(1)
        before = held(worker)
        with child("-m", "tests.shm.stranger", server.url, str(STRANGER)) as stranger:
            out, _ = stranger.communicate(timeout=SECONDS)
        assert stranger.returncode == 0, f"the client ended with {stranger.returncode}"
        said = json.loads(out)
        numbers = list(range(COUNT))
        assert said["own"] == {"numbers": numbers, "rings": [True]}, "rings for the broker's user"
        assert said["user"] == STRANGER
        assert said["auto"] == {"numbers": numbers, "rings": [False]}
        kind, text = said["refused"]
        assert kind == "Unavailable"
        assert f"for the broker's user {os.geteuid()}, not for {STRANGER}" in text
        assert "use transport='auto'" in text
        wait_until(f"{before} again", lambda: held(worker) == before)
