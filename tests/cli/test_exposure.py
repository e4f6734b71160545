"""`doctor`: who reaches a broker, which files hold secrets, and what of the records waits or ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import InvalidArgument, PermissionDenied
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.recovery import recover
from tests.cli.conftest import Outcome, Run
from tests.cli.fakes import FakeBroker
from tests.delivery.sign_on_rig import IssuerKey
from tests.security.authority import Authority, write_pem

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
    assert "until its first use" in found["first administrator"]["seen"]
    key = (folder / "bootstrap-admin.key").read_bytes()
    (folder / "bootstrap-admin.key").write_text("what else")
    assert "no key waits" in looked_at(run, folder)["first administrator"]["seen"]
    (folder / "bootstrap-admin.key").write_bytes(key)
    assert found["server key"]["verdict"] == "ok"
    prepared = ServerKeys(folder).prepare()
    found = looked_at(run, folder)
    assert found["server key"]["verdict"] == "warning"
    assert "server-key activate" in found["server key"]["advice"]
    assert all(key in found["server key"]["seen"] for key in prepared.keys)
    ServerKeys(folder).activate()
    assert "server-key retire" in looked_at(run, folder)["server key"]["advice"]


def test_a_server_key_that_is_gone(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind the restore of a backup without secrets."""
    ServerKeys(folder).open()
    (folder / "server.key").unlink()
    found = looked_at(run, folder)
    assert "is of a secured broker" in found["auth"]["seen"]
    monkeypatch.setenv("DANUBE_AUTH", "required")
    gone = looked_at(run, folder)["server.key"]
    assert gone["verdict"] == "failure" and "is gone" in gone["seen"]
    assert f"recover --data-dir {folder} --new-server-key" in gone["advice"]


def test_records_that_others_may_write(run: Run, folder: Path) -> None:
    (folder / "metadata").mkdir(mode=0o750)
    assert "files" not in looked_at(run, folder)
    (folder / "metadata").chmod(0o770)
    (folder / "metadata.seal").chmod(0o666)
    found = looked_at(run, folder)["files"]
    assert (
        found["verdict"] == "failure" and "metadata (0770), metadata.seal (0666)" in found["seen"]
    )
    assert f"chmod -R go-w {folder}" in found["advice"]


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


def test_ports_that_the_system_chooses_are_not_said_to_be_0(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DANUBE_LISTEN", "[::1]:0")
    found = looked_at(run, folder)
    assert found["tcp"]["seen"].startswith("[::1], a port that the system chooses: every program")
    assert found["admin port"]["seen"].startswith("loopback, a port that the system chooses (HTTP)")


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
    assert "trusted issuers" not in found
    assert "manage_cluster" in found["rights"]["seen"] and "users" not in found


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("issuers_fault", "trusted issuers"),
        ("tls_fault", "TLS files"),
        ("sign_on_fault", "sign-on"),
        ("audit_topic_fault", "/system/audit"),
    ],
)
def test_what_a_running_broker_cannot_use(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str, check: str
) -> None:
    fake = Records(
        dict.fromkeys(("credential", "principal", "api_key"), PermissionDenied("no; ask"))
    )
    fake.answers["cluster_status"] = {"auth": "required", fault: "the file: broken"}
    monkeypatch.setattr("danube_fast.cli.doctor.connect", fake.connect)
    found = by_check(run("doctor", "--url", "danube://b:1", "-o", "json"))
    expected = "warning" if fault == "audit_topic_fault" else "failure"
    assert found[check]["verdict"] == expected and "the file: broken" in found[check]["seen"]


# ---------------------------------------------------------------- files that settings name


