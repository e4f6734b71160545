"""The container recipe: its own command, environment and health check, in plain processes with a temporary folder."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import danube_fast
from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.security.curve import read_key_file
from danube_fast.security.tls import client_context
from tests.crash.rig import free_port
from tests.workers.broker import ROOT, START_SECONDS, wait_until

RECIPE = ROOT / "docs/examples/container"
WAIT_SECONDS = 60.0
PORTS = 4
FIRST_PORT = 6650


class Recipe:
    """What the files of the recipe run, moved to a folder and to ports of the test."""

    def __init__(self, folder: Path) -> None:
        text = (RECIPE / "Dockerfile").read_text().replace("\\\n", " ")
        self.compose = yaml.safe_load((RECIPE / "compose.yaml").read_text())
        self.folder, self.first_port = folder, free_port(PORTS)
        words = dict(re.findall(r"^ENV (\w+)=(\S+)$", text, re.MULTILINE))
        words |= self.compose["services"]["broker"]["environment"]
        del words["XDG_CACHE_HOME"]  # kernels are compiled already
        del words["PATH"]  # no environment of the image's own
        words["DANUBE_ADVERTISE"] = "127.0.0.1"  # there is no such name here
        self.environment = {name: self._moved(value) for name, value in words.items()}
        (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
        (health,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
        self.command = self._command(json.loads(command))
        self.health = self._command(json.loads(health))
        self.certificate = self._command(self.compose["services"]["certificate"]["command"])
        for name in ("srv", "keys"):
            (folder / name).mkdir(mode=0o700)

    def _moved(self, word: str) -> str:
        word = word.replace("/srv/danube", str(self.folder / "srv"))
        word = word.replace("/run/danube-keys", str(self.folder / "keys"))
        return re.sub(
            r"\b665[0-3]\b", lambda found: str(int(found[0]) - FIRST_PORT + self.first_port), word
        )

    def _command(self, words: list[str]) -> list[str]:
        assert words[0] == "danube-fast"
        return [sys.executable, "-m", "danube_fast.cli.main", *map(self._moved, words[1:])]

    def run(self, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """A command beside the broker, in the container's environment."""
        environment = {**os.environ, **self.environment, **variables}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )  # fmt: skip

    @contextmanager
    def broker(self) -> Iterator[dict[str, Any]]:
        """The broker of the recipe, until it has stopped in order; its ready line."""
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*self.command, "-o", "json"], env={**os.environ, **self.environment},
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            line = process.stdout.readline() if readable else b""
            assert line, (self.folder / "log").read_text()
            yield json.loads(line)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def test_no_file_of_the_recipe_opens_the_broker() -> None:
    for path in RECIPE.iterdir():
        text = path.read_text()
        assert "insecure" not in text.lower(), path
    text = (RECIPE / "Dockerfile").read_text()
    assert '"--auth", "required"' in text and "0.0.0.0:6650" in text and "0.0.0.0:6651" in text
    assert text.index("USER danube") < text.index("\nCMD")
    compose = yaml.safe_load((RECIPE / "compose.yaml").read_text())
    broker = compose["services"]["broker"]
    assert "command" not in broker and "privileged" not in broker and "user" not in broker
    assert broker["cap_drop"] == ["ALL"]
    assert [volume for volume in broker["volumes"] if "keys" in volume] == ["keys:/run/danube-keys:ro"]  # fmt: skip
    assert (ROOT / "docs/examples/container" / broker["build"]["context"]).resolve() == ROOT
    assert (ROOT / broker["build"]["dockerfile"]).samefile(RECIPE / "Dockerfile")


def test_the_recipe_runs_and_lets_registered_keys_in_only(tmp_path: Path) -> None:
    recipe = Recipe(tmp_path)
    assert recipe.run(recipe.health).returncode != 0, "nothing runs yet"
    done = recipe.run(recipe.certificate)
    assert done.returncode == 0, done.stderr
    fingerprint = done.stdout.strip()
    with recipe.broker() as ready:
        assert ready["auth"] == "required" and ready["certificate"] == fingerprint
        assert ready["admin"].startswith("https://") and ready["url"].startswith("danube://127.0.0.1")  # fmt: skip

        def is_healthy() -> bool:
            return recipe.run(recipe.health).returncode == 0

        wait_until("health", is_healthy, WAIT_SECONDS)
        assert listens_on_all(recipe.first_port) and listens_on_all(recipe.first_port + 1)
        url, server_key = ready["url"], ready["server_key"]
        with pytest.raises((PermissionDenied, Unavailable)):
            danube_fast.connect(url, timeout=3.0, transport="tcp")
        refused = urllib.request.Request(f"https://127.0.0.1:{recipe.first_port + 1}/metrics")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(refused, timeout=WAIT_SECONDS, context=client_context(fingerprint))  # fmt: skip
        with caught.value as answer:
            assert answer.code == 401
        readme = (RECIPE / "README.md").read_text().replace("\\\n", " ")
        (line,) = [line for line in readme.splitlines() if "users add ann" in line]
        own = tmp_path / "ann.key"
        new_key = [sys.executable, "-m", "danube_fast.cli.main", "security", "new-key", str(own)]
        public = recipe.run(new_key).stdout.strip()
        assert public == read_key_file(own).public
        words = shlex.split(line.replace('"$ANN"', shlex.quote(public)))
        command = recipe._command(words[words.index("broker") + 1 :])
        given = dict(word.split("=", 1) for word in words if word.startswith("DANUBE_"))
        given["DANUBE_SERVER_KEY"] = server_key
        given = {name: recipe._moved(value) for name, value in given.items()}
        done = recipe.run(command, DANUBE_URL=url, **given)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "srv/data/bootstrap-admin.key").exists()
        options: dict[str, Any] = {"server_key": server_key, "transport": "tcp", "timeout": 20.0}
        with danube_fast.connect(url, key_file=own, **options) as client:
            assert client.producer("/default/t").publish(b"in").offset == 0
        log = (tmp_path / "log").read_text()
        assert "Traceback" not in log and read_key_file(own).secret not in log


def listens_on_all(port: int) -> bool:
    """Whether the port is bound on all addresses, as the kernel says."""
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1] == f"00000000:{port:04X}" and row.split()[3] == "0A" for row in rows)


def test_the_health_check_fails_when_it_should(tmp_path: Path) -> None:
    """A stopped worker, another certificate, no broker."""
    recipe = Recipe(tmp_path)
    assert recipe.run(recipe.certificate).returncode == 0
    with recipe.broker() as ready:
        wait_until("health", lambda: recipe.run(recipe.health).returncode == 0, WAIT_SECONDS)
        kept = tmp_path / "keys/tls.pem"
        trusted = tmp_path / "other.pem"
        trusted.write_bytes(kept.read_bytes().replace(b"M", b"N", 1))
        words = [str(trusted) if word == str(kept) else word for word in recipe.health]
        assert recipe.run(words).returncode != 0
        os.kill(ready["worker_pids"][0], signal.SIGSTOP)
        began = time.monotonic()
        assert recipe.run([*recipe.health, "--live"]).returncode == 0
        os.kill(ready["coordinator_pid"], signal.SIGSTOP)
        assert recipe.run([*recipe.health, "--timeout", "1"]).returncode != 0
        os.kill(ready["coordinator_pid"], signal.SIGCONT)
        os.kill(ready["worker_pids"][0], signal.SIGCONT)
        assert time.monotonic() - began < WAIT_SECONDS
        wait_until("health", lambda: recipe.run(recipe.health).returncode == 0, WAIT_SECONDS)
    assert recipe.run(recipe.health).returncode != 0
