"""A second real user of the host beside a secured broker: ports, names, rings, files, processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.security.curve import new_key_pair, write_key_file
from danube_fast.security.records import Credential, key_of
from danube_fast.workers.coordinator.security import _place_of as place_of
from danube_fast.workers.process.access import OVERFLOW
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.supervisor.datadir import DataDirectory
from tests.delivery.test_local_keys import lanes
from tests.delivery.test_security import SecuredServer
from tests.shm.children import child
from tests.shm.test_borders import is_mapped
from tests.workers.broker import is_running, wait_until

OTHER = 54_321
TOPIC = "/shop/orders"
SECRET_TOPIC = "/shop/secret"
SECONDS = 60
RESTART_MS = 3000
"""Long enough for another process to take the name of a worker that is down."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder into which every user may look, unlike those of the tests."""
    if os.geteuid() or not is_mapped(OTHER):
        pytest.skip(f"only root can start a process of user {OTHER}, where there is such a user")
    with tempfile.TemporaryDirectory(prefix="df-other-user-", dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def server(folder: Path) -> Iterator[SecuredServer]:
    with SecuredServer(folder / "data", folder, restart_delay_ms=RESTART_MS) as secured:
        secured.make_ann()
        with secured.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            for topic in (TOPIC, SECRET_TOPIC):
                ann.admin.create_topic(topic)
                ann.producer(topic).publish(b"one")
        yield secured


def endpoints_of(server: SecuredServer) -> list[str]:
    """The ipc endpoints of all processes, as the kernel lists them."""
    lock_fd = os.open(server.data_dir / "LOCK", os.O_RDONLY)
    try:
        token = DataDirectory(server.data_dir, lock_fd).token
    finally:
        os.close(lock_fd)
    listening = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    names = {name for name in listening if token in name and ".shm" not in name}
    assert len(names) == server.workers + 1, f"all processes listen on ipc: {names}"
    return [f"ipc://{name}" for name in sorted(names)]


def own_key(folder: Path) -> tuple[str, str]:
    """A key file that the other user owns; the public key."""
    pair, path = new_key_pair(), folder / "other.key"
    write_key_file(path, pair)
    os.chown(path, OTHER, OTHER)
    return str(path), pair.public


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Let the other user try."""
    with child("-m", "tests.security.other_user", str(OTHER)) as process:
        out, _ = process.communicate(json.dumps(plan).encode() + b"\n", timeout=4 * SECONDS)
    assert process.returncode == 0, f"the other user's process ended with {process.returncode}"
    said: dict[str, Any] = json.loads(out)
    assert said["user"] == OTHER
    return said


def plan_of(server: SecuredServer, key_file: str, **more: Any) -> dict[str, Any]:
    inside = list(server.data_dir.rglob("*"))
    return {
        "url": server.url, "warm": str(server.folder / "ann.key"), "server_key": server.server_key, "key_file": key_file,
        "endpoints": endpoints_of(server), "transport": "tcp", "topics": [TOPIC],
        "files": [str(path) for path in inside if path.is_file()],
        "folders": [str(path) for path in (server.data_dir, *inside) if path.is_dir()],
        "pids": server._children(), **more,
    }  # fmt: skip


def test_another_user_gets_nowhere(server: SecuredServer) -> None:
    key_file, _ = own_key(server.folder)
    plan = plan_of(server, key_file)
    names = {Path(path).name for path in plan["files"]}
    assert {"server.key", "data.mdb"} <= names and any(name.endswith(".seg") for name in names)
    assert plan["pids"]
    said = run(plan)
    rings = set(said["rings"].values())
    refusal = f"local user {OTHER} is not registered with this broker (danube-fast security keys add USER --uid {OTHER})"
    assert rings <= {refusal, "no listener"}
    assert len(rings) == 2, f"workers offer rings, the coordinator has none: {said['rings']}"
    assert set(said["ipc"].values()) == {"silence"}
    assert set(said["files"].values()) == set(said["folders"].values()) == {"PermissionError"}
    for pid, found in said["processes"].items():
        assert set(found.values()) == {"PermissionError"}, f"process {pid}: {found}"
    assert said["publish"] == {TOPIC: "PermissionDenied"}


def test_a_registered_user_has_its_rights_only(server: SecuredServer) -> None:
    key_file, public = own_key(server.folder)
    with server.come_in("ann") as ann:
        ann.admin.set_principal("pia")
        ann.admin.set_credential(f"curve:{public}", "pia")
        ann.admin.set_credential(f"uid:{OTHER}", "pia")
        ann.admin.set_binding("pia", "user:pia", "producer", TOPIC)
        topics = [TOPIC, SECRET_TOPIC]
        said = run(plan_of(server, key_file, transport="shm", topics=topics))
        assert said["publish"] == {TOPIC: "rings", SECRET_TOPIC: "PermissionDenied"}
        assert set(said["ipc"].values()) == {"answered"}
        assert set(said["files"].values()) == {"PermissionError"}
        assert {v for found in said["processes"].values() for v in found.values()} == {
            "PermissionError"
        }
        ann.admin.delete_security("credential", f"uid:{OTHER}")
        said = run(plan_of(server, key_file, transport="auto", topics=[TOPIC]))
        assert said["publish"] == {TOPIC: "tcp"}, "its key is good still"


def start_in_user_namespace(server: SecuredServer, patch: pytest.MonkeyPatch) -> None:
    """Start a broker that knows its own user only: the kernel shows it all others as the overflow uid."""
    program = ["unshare", "--user", "--map-current-user"]
    try:
        tried = subprocess.run([*program, "true"], capture_output=True, timeout=SECONDS, check=False)  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no program `unshare` here: install util-linux")
    if tried.returncode:
        pytest.skip(f"no user namespace may be made here: {tried.stderr.decode().strip()}")
    through = server.folder / "through"
    through.write_text(f'#!/bin/sh\nexec {" ".join(program)} "{sys.executable}" "$@"\n')
    through.chmod(0o755)
    with patch.context() as patched:
        patched.setattr(sys, "executable", str(through))
        server.start()


def test_a_user_that_the_kernel_cannot_name_is_no_registered_user(
    server: SecuredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if a record of an older version registers it: it stands for every user outside."""
    key_file, public = own_key(server.folder)
    with server.come_in("ann") as ann:
        ann.admin.set_principal("pia")
        ann.admin.set_credential(f"curve:{public}", "pia")
        ann.admin.set_binding("pia", "user:pia", "producer", TOPIC)
        with pytest.raises(InvalidArgument, match="every user of another user namespace"):
            ann.admin.set_credential(OVERFLOW, "pia")
    server.stop()
    with contextlib.closing(Environment().make_store(server.data_dir, SystemClock())) as store:
        record = Credential(OVERFLOW, "pia")
        store.put(place_of(key_of(record)), msgspec.json.encode(record))
    start_in_user_namespace(server, monkeypatch)
    said = run({**plan_of(server, key_file, topics=[TOPIC], transport="auto"), "files": [], "folders": [], "pids": []})  # fmt: skip
    rings = set(said["rings"].values())
    assert rings == {"local user 65534 is not registered with this broker", "no listener"}
    assert set(said["ipc"].values()) == {"silence"}
    assert said["publish"] == {TOPIC: "tcp"}, "its key is good"


@contextlib.contextmanager
def squatter(endpoint: str) -> Iterator[Any]:
    """A process of the other user that takes a worker's names once they are free."""
    with child("-m", "tests.security.other_user", str(OTHER)) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"take": endpoint}).encode() + b"\n")
        process.stdin.flush()
        yield process


