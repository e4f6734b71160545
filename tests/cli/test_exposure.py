"""`doctor`: who reaches a broker, which files hold secrets, and what of the records waits or ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import InvalidArgument, PermissionDenied
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.recovery import recover
from tests.cli.conftest import Outcome, Run
from tests.cli.fakes import FakeBroker

SECOND_NS = 1_000_000_000
DAY_NS = 24 * 3600 * SECOND_NS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    DataDirectory.open(str(path)).close()
    path.chmod(0o750)
    return path


def by_check(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in outcome.json()}


def looked_at(run: Run, folder: Path) -> dict[str, dict[str, Any]]:
    return by_check(run("doctor", "--data-dir", str(folder), "-o", "json"))


SECRETS = ["server.key", "server.key.next", "server.key.previous", "bootstrap-admin.key"]


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620], ids=lambda mode: f"{mode:o}")
def test_a_secret_that_others_may_read_is_a_failure(
    run: Run, folder: Path, name: str, mode: int
) -> None:
    keys = ServerKeys(folder)
    recover(folder, new_server_key=False)
    keys.prepare()
    if name == "server.key.previous":
        keys.activate()
    assert looked_at(run, folder)[name]["verdict"] == "ok"
    (folder / name).chmod(mode)
    outcome = run("doctor", "--data-dir", str(folder), "-o", "json")
    assert outcome.code == 1
    found = by_check(outcome)[name]
    assert found["verdict"] == "failure" and f"{mode:04o}" in found["seen"]
    assert found["advice"].startswith(f"chmod 600 {folder / name}")


def test_settings_that_are_not_those_of_the_data_directory(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "auth" not in looked_at(run, folder)
    ServerKeys(folder).open()
    assert "is of a secured broker" in looked_at(run, folder)["auth"]["seen"]
    monkeypatch.setenv("DANUBE_AUTH", "required")
    assert "auth" not in looked_at(run, folder)


def test_what_waits_in_a_data_directory(run: Run, folder: Path) -> None:
    found = looked_at(run, folder)
    assert "first administrator" not in found and "server key" not in found
    recover(folder, new_server_key=False)
    found = looked_at(run, folder)
    assert found["first administrator"]["verdict"] == "warning"
    assert found["server key"]["verdict"] == "ok"
    prepared = ServerKeys(folder).prepare()
    found = looked_at(run, folder)
    assert found["server key"]["verdict"] == "warning"
    assert "server-key activate" in found["server key"]["advice"]
    assert all(key in found["server key"]["seen"] for key in prepared.keys)
    ServerKeys(folder).activate()
    assert "server-key retire" in looked_at(run, folder)["server key"]["advice"]


@pytest.mark.parametrize(
    ("mode", "verdict"), [(0o750, "ok"), (0o755, "warning"), (0o770, "failure"), (0o757, "failure")],
    ids=lambda value: f"{value:o}" if isinstance(value, int) else value,
)  # fmt: skip
def test_the_folder_itself(run: Run, folder: Path, mode: int, verdict: str) -> None:
    folder.chmod(mode)
    assert looked_at(run, folder)["data directory"]["verdict"] == verdict


@pytest.mark.parametrize(
    ("changes", "tcp", "admin"),
    [
        ({}, "ok", "ok"),
        ({"LISTEN": "0.0.0.0:6650"}, "failure", "ok"),
        ({"LISTEN": "0.0.0.0:6650", "AUTH": "required"}, "ok", "ok"),
        ({"AUTH": "required", "ADMIN": "0.0.0.0:6651"}, "ok", "warning"),
        ({"ADMIN": "0.0.0.0:6651"}, "ok", "failure"),
        (
            {"AUTH": "required", "ADMIN": "0.0.0.0:6651", "TLS_CERTIFICATE": "c", "TLS_KEY": "k"},
            "ok",
            "ok",
        ),
    ],
    ids=["defaults", "open", "asked", "admin", "admin-unasked", "admin-https"],
)
def test_who_reaches_a_broker(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str], tcp: str, admin: str,
) -> None:  # fmt: skip
    for name, value in changes.items():
        monkeypatch.setenv(f"DANUBE_{name}", value)
    found = looked_at(run, folder)
    assert (found["tcp"]["verdict"], found["admin port"]["verdict"]) == (tcp, admin)
    if "AUTH" not in changes:
        assert "everything" in found["tcp"]["seen"]
        assert "every user" in found["ipc, shared memory"]["seen"]


KEY = {"stage": "prepared", "keys": ["new", "old"], "active": "old", "processes": []}


class Records(FakeBroker):
    """A secured broker: `list_security` answers by kind."""

    def __init__(self, rows: dict[str, Any]) -> None:
        super().__init__()
        self.rows = rows
        self.answers["cluster_status"] = {"auth": "required", "listen": "127.0.0.1:1"}
        self.answers["describe_server_key"] = KEY

    def connect(self, url: str, transport: str = "auto") -> Any:
        client = super().connect(url, transport)
        ask = client.admin

        class Admin:
            def list_security(self, record_kind: str) -> Any:
                found = rows[record_kind]
                if isinstance(found, Exception):
                    raise found
                return found

            def __getattr__(self, name: str) -> Any:
                return getattr(ask, name)

        rows = self.rows
        client.admin = Admin()  # type: ignore[assignment]
        return client


def examined(run: Run, monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any]) -> dict[str, Any]:
    monkeypatch.setattr("danube_fast.cli.doctor.connect", Records(rows).connect)
    return by_check(run("doctor", "--url", "danube://b:1", "-o", "json"))


def credential(name: str, principal: str, expires_ns: int = 0) -> dict[str, Any]:
    return {"credential": name, "principal": principal, "expires_ns": expires_ns}


def test_records_that_wait_end_or_are_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    rows = {
        "credential": [
            credential("curve:for-ever", "ann"),
            credential("curve:later", "ann", now + 30 * DAY_NS),
            credential("curve:soon", "ann", now + 6 * DAY_NS),
            credential("curve:over", "ann", now - DAY_NS),
            credential("curve:first", "bootstrap-admin"),
        ],
        "principal": [{"name": "ann", "disabled": False}, {"name": "bob", "disabled": True}],
        "api_key": InvalidArgument("no kind; none"),
    }
    found = examined(run, monkeypatch, rows)
    assert found["keys"]["verdict"] == "warning"
    assert "1 ended: curve:over" in found["keys"]["seen"]
    assert "1 end within 7 days: curve:soon" in found["keys"]["seen"]
    assert found["users"]["seen"] == "2, 1 disabled: bob"
    assert found["first administrator"]["verdict"] == "warning"
    assert found["server key"]["verdict"] == "warning" and "prepared" in found["server key"]["seen"]
    rows["api_key"] = [{"id": "abc", "expires_ns": now + DAY_NS}]
    assert "abc" in examined(run, monkeypatch, rows)["API keys"]["seen"]


def test_records_that_are_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = dict.fromkeys(("credential", "principal", "api_key"), PermissionDenied("no; ask"))
    found = examined(run, monkeypatch, refused)
    assert "manage_cluster" in found["rights"]["seen"] and "users" not in found
