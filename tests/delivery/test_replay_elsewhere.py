"""`replay --to-context`: from one secured broker to another one, which know this user by different keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli.contexts.context_file import ContextFile
from tests.delivery.history_rig import keep_for_ever
from tests.delivery.test_security import SecuredServer
from tests.workers.broker import ROOT

READ, COPY = "/default/orders", "/default/copy"
COUNT = 500
COMMAND_SECONDS = 120


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SecuredServer, ...]]:
    """Two brokers; pia has a key of its own at each, and may do there what the replay needs and no more."""
    grants = {"old": [("consumer", READ)], "new": [("producer", COPY)]}
    made = []
    for name in grants:
        folder = tmp_path_factory.mktemp(name)
        made.append(SecuredServer(folder / "data", folder, store=f"file://{folder / 'store'}"))
    with made[0] as old, made[1] as new:
        for server, rights in zip(made, grants.values(), strict=True):
            server.make_ann()
            with server.come_in("ann") as ann:
                keep_for_ever(ann, READ if server is old else COPY)
                server.add(ann.admin, "pia", *rights)
        with old.come_in("ann") as ann, ann.producer(READ) as producer:
            producer.send_many([b"%d" % number for number in range(COUNT)])
        yield old, new


@pytest.fixture(autouse=True)
def contexts(
    servers: tuple[SecuredServer, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a context for each broker; that of the source is in use."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with ContextFile.changing() as file:
        for name, server in zip(("old", "new"), servers, strict=True):
            file.put(name, {"url": server.url, **way_in(server)})
        file.use("old")


def way_in(server: SecuredServer) -> dict[str, Any]:
    return {"server_key": [server.server_key], "key_file": str(server.folder / "pia.key")}


def run(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `replay` in a process of its own."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")}
    told = {f"DANUBE_{name.upper()}": text for name, text in environment.items()}
    return subprocess.run(
        [
            sys.executable, "-m", "danube_fast.cli.main", "replay", READ, COPY, "--checkpoint", str(tmp_path),
            "-o", "json", *words,
        ],
        cwd=ROOT, env=inherited | told, capture_output=True, text=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip


def published(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Messages of that run, and of those before."""
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return said["messages"], said["published_before"]


def test_each_broker_by_its_own_key(servers: tuple[SecuredServer, ...], tmp_path: Path) -> None:
    _, new = servers
    assert published(run(tmp_path, "--to-context", "new")) == (COUNT, 0)
    with new.come_in("ann") as ann, ann.reader(COPY, start="earliest", stop="latest") as reader:
        found = [int(message.payload) for message in reader]
    assert found == [*range(COUNT)]
    assert published(run(tmp_path, "--to-context", "new")) == (0, COUNT), "its id is the same"


def test_the_environment_is_for_the_source_alone(
    servers: tuple[SecuredServer, ...], tmp_path: Path
) -> None:
    old, _ = servers
    told = {"url": old.url, "server_key": old.server_key, "key_file": str(old.folder / "pia.key")}
    done = run(tmp_path, "--to-context", "new", "--id", "told", "--dry-run", **told)
    assert published(done) == (0, 0)


def test_by_an_address_both_are_entered_by_one_key(
    servers: tuple[SecuredServer, ...], tmp_path: Path
) -> None:
    _, new = servers
    done = run(tmp_path, "--to-url", new.url, "--id", "refused")
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr


def test_a_key_that_the_target_does_not_know(
    servers: tuple[SecuredServer, ...], tmp_path: Path
) -> None:
    """The error names the context of the target."""
    old, new = servers
    with ContextFile.changing() as file:
        file.put("new", {"key_file": str(old.folder / "pia.key")})
    done = run(tmp_path, "--to-context", "new", "--id", "unknown")
    assert done.returncode == 4 and "danube-fast context show new" in done.stderr, done.stderr