def test_a_taken_name_keeps_no_worker_down(server: SecuredServer) -> None:
    """The worker serves by tcp, and by rings as soon as it has its name back."""
    endpoints = [one for one in endpoints_of(server) if "worker" in one]
    assert server.broker is not None
    workers = server.broker.ready["worker_pids"]
    with contextlib.ExitStack() as stack:
        squatters = [stack.enter_context(squatter(endpoint)) for endpoint in endpoints]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until("the end of the workers", lambda: not any(map(is_running, workers)))
        for process in squatters:
            assert b"taken" in process.stdout.readline()
        with server.come_in("ann", timeout=SECONDS) as ann:
            assert ann.producer(TOPIC).publish(b"two").offset == 1

            def is_told() -> bool:
                rows = ann.admin.cluster_status()["processes"]
                faults = " ".join(row["fault"] for row in rows)
                return all(
                    f"{endpoint.removeprefix('ipc://')} and" in faults for endpoint in endpoints
                )

            wait_until("the names in the status", is_told, SECONDS)
            ann.admin.set_credential(f"uid:{os.geteuid()}", "ann")
            with (
                pytest.raises(DanubeError),
                server.come_in("ann", transport="shm", timeout=5) as shm,
            ):
                shm.producer(TOPIC, timeout=5).publish(b"to an impostor")
            for transport in ("zmq", "auto"):  # past the impostor
                with server.come_in("ann", transport=transport, timeout=SECONDS) as near:
                    near.producer(TOPIC).publish(transport.encode())
                    assert lanes(near) == {"tcp"}

    def has_rings() -> bool:
        try:
            with server.come_in("ann", transport="shm", timeout=5) as shm:
                shm.producer(TOPIC, timeout=5).publish(b"three")
        except DanubeError:
            return False
        return True

    wait_until("rings, as the names are free again", has_rings, SECONDS)