@pytest.fixture
def named(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What is found of a file that a setting names."""

    def look(setting: str, path: Path) -> dict[str, Any]:
        monkeypatch.setenv(f"DANUBE_{setting.upper()}", str(path))
        for other in ("TLS_CERTIFICATE", "TLS_KEY", "TLS_CLIENT_CA"):
            if setting.upper() != other:
                monkeypatch.setenv(f"DANUBE_{other}", "/nowhere")
        found: dict[str, Any] = looked_at(run, folder)[path.name]
        return found

    return look


@pytest.mark.parametrize(
    ("days", "verdict", "said"),
    [
        (31, "ok", "in 30 days"), (29, "warning", "in 28 days"), (0.5, "warning", "in 0 days"), (-1, "failure", "expired"),
    ],
)  # fmt: skip
def test_a_certificate_that_ends_soon(
    named: Callable[..., dict[str, Any]], tmp_path: Path, days: float, verdict: str, said: str
) -> None:
    made = Authority().issue(tmp_path / "tls", "CN=broker", days=days).certificate
    found = named("tls_certificate", made)
    assert found["verdict"] == verdict and said in found["seen"], found
    assert (verdict == "ok") == (found["advice"] == "")
    other = Authority().issue(tmp_path / "long", "CN=broker", days=400).certificate
    bundle = write_pem(tmp_path / "bundle.pem", other.read_bytes(), made.read_bytes())
    found = named("tls_client_ca", bundle)
    assert found["verdict"] == ("warning" if verdict == "failure" else verdict)
    assert "the first ends" in found["seen"]


@pytest.mark.parametrize(
    ("hours", "verdict"), [(24 * 31, "ok"), (24 * 29, "warning"), (-1, "failure")]
)
def test_a_list_of_revoked_certificates_that_ends_soon(
    named: Callable[..., dict[str, Any]], tmp_path: Path, hours: float, verdict: str
) -> None:
    path = write_pem(tmp_path / "clients.crl", Authority().crl(hours=hours, begin_days=400))
    assert named("tls_client_crl", path)["verdict"] == verdict


def test_short_terms_end_soon_in_their_last_third(
    named: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Lists are often made anew each week."""
    for days_left, verdict in ((3, "ok"), (2, "warning")):
        crl = Authority().crl(hours=24 * days_left, begin_days=7 - days_left)
        assert named("tls_client_crl", write_pem(tmp_path / "crl", crl))["verdict"] == verdict


@pytest.mark.parametrize(
    "setting", ["tls_certificate", "tls_client_ca", "tls_client_crl", "tls_key", "tokens"]
)
def test_files_that_cannot_be_used(
    named: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:  # fmt: skip
    monkeypatch.setenv("DANUBE_AUTH", "required")
    monkeypatch.setenv("DANUBE_SIGN_ON", "127.0.0.1:0")
    path = tmp_path / "file"
    assert "No such file" in named(setting, path)["seen"]
    path.mkdir()
    assert "it is no file" in named(setting, path)["seen"]
    path.rmdir()
    os.mkfifo(path)  # a reader that opens it plainly waits for ever
    assert "it is no file" in named(setting, path)["seen"]
    path.unlink()
    path.write_text("hello")
    path.chmod(0o646)
    found = named(setting, path)
    assert found["verdict"] == "failure" and "0646" in found["seen"] and "chmod" in found["advice"]
    path.chmod(0o600)
    found = named(setting, path)
    assert (found["verdict"] == "failure") == (setting != "tls_key"), found
    if setting != "tokens":
        monkeypatch.setattr("os.access", lambda *_: False)
        assert "this user cannot read it" in named(setting, path)["seen"]


def test_secrets_of_issuers(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AUTH": "required", "SIGN_ON": "127.0.0.1:0", "TLS_CERTIFICATE": "c", "TLS_KEY": "k"}.items():  # fmt: skip
        monkeypatch.setenv(f"DANUBE_{name}", value)
    issuers = tmp_path / "issuers.toml"
    issuer = '[[issuer]]\nname = "{0}"\nissuer = "{0}"\naudience = "d"\n'
    issuers.write_text(
        issuer.format("corp") + 'algorithms = ["HS256"]\nsecret_file = "corp.secret"\n'
        + issuer.format("other") + 'algorithms = ["RS256"]\njwks_file = "other.jwks"\n'
    )  # fmt: skip
    issuers.chmod(0o600)
    monkeypatch.setenv("DANUBE_TOKENS", str(issuers))
    secret, keys = tmp_path / "corp.secret", tmp_path / "other.jwks"
    found = looked_at(run, folder)
    assert found["issuers.toml"]["verdict"] == "ok"
    for path in (secret, keys):
        assert (
            "No such file" in found[path.name]["seen"] and str(path) in found[path.name]["advice"]
        )
        path.write_text("x" * 40)
    secret.chmod(0o640)
    keys.chmod(0o664)
    found = looked_at(run, folder)
    assert found["corp.secret"]["verdict"] == "failure"
    assert found["corp.secret"]["advice"].startswith(f"chmod 600 {secret}")
    assert found["other.jwks"]["advice"] == f"chmod go-w {keys}"
    assert "x" * 40 not in str(found)
    secret.chmod(0o600)
    keys.chmod(0o644)
    found = looked_at(run, folder)
    assert found["corp.secret"]["verdict"] == found["other.jwks"]["verdict"] == "ok"
    assert found["trusted issuers"]["verdict"] == "failure", "what is in them counts, too"
    assert f"check {keys}" in found["trusted issuers"]["seen"]
    keys.write_text(json.dumps({"keys": [IssuerKey("RS256").jwk()]}))
    assert "trusted issuers" not in looked_at(run, folder)
    if os.geteuid() == 0:
        os.chown(issuers, 12345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    found = looked_at(run, folder)
    assert found["issuers.toml"]["verdict"] == "warning", "it is of another user"
    assert "was not looked at" in found["issuers.toml"]["seen"] and "corp.secret" not in found


def test_a_ca_without_a_list(
    named: Callable[..., dict[str, Any]], run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    one, two = Authority("CN=one,O=Shop"), Authority("CN=two,O=Shop")
    crl = write_pem(tmp_path / "crl", one.crl())
    named("tls_client_crl", crl)

    def found(*cas: Authority) -> dict[str, Any] | None:
        path = write_pem(tmp_path / "cas", *[each.pem for each in cas])
        monkeypatch.setenv("DANUBE_TLS_CLIENT_CA", str(path))
        return looked_at(run, folder).get("CAs of clients")

    assert found(one) is None
    assert "lists of revoked certificates" not in looked_at(run, folder)
    found(Authority("CN=one,O=Shop"))
    unsigned = looked_at(run, folder)["lists of revoked certificates"]
    assert unsigned["verdict"] == "failure" and "is not signed by this CA" in unsigned["seen"]
    assert str(crl) in unsigned["seen"] and "a start is refused" in unsigned["advice"]
    crl.rename(tmp_path / "kept")
    os.mkfifo(crl)
    assert found(one) is None, "a FIFO without a writer was waited for"
    (tmp_path / "kept").rename(crl)
    missing = found(one, two)
    assert missing is not None and missing["verdict"] == "failure" and "1 of" in missing["seen"]
    write_pem(crl, one.crl(), two.crl())
    assert found(one, two) is None
