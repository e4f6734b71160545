"""The container recipe, built and run by Docker: the steps of its README, a kill, what is open inside.

    DANUBE_TEST_CONTAINER_BASE=python:3.12-slim ./run test tests/delivery/test_container_image.py

builds the image over that base, which Docker has or can fetch. Needs `docker`, its `compose` and a daemon. Ports are those
that the system chooses on 127.0.0.1, so it runs beside a broker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import danube_fast
from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.security.curve import new_key_pair, write_key_file
from tests.workers.broker import ROOT, wait_until

RECIPE = ROOT / "docs/examples/container"
BASE = os.environ.get("DANUBE_TEST_CONTAINER_BASE", "")
PROJECT = f"danube-fast-test-{os.getpid()}"
IMAGE = f"{PROJECT}:local"
BUILD_SECONDS = 1200.0
RUN_SECONDS = 120.0
HEALTHY_SECONDS = 300.0
pytestmark = pytest.mark.skipif(not BASE, reason="DANUBE_TEST_CONTAINER_BASE names no base image")


def run(*words: str, timeout: float = RUN_SECONDS, status: int | None = 0) -> str:
    """Run a command; what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    assert status is None or done.returncode == status, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


class Deployment:
    """The recipe under a project's name of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        recipe = yaml.safe_load((RECIPE / "compose.yaml").read_text())
        for service in recipe["services"].values():
            service["image"] = IMAGE
            service.pop("build", None)
        recipe["services"]["broker"]["ports"] = ["127.0.0.1::6650", "127.0.0.1::6651"]
        file = folder / "compose.yaml"
        file.write_text(yaml.safe_dump(recipe))
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        tool = ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]
        self._compose = [*tool, "-f", str(file), "-p", PROJECT]

    def compose(self, *words: str, status: int | None = 0) -> str:
        """Run `docker compose` with these words."""
        return run(*self._compose, *words, status=status)

    @property
    def container(self) -> str:
        """The id of the broker's container."""
        return self.compose("ps", "-q", "broker").strip()

    def is_healthy(self) -> bool:
        """Whether Docker's health check of the broker passes."""
        return json.loads(run("docker", "inspect", self.container))[0]["State"]["Health"]["Status"] == "healthy"  # fmt: skip

    def port(self, inside: int) -> int:
        """The port of this host that leads to one of the container."""
        return int(self.compose("port", "broker", str(inside)).rpartition(":")[2])

    def client(self, server_key: str, key: Path, *words: str) -> str:
        """Run `danube-fast` in a container of its own that reaches the broker by its name."""
        return run(
            "docker", "run", "--rm", "--network", f"{PROJECT}_default", "-v", f"{key}:/run/own.key:ro", "--user", "0",
            "-e", "DANUBE_URL=danube://broker:6650", "-e", f"DANUBE_SERVER_KEY={server_key}",
            "-e", "DANUBE_KEY_FILE=/run/own.key", IMAGE, "danube-fast", *words,
        )  # fmt: skip


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    if shutil.which("docker") is None:
        pytest.fail(
            "DANUBE_TEST_CONTAINER_BASE is set and there is no `docker`; install it, or unset that"
        )
    made = Deployment(tmp_path_factory.mktemp("container"))
    with contextlib.ExitStack() as undo:
        undo.callback(run, "docker", "rmi", "--force", IMAGE, status=None)
        run(
            "docker", "build", "--network", "host", "--build-arg", f"BASE={BASE}",
            "-f", str(RECIPE / "Dockerfile"), "-t", IMAGE, str(ROOT), timeout=BUILD_SECONDS,
        )  # fmt: skip
        undo.callback(made.compose, "down", "--volumes", "--timeout", "30", status=None)
        yield made


def test_the_image_holds_the_broker_alone(deployment: Deployment) -> None:
    image = json.loads(run("docker", "inspect", IMAGE))[0]["Config"]
    assert image["User"] == "danube"
    words = [*image["Env"], *image["Cmd"]]
    assert not [word for word in words if "secret" in word.lower() or "insecure" in word.lower()]
    listed = run(
        "docker", "run", "--rm", "--network", "none", "--user", "0", IMAGE, "find", "/", "-xdev",
        "(", "-name", ".git", "-o", "-name", "conftest.py", "-o", "-name", "*.key", "-o", "-name", "Dockerfile", ")",
        "-not", "-path", "/proc/*", "-not", "-path", "*/site-packages/numpy/*",
    )  # fmt: skip
    assert not listed.split()


def test_the_lines_of_the_readme_and_kills(deployment: Deployment, tmp_path: Path) -> None:
    fingerprint = deployment.compose("run", "--rm", "-T", "certificate").strip().splitlines()[-1]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", fingerprint)
    deployment.compose("up", "--detach", "broker")
    wait_until("health", deployment.is_healthy, HEALTHY_SECONDS)
    log = run("docker", "logs", deployment.container)
    (server_key,) = re.findall(r"server key (\S{40})", log)
    assert fingerprint in log
    pair = new_key_pair()
    own = tmp_path / "ann.key"
    write_key_file(own, pair)
    url = f"danube://127.0.0.1:{deployment.port(6650)}"
    for options in ({}, {"server_key": server_key, "key_file": own}):
        with pytest.raises((PermissionDenied, Unavailable)):
            danube_fast.connect(url, transport="tcp", timeout=5.0, **options)
    key = "/srv/danube/data/bootstrap-admin.key"
    deployment.compose(
        "exec", "-T", "-e", f"DANUBE_SERVER_KEY={server_key}", "-e", f"DANUBE_KEY_FILE={key}", "broker",
        "danube-fast", "security", "users", "add", "ann", "--public-key", pair.public, "--role", "admin",
    )  # fmt: skip
    deployment.client(server_key, own, "produce", "/default/t", "-m", "first", "-m", "second")
    deployment.compose("kill", "-s", "SIGKILL", "broker")
    deployment.compose("up", "--detach", "broker")
    wait_until("health behind a kill", deployment.is_healthy, HEALTHY_SECONDS)
    read = deployment.client(
        server_key, own, "consume", "/default/t", "--subscription", "s", "--from", "earliest", "--max", "2",
    )  # fmt: skip
    assert read.split() == ["first", "second"]
    _look_inside(deployment, server_key)
    container = deployment.container
    deployment.compose("stop")
    assert json.loads(run("docker", "inspect", container))[0]["State"]["ExitCode"] == 0
    log = run("docker", "logs", container)
    assert "Traceback" not in log and pair.secret not in log


def _look_inside(deployment: Deployment, server_key: str) -> None:
    """No root, no capability, no file to write but the data, no secret in its environment."""

    def inside(*words: str, status: int | None = 0) -> str:
        return deployment.compose("exec", "-T", "broker", *words, status=status)

    assert inside("id", "-u").strip() == "10001"
    status: dict[str, Any] = dict(
        line.split(":\t", 1)
        for line in inside("cat", "/proc/1/status").splitlines()
        if ":\t" in line
    )
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"
    for place in ("/", "/opt/danube-fast", "/run/danube-keys"):
        assert inside("touch", f"{place}/mine", status=None) == ""
        assert "mine" not in inside("ls", place)
    assert inside("stat", "-c", "%a", "/srv/danube/data/server.key").strip() == "600"
    assert server_key not in inside("cat", "/proc/1/environ")
