"""`backup` and `restore` as commands: what they say, above all which secrets a file holds, and how they end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli import interrupts
from danube_fast.security.curve import read_key_file
from danube_fast.workers.supervisor import archive
from danube_fast.workers.supervisor.contents import SECRET_FILES
from danube_fast.workers.supervisor.datadir import DataDirectory
from tests.cli.conftest import Run
from tests.workers.backup_rig import IDENTITY, make_directory, tree

SECRETS = "bootstrap-admin.key, server.key, server.key.next"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_directory(tmp_path / "data")
    return tmp_path / "data"


def test_it_says_which_secrets_the_file_holds(data: Path, tmp_path: Path, run: Run) -> None:
    made = run("backup", "--data-dir", str(data), str(tmp_path / "saved"))
    assert made.code == 0 and made.err == ""
    assert f"secrets    {SECRETS}: who reads the file has them\n" in made.out
    assert f"broker     {IDENTITY.hex()} at " in made.out
    for outside in ("object store", "tls_key", "issuers.toml", "tls.key: not the broker's"):
        assert outside in made.out
    restored = run("restore", str(tmp_path / "saved"), "--data-dir", str(tmp_path / "new"))
    assert restored.code == 0 and restored.err == "" and SECRETS in restored.out
    assert restored.out.startswith(f"restored {tmp_path / 'new'}\n")
    assert tree(tmp_path / "new") == tree(data)
    for outcome in (made, restored):
        assert read_key_file(data / "server.key").secret not in outcome.out


def test_doctor_and_backup_have_one_list(data: Path, tmp_path: Path, run: Run) -> None:
    (data / "server.key.previous").write_bytes((data / "server.key.next").read_bytes())
    (data / "server.key.previous").chmod(0o600)
    found = run("doctor", "--data-dir", str(data), "-o", "json").json()
    named = {each["check"] for each in found if each["seen"].startswith("secret: ")}
    made = run("backup", "--data-dir", str(data), str(tmp_path / "saved"), "-o", "json").json()
    assert named == set(made["secrets"]) == set(SECRET_FILES)


def test_without_secrets_it_says_what_that_means(data: Path, tmp_path: Path, run: Run) -> None:
    words = ("backup", "--without-secrets", "--data-dir", str(data), str(tmp_path / "saved"))
    made = run(*words)
    assert made.code == 0 and f"secrets    none; left out: {SECRETS}\n" in made.out
    assert f"recover --data-dir {data} --new-server-key --yes" in made.out
    assert run(*words).code == 4
    assert run(*words, "--yes", "-o", "json").json()["secrets_left_out"] == SECRETS.split(", ")


def test_what_is_advised_names_no_directory_that_no_one_named(
    data: Path, tmp_path: Path, run: Run
) -> None:
    run("backup", "--without-secrets", "--data-dir", str(data), str(tmp_path / "saved"))
    words = ("restore", "--list", str(tmp_path / "saved"))
    assert "recover --data-dir DIR --new-server-key" in run(*words).out
    assert "recover --data-dir new --new-server-key" in run(*words, "--data-dir", "new").out


def test_help_says_what_yes_does(run: Run) -> None:
    text = " ".join(run("backup", "--help").out.split())
    assert "Replace the file if it is there." in text and "would go" not in text


def test_a_broker_without_secrets_has_none(tmp_path: Path, run: Run) -> None:
    DataDirectory.open(str(tmp_path / "data")).close()
    made = run("backup", "--data-dir", str(tmp_path / "data"), str(tmp_path / "saved"))
    assert "secrets    none\n" in made.out and "broker     none yet at " in made.out
    assert "server.key" not in made.out


def test_json_says_the_same(data: Path, tmp_path: Path, run: Run) -> None:
    made = run("backup", "--data-dir", str(data), str(tmp_path / "saved"), "-o", "json").json()
    listed = run("restore", str(tmp_path / "saved"), "--list", "-o", "json").json()
    restored = run(
        "restore", str(tmp_path / "saved"), "--data-dir", str(tmp_path / "new"), "-o", "json"
    ).json()
    files = listed.pop("files")
    assert len(files) == made["file_count"] and {"path", "bytes", "mode", "sha256"} == set(files[0])
    assert made.pop("left_out") == ["tls.key"]
    assert made.pop("archive_bytes") == (tmp_path / "saved").stat().st_size
    assert restored.pop("data_dir") == str(tmp_path / "new")
    assert made.pop("file") == listed.pop("file") == str(tmp_path / "saved")
    assert made == listed == restored


def test_a_list_checks_every_byte_and_writes_nothing(data: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "saved"
    run("backup", "--data-dir", str(data), str(file))
    listed = run("restore", str(file), "--list")
    assert listed.code == 0 and "  logs/0000/00000000000000000000.seg\n" in listed.out
    content = bytearray(file.read_bytes())
    content[-300] ^= 1
    file.write_bytes(content)
    outcome = run("restore", str(file), "--list")
    assert outcome.code == 1 and "is damaged" in outcome.sentence() and outcome.out == ""
    assert sorted(os.listdir(tmp_path)) == ["data", "saved"]


def test_the_directory_may_come_from_a_file_of_settings(
    data: Path, tmp_path: Path, run: Run
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'data_dir = "{data}"\n')
    made = run("backup", "--config", str(settings), str(tmp_path / "saved"))
    assert made.code == 0, made.err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("backup", "saved"), 3, "is no data directory"),
        (("backup", "--data-dir", "data"), 2, "missing: the file"),
        (("backup", "--data-dir", "data", "missing/saved"), 4, "make its folder writable"),
        (("backup", "--data-dir", "data", "data/saved"), 2, "would be lost with it"),
        (("restore", "missing", "--data-dir", "new"), 3, "there is no file missing"),
        (("restore", "data", "--data-dir", "new"), 4, "cannot read data"),
        (("restore", "data/FORMAT", "--data-dir", "new"), 2, "no backup of danube-fast"),
        (("restore", "data/FORMAT", "--data-dir", "data"), 4, "overwrites nothing"),
    ],
)
def test_a_mistake_is_one_sentence(
    data: Path, run: Run, monkeypatch: pytest.MonkeyPatch, words: Any, code: int, text: str
) -> None:
    monkeypatch.chdir(data.parent)
    outcome = run(*words)
    assert outcome.code == code and text in outcome.sentence(), outcome
    assert os.listdir(data.parent) == ["data"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", ["backup", "restore"])
def test_a_signal_leaves_nothing(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    if step == "restore":
        run("backup", "--data-dir", str(data), str(tmp_path / "saved"))
    before = sorted(os.listdir(tmp_path))
    entered: list[object] = []
    monkeypatch.setattr(interrupts, "_received", [])

    def interrupted(*_: object) -> None:
        entered.append(sorted(os.listdir(tmp_path)))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(archive.ArchiveReader, "read", interrupted)
    monkeypatch.setattr(archive.ArchiveWriter, "finish", interrupted)
    words = {
        "backup": ("backup", "--data-dir", str(data), str(tmp_path / "saved")),
        "restore": ("restore", str(tmp_path / "saved"), "--data-dir", str(tmp_path / "new")),
    }[step]
    outcome = run(*words)
    assert outcome.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], outcome
    assert entered and entered[0] != before, "it was interrupted too early"
    assert sorted(os.listdir(tmp_path)) == before
