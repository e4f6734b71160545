"""A broker that asks no one who they are says so in words, wherever a person looks at it."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path

from danube_fast.types import AUTH_NONE_TEXT
from tests.cli.test_security_recipes import Shell, serving
from tests.crash.rig import free_port


def test_all_are_told_that_no_one_is_asked(tmp_path: Path) -> None:
    assert "every user of its host, may do everything" in AUTH_NONE_TEXT
    address = f"127.0.0.1:{(port := free_port(4))}"
    shell = Shell(tmp_path, DANUBE_URL=f"danube://{address}")
    line = f"danube-fast serve --workers 1 --data-dir {tmp_path / 'data'} --listen {address}"
    with serving(shell, line) as ready:
        assert f"  auth     {AUTH_NONE_TEXT}\n" in ready
        words = [row.split(maxsplit=1) for row in shell.run("danube-fast status").splitlines()]
        assert ["auth", AUTH_NONE_TEXT] in words, words
        assert json.loads(shell.run("danube-fast status -o json"))["auth"] == "none"
        with shell.started(
            f"danube-fast doctor --url danube://{address} -o json", stderr=subprocess.DEVNULL
        ) as doctor:  # fails on what else it finds
            findings = {row["check"]: row["seen"] for row in json.loads(doctor.communicate(timeout=120)[0])}  # fmt: skip
        assert findings["auth"] == AUTH_NONE_TEXT
        assert "every program of this host may do everything" in findings["tcp"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=60) as answer:
            assert b"\ndanube_fast_auth_required 0.0\n" in answer.read()
    for beyond in ("--listen 0.0.0.0:0", f"--listen {address} --admin 0.0.0.0:0"):
        with shell.started(f"{line} {beyond}", stderr=subprocess.PIPE) as refused:
            _, errors = refused.communicate(timeout=120)
        assert refused.returncode and "--auth required" in errors, errors
