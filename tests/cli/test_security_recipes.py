"""The recipes of docs/security.md, as they stand there, against a broker."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from danube_fast.children import module_command
from danube_fast.security.curve import read_key_file
from tests.delivery.test_security import SecuredServer
from tests.delivery.test_server_key import all_have
from tests.workers.broker import ROOT

PAGE = ROOT / "docs/security.md"
FOLDER = "/srv/danube"


def lines(heading: str) -> list[str]:
    """What a person types in the first console block of a section."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    return [line[2:] for line in found[0].splitlines() if line.startswith("$ ")]


class Shell:
    """Runs lines, and keeps what they export."""

    def __init__(self, folder: Path, **variables: str) -> None:
        outside = {
            name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")
        }
        self._folder = folder
        self.environment = {
            **outside, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder / "config"), **variables,
        }  # fmt: skip

    def run(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.environment[name] = value
            return ""
        assert words[0] == "danube-fast", line
        done = subprocess.run(
            module_command("danube_fast.cli.main", *words[1:]), env=self.environment, cwd=self._folder,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout


def test_the_first_steps(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        shell = Shell(tmp_path, DANUBE_URL=server.url)
        for line in lines("First steps"):
            line = line.replace(FOLDER, str(server.data_dir))
            shell.run(re.sub(r"'LmZ[^']*'", f"'{server.server_key}'", line))
        assert "orders may produce" in shell.run(
            "danube-fast security check orders produce /shop/orders"
        )


def test_the_rotation(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        server.make_ann()
        old = server.server_key
        shell = Shell(
            tmp_path, DANUBE_URL=server.url, DANUBE_SERVER_KEY=old,
            DANUBE_KEY_FILE=str(tmp_path / "ann.key"),
        )  # fmt: skip
        prepare, both, activate, retire, one = lines("Rotation of the server key")
        printed = shell.run(prepare)
        new = printed.split()[0]
        assert old in printed and new != old
        for line in (both, activate, retire, one):
            shell.run(line.replace("NEW", new).replace("OLD", old))
        assert all_have(server, new)
        assert "coordinator: listens with the key in use" in shell.run(
            "danube-fast security server-key show"
        )
        assert read_key_file(server.data_dir / "server.key").public == new


@pytest.mark.parametrize("which", [0, 1], ids=["lost", "leaked"])
def test_the_recovery(tmp_path: Path, which: int) -> None:
    server = SecuredServer(tmp_path / "data", tmp_path)
    with server:
        server.make_ann()
        before = server.server_key
        server.stop()
        line = lines("Recovery")[which]
        assert FOLDER in line
        printed = Shell(tmp_path).run(line.replace(FOLDER, str(server.data_dir)))
        server.start()
        assert server.server_key in printed and (server.server_key != before) == bool(which)
        (tmp_path / "ann.key").unlink()
        shell = Shell(
            tmp_path, DANUBE_URL=server.url, DANUBE_SERVER_KEY=server.server_key,
            DANUBE_KEY_FILE=str(server.data_dir / "bootstrap-admin.key"),
        )  # fmt: skip
        shell.run("danube-fast security new-key ann.key")
        shell.run("danube-fast security keys add ann --public-key-of ann.key")
        shell.run("export DANUBE_KEY_FILE=ann.key")
        assert "ann" in shell.run("danube-fast security users list")
