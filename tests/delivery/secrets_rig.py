"""A broker with sign-on and components of other packages, as `danube-fast serve` starts it, its settings in a file and
in the environment; and a search for secrets in all that it shows."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danube_fast.children import module_command
from tests.delivery.sign_on_rig import AUDIENCE, ISSUER, SignOnServer, issuer_toml
from tests.security.rules import install, install_logins, write_rules
from tests.workers.broker import ROOT, Broker

__all__ = ["ServedServer", "forms_of", "found_in", "lines_of", "processes"]

LINE_MIN = 20
"""Shorter lines of a file of a key are words such as its head, or may be anywhere by chance."""


class _Served(Broker):
    """`danube-fast serve` in a child process."""

    def __init__(self, data_dir: Path, config: Path, environment: Mapping[str, str]) -> None:
        self.errors = (data_dir.parent / f"{data_dir.name}-errors").open("w+b")
        self.process = subprocess.Popen(
            module_command("danube_fast.cli.main", "serve", "--config", str(config), "-o", "json"),
            stdout=subprocess.PIPE, stderr=self.errors, env={**environment}, cwd=ROOT,
        )  # fmt: skip
        self.ready: dict[str, Any] = {}


class ServedServer(SignOnServer):
    """A secured broker with all that has secrets."""

    def __init__(self, folder: Path) -> None:
        packages = folder / "packages"
        install(packages)
        install_logins(packages)
        self.shared_secret = secrets.token_hex(32)
        (folder / "corp.secret").write_text(self.shared_secret)
        (folder / "corp.secret").chmod(0o600)
        self.texts = [str(folder / f"asked-{secrets.token_hex(8)}") for _ in range(2)]
        """Of the authenticator and of the authorizer."""
        self.config = folder / "broker.toml"
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")},
            "PYTHONPATH": f"{ROOT}:{packages}", "XDG_CONFIG_HOME": str(folder / "config"),
            "DANUBE_AUTHENTICATOR": f"logins:{self.texts[0]}",
        }  # fmt: skip
        write_rules(Path(self.texts[1]), "")
        issuers = issuer_toml(algorithms=["HS256"], secret_file=str(folder / "corp.secret"))
        super().__init__(
            folder / "data", folder, issuers, workers=1, authorizer=f"rules:{self.texts[1]}",
        )  # fmt: skip
        self.claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "pia"}

    def _broker(self) -> Broker:
        settings = {
            "data_dir": str(self.data_dir), "workers": self.workers, "auth": "required",
            "listen": f"127.0.0.1:{self.port}", **self.changes,
        }  # fmt: skip
        self.config.write_text(
            "".join(f"{name} = {json.dumps(each)}\n" for name, each in settings.items())
        )
        self.config.chmod(0o600)
        return _Served(self.data_dir, self.config, self.environment)


def processes(pid: int) -> list[int]:
    """The supervisor and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def lines_of(path: Path) -> list[str]:
    """The lines of a PEM file that are of its key."""
    return [line for line in path.read_text().splitlines() if len(line) >= LINE_MIN and "-" not in line]  # fmt: skip


def forms_of(secret: str) -> tuple[bytes, ...]:
    """A secret as it is, and as headers and files may write it."""
    plain = secret.encode()
    return plain, base64.b64encode(plain), base64.urlsafe_b64encode(plain).rstrip(b"=")


def found_in(shown: Mapping[str, bytes], secrets_: Mapping[str, tuple[bytes, ...]]) -> list[str]:
    """Which secrets are where."""
    return [
        f"{name} in {place}"
        for place, content in shown.items()
        for name, forms in secrets_.items()
        if any(form in content for form in forms)
    ]
