"""Recovery of a broker whose keys are lost: what is made offline, and that nothing else comes of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import danube_fast
from danube_fast.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from danube_fast.security.curve import read_key_file
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.recovery import recover
from tests.cli.conftest import Run
from tests.delivery.test_security import SecuredServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    DataDirectory.open(str(tmp_path / "data")).close()
    return tmp_path / "data"


def test_a_running_broker_is_named_and_left_alone(folder: Path) -> None:
    holder = DataDirectory.open(str(folder))
    try:
        with pytest.raises(FailedPrecondition, match=f"pid {os.getpid()}"):
            recover(folder, new_server_key=True)
    finally:
        holder.close()
    assert not (folder / "server.key").exists()


def test_nothing_is_made_where_no_broker_was(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="--data-dir"):
        recover(tmp_path / "typo", new_server_key=True)
    assert not (tmp_path / "typo").exists()


def test_each_recovery_makes_another_key(folder: Path) -> None:
    first = recover(folder, new_server_key=False)
    one = read_key_file(first.admin_key)
    assert stat.S_IMODE(first.admin_key.stat().st_mode) == 0o600
    second = recover(folder, new_server_key=False)
    assert read_key_file(second.admin_key).public != one.public
    assert second.server_keys == first.server_keys
    assert (folder / "recover-admin").read_text().strip() == read_key_file(first.admin_key).public


def test_a_damaged_server_key_is_replaced_on_demand_only(folder: Path) -> None:
    before = recover(folder, new_server_key=False).server_keys
    (folder / "server.key").write_text("what?")
    with pytest.raises(InvalidArgument):
        recover(folder, new_server_key=False)
    (folder / "server.key").unlink()
    with pytest.raises(FailedPrecondition, match="--new-server-key"):
        recover(folder, new_server_key=False)
    after = recover(folder, new_server_key=True).server_keys
    assert len(after) == 1 and after != before


def test_the_command_tells_no_secret(folder: Path, run: Run) -> None:
    assert run("security", "recover", "--data-dir", str(folder), "--new-server-key").code == 2
    outcome = run("security", "recover", "--data-dir", str(folder), "--new-server-key", "--yes", "-o", "json")  # fmt: skip
    assert outcome.code == 0, outcome.err
    admin, server = (read_key_file(folder / name) for name in ("bootstrap-admin.key", "server.key"))
    found = outcome.json()
    assert found == {
        "admin_key": str(folder / "bootstrap-admin.key"),
        "server_keys": [server.public],
    }
    text = run("security", "recover", "--data-dir", str(folder))
    for secret in (admin.secret, server.secret):
        assert secret not in outcome.out + outcome.err + text.out + text.err
    assert str(folder / "bootstrap-admin.key") in text.out


def come_in(server: SecuredServer, key_file: Path) -> danube_fast.Client:
    return danube_fast.connect(
        server.url, server_key=server.server_key, key_file=key_file, transport="tcp", timeout=20.0
    )


def test_an_administrator_without_a_key_comes_in_again(tmp_path: Path) -> None:
    secured = SecuredServer(tmp_path / "data", tmp_path)
    first = secured.data_dir / "bootstrap-admin.key"
    with secured:
        secured.make_ann()
        with pytest.raises(FailedPrecondition, match="in use by the server with pid"):
            recover(secured.data_dir, new_server_key=False)
        secured.stop()
        old = recover(secured.data_dir, new_server_key=True)
        lost = tmp_path / "lost.key"
        first.rename(lost)  # the next one counts
        made = recover(secured.data_dir, new_server_key=False)
        assert made.server_keys == old.server_keys
        secured.start()
        assert secured.server_key == made.server_keys[0]
        assert not (secured.data_dir / "recover-admin").exists()
        with pytest.raises(PermissionDenied):
            come_in(secured, lost)
        with come_in(secured, first) as client:
            kept = [row["name"] for row in client.admin.list_security("principal")]
            assert kept == ["ann", "bootstrap-admin"], "records are lost"
            public = secured.new_key("new")
            client.admin.set_credential(f"curve:{public}", "ann")
        assert not first.exists()
        with pytest.raises(FailedPrecondition, match="no key file"):
            come_in(secured, first)
        with come_in(secured, tmp_path / "new.key") as ann:
            assert ann.admin.cluster_status()["auth"] == "required"
        secured.stop()
        secured.start()
        assert not first.exists(), "the recovery counts twice"


def test_a_copy_of_an_old_first_key_lets_no_one_in(tmp_path: Path) -> None:
    secured = SecuredServer(tmp_path / "data", tmp_path)
    first, copy = secured.data_dir / "bootstrap-admin.key", tmp_path / "copy.key"
    with secured:
        copy.write_bytes(first.read_bytes())
        copy.chmod(0o600)
        secured.make_ann()
        secured.stop()
        first.write_bytes(copy.read_bytes())
        first.chmod(0o600)
        (secured.data_dir / "recover-admin").write_text("")
        secured.start()
        with pytest.raises(PermissionDenied):
            come_in(secured, copy)
