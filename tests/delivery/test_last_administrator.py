"""The last administrator of a broker: kept unless one insists, and the way back in behind a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import danube_fast
from danube_fast.errors import FailedPrecondition
from tests.delivery.test_security import SecuredServer, refused


def _said(server: SecuredServer, *words: str, code: int = 0) -> str:
    """The text of `danube-fast security`, which ends with that exit code."""
    command = [sys.executable, "-m", "danube_fast.cli.main", "security", *words]
    done = subprocess.run(
        [*command, "--url", server.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_last_administrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        server.make_ann()
        monkeypatch.setenv("DANUBE_SERVER_KEY", server.server_key)
        monkeypatch.setenv("DANUBE_KEY_FILE", str(server.folder / "ann.key"))
        for words in (
            ("users", "delete", "ann", "--yes"),
            ("keys", "revoke", f"curve:{server.keys['ann']}", "--yes"),
            ("bindings", "delete", "ann", "--yes"),
            ("users", "add", "ann", "--disabled"),
        ):
            said = _said(server, *words, code=4)
            assert "no administrator with a key would be left" in said and "--force" in said
        with server.come_in("ann") as ann:
            with pytest.raises(FailedPrecondition):
                ann.admin.delete_security("principal", "ann")
            assert [row["binding"] for row in ann.admin.list_security("binding")] == ["ann", "bootstrap-admin"]  # fmt: skip
        said = _said(server, "users", "delete", "ann", "--yes", "--force")
        assert "deleted user ann" in said and "bootstrap-admin.key" in said
        refused(lambda: server.come_in("ann", timeout=5.0))
        first = server.data_dir / "bootstrap-admin.key"
        assert not first.exists()
        server.stop()
        server.start()
        with danube_fast.connect(
            server.url, server_key=server.server_key, key_file=first, transport="zmq"
        ) as client:
            client.admin.set_principal("ben")
