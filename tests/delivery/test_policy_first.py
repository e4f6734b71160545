"""A worker serves no client before it knows who may do what: it does not even listen."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from danube_fast.errors import DanubeError, PermissionDenied
from tests.delivery.test_security import TOPIC, SecuredServer, refused
from tests.workers.broker import is_running, wait_until

HELD_MS = 120_000
"""So long the coordinator may be stopped before the supervisor takes it for hanging."""
LOOK_SECONDS = 3.0
"""Several hundred times what lies between the logs that are open and the ports that are bound."""
WAIT_SECONDS = 60.0
LOG_SUFFIX = ".seg"


def has_logs(pid: int) -> bool:
    """Whether a worker has its logs open: what is left is to learn who may do what, and to listen."""
    try:
        files = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(name.endswith(LOG_SUFFIX) for name in files)


def takes(port: int) -> bool:
    """Whether a process listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def names_of(pid: int) -> set[str]:
    """Names at which a process listens for clients of its host."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in inodes}


def test_a_worker_that_starts_listens_when_it_has_the_records(tmp_path: Path) -> None:
    with (
        SecuredServer(tmp_path / "data", tmp_path, heartbeat_timeout_ms=HELD_MS) as server,
        contextlib.ExitStack() as stack,
    ):
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            server.add(ann.admin, "pia", ("producer", TOPIC))
            server.add(ann.admin, "nick")
            worker = int(ann.admin.describe_topic(TOPIC)["placement"][0]["worker"])
        assert server.broker is not None
        coordinator, *workers = server.broker.pids
        victim, port = workers[worker], server.port + 2 + worker
        assert takes(port) and names_of(victim)
        known = set(server._children())

        def successor() -> Any:
            return set(server._children()) - known

        os.kill(coordinator, signal.SIGSTOP)
        stack.callback(os.kill, coordinator, signal.SIGCONT)
        os.kill(victim, signal.SIGKILL)
        wait_until("the end of the worker", lambda: not is_running(victim))
        (pid,) = wait_until("another worker", successor, WAIT_SECONDS)
        wait_until("its logs", lambda: has_logs(pid), WAIT_SECONDS)
        since = time.monotonic()
        looks = 0
        while time.monotonic() < since + LOOK_SECONDS:
            assert not takes(port), "a client is taken before the worker knows who may do what"
            assert not names_of(pid), "a worker listens before it knows who may do what"
            looks += 1
            time.sleep(0.02)
        assert looks > 5 and is_running(pid)
        assert set(server._children()) - known == {pid}, "it was started again"

        os.kill(coordinator, signal.SIGCONT)

        def publishes() -> bool:
            try:
                with server.come_in("pia", timeout=5.0) as pia:
                    pia.producer(TOPIC, timeout=5.0).publish(b"in")
            except PermissionDenied:
                raise
            except DanubeError:
                return False
            return True

        wait_until("a publish", publishes, WAIT_SECONDS)
        assert takes(port) and names_of(pid)
        with server.come_in("nick") as nick:
            refused(lambda: nick.producer(TOPIC).publish(b"no"))
