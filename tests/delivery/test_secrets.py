"""Secrets are where they belong and nowhere else: searched for in all that a broker writes and shows."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from zmq.utils import z85

from danube_fast.children import module_command
from danube_fast.errors import DanubeError
from danube_fast.security.curve import new_key_pair, read_key_file
from tests.delivery.test_security import TOPIC, SecuredServer
from tests.delivery.test_server_key import all_have, pinned, step
from tests.workers.broker import ROOT, wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    with SecuredServer(tmp_path / "data", tmp_path) as secured:
        yield secured


def processes(server: SecuredServer) -> list[int]:
    """The supervisor and all below it."""
    assert server.broker is not None
    pid = server.broker.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def run(server: SecuredServer, *words: str, user: str = "ann") -> bytes:
    """A command line, as a user types it; all that it prints."""
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")
    }
    environment |= {
        "PYTHONPATH": str(ROOT), "DANUBE_SERVER_KEY": server.server_key,
        "DANUBE_KEY_FILE": str(server.folder / f"{user}.key"),
        "XDG_CONFIG_HOME": str(server.folder / "config"),
    }  # fmt: skip
    done = subprocess.run(
        module_command("danube_fast.cli.main", *words), env=environment, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_no_secret_is_anywhere_but_in_its_file(server: SecuredServer) -> None:
    data, url = server.data_dir, ["--url", server.url]
    secrets = {"bootstrap": read_key_file(data / "bootstrap-admin.key").secret}
    secrets["server"] = read_key_file(data / "server.key").secret
    server.make_ann()
    old = server.server_key
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
    with server.come_in("pia") as pia:
        pia.producer(TOPIC).publish(b"in")
    server.new_key("eve")
    with contextlib.suppress(DanubeError):
        server.come_in("eve", timeout=3.0).close()
    with contextlib.suppress(DanubeError):  # the wrong half of a pair
        pinned(server, new_key_pair().public, timeout=3.0).close()
    for user in ("ann", "pia", "eve"):
        secrets[user] = read_key_file(server.folder / f"{user}.key").secret
    shown = {
        "status": run(server, "status", *url, "-o", "json"),
        "refused": run(server, "status", *url, "-o", "json", user="eve"),
        "doctor": run(server, "doctor", *url, "-o", "json"),
        "doctor of the folder": run(server, "doctor", "--data-dir", str(data), "-o", "json"),
        "config": run(server, "config", "show", "-o", "json"),
        "keys": run(server, "security", "keys", "list", *url, "-o", "json"),
        "context": run(server, "context", "show", "-o", "json"),
        "server-key": run(server, "--debug", "security", "server-key", "prepare", *url),
    }
    secrets["next"] = read_key_file(data / "server.key.next").secret
    new = step(server, old, "activate")["active"]
    wait_until("the new key at every port", lambda: all_have(server, new))
    assert b'"auth":"required"' in shown["status"].replace(b" ", b""), shown["status"]
    assert new.encode() in shown["server-key"], shown["server-key"]
    assert server.broker is not None
    shown["log"] = server.broker.error_text().encode()
    shown["ready line"] = str(server.broker.ready).encode()
    for pid in processes(server):
        shown[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        shown[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_bytes()
    for path in data.rglob("*"):
        if path.is_file() and not path.name.startswith("server.key"):
            shown[str(path)] = path.read_bytes()
    assert any("metadata" in name for name in shown) and any("logs" in name for name in shown)
    texts = {name: (secret.encode(), z85.decode(secret)) for name, secret in secrets.items()}
    assert texts["next"][0] in (data / "server.key").read_bytes(), "the search finds nothing"
    found = [
        f"{name} in {place}"
        for place, content in shown.items()
        for name, forms in texts.items()
        if any(form in content for form in forms)
    ]
    assert not found, found


def core_limit(pid: int) -> list[str]:
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
        if line.startswith("Max core file size"):
            return line.split()[4:6]
    raise AssertionError("no limit of core files")


def test_no_process_of_a_secured_broker_dumps_its_memory(server: SecuredServer) -> None:
    for pid in processes(server):
        assert set(core_limit(pid)) <= {"0", "1"}, pid


CRASH = "import os, sys; sys.argv[1:] and __import__('danube_fast.children').children.forbid_core_dumps(); os.abort()"


@pytest.mark.parametrize("forbids", [True, False])
def test_a_crash_dumps_memory_unless_that_is_forbidden(forbids: bool, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, *(["yes"] if forbids else [])], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),
    )  # fmt: skip
    _, status = os.waitpid(child.pid, 0)
    child.returncode = -signal.SIGABRT
    assert os.WTERMSIG(status) == signal.SIGABRT
    is_file = not Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")
    if not forbids:  # the other case would pass by itself where nothing is dumped anyway
        assert os.WCOREDUMP(status) or not is_file or hard == 0
    else:
        assert not os.WCOREDUMP(status) and not list(tmp_path.iterdir())
