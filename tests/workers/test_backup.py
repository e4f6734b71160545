"""Backups of a data directory: what they hold, what they refuse, and that a restore is all or nothing."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from danube_fast.history.epochs import claim_epoch
from danube_fast.history.holds import Hold
from danube_fast.history.layout import object_key
from danube_fast.history.manifest import PRUNED_NAME, manifest_key, manifest_prefix
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.superseding import SUPERSEDED_PREFIX
from danube_fast.security.curve import read_key_file
from danube_fast.version import VERSION
from danube_fast.wal.lock import LogLock
from danube_fast.workers.supervisor import backup as module
from danube_fast.workers.supervisor import restore as restoring
from danube_fast.workers.supervisor.backup import Backup, back_up
from danube_fast.workers.supervisor.contents import SECRET_FILES, Kind, kind_of
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.restore import check_backup, restore
from tests.workers.backup_rig import (
    IDENTITY,
    LONG_NAME,
    make_directory,
    manifest_in,
    tree,
    unpacked,
)

SECRETS = ["bootstrap-admin.key", "server.key", "server.key.next"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_directory(tmp_path / "data")
    return tmp_path / "data"


def save(data: Path, **options: Any) -> Backup:
    return back_up(data, data.parent / "saved", SystemClock(), **options)


def test_what_is_restored_is_what_was_there(data: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = save(data, on_progress=lambda *amounts: seen.append(amounts))
    restore(made.path, tmp_path / "new")
    assert tree(tmp_path / "new") == tree(data)
    assert LONG_NAME in tree(data)
    assert sorted(os.listdir(tmp_path)) == ["data", "new", "saved"]
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert made.archive_bytes == made.path.stat().st_size < 100_000, "zeros take room"
    assert made.unknown == ["tls.key"]
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_the_manifest_says_what_there_is(data: Path) -> None:
    made = save(data)
    manifest = manifest_in(made.path.read_bytes())
    assert manifest["broker"] == IDENTITY.hex() and manifest["danube_fast"] == VERSION
    assert manifest["secrets"] == SECRETS and manifest["secrets_left_out"] == []
    named = {each["path"]: (each["mode"], each["bytes"]) for each in manifest["files"]}
    assert named["audit/audit.jsonl"] == ("0640", 90)
    assert set(named) == {name for name, (_, content) in tree(data).items() if content is not None}
    assert check_backup(made.path) == made.manifest
    assert b"half a secret" not in unpacked(made.path.read_bytes())


def test_the_tools_of_the_system_read_it(data: Path, tmp_path: Path) -> None:
    made = save(data)
    plain = tmp_path / "plain.tar"
    plain.write_bytes(unpacked(made.path.read_bytes()))
    (tmp_path / "by-tar").mkdir()
    tar = shutil.which("tar")
    assert tar
    subprocess.run([tar, "xf", str(plain), "-C", str(tmp_path / "by-tar")], check=True, timeout=60)
    for name, (_, content) in tree(data).items():
        assert content is None or (tmp_path / "by-tar" / name).read_bytes() == content


def test_secrets_stay_behind_on_demand(data: Path, tmp_path: Path) -> None:
    made = save(data, with_secrets=False)
    manifest = manifest_in(made.path.read_bytes())
    assert manifest["secrets"] == [] and manifest["secrets_left_out"] == SECRETS
    archive = unpacked(made.path.read_bytes())
    for name in SECRETS:
        secret = read_key_file(data / name).secret.encode()
        assert secret in (data / name).read_bytes() and secret not in archive
    restore(made.path, tmp_path / "new")
    assert set(tree(data)) - set(tree(tmp_path / "new")) == set(SECRETS)
    assert set(SECRETS) < set(SECRET_FILES)


def test_a_secret_that_others_could_read_is_not_restored_so(data: Path, tmp_path: Path) -> None:
    (data / "server.key").chmod(0o644)
    restore(save(data).path, tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new/server.key").stat().st_mode) == 0o600


def test_a_file_is_replaced_on_demand_only(data: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("older")
    with pytest.raises(AlreadyExists, match="--yes"):
        save(data)
    assert (tmp_path / "saved").read_text() == "older"
    made = save(data, replace=True)
    assert check_backup(made.path).broker == IDENTITY.hex()
    assert sorted(os.listdir(tmp_path)) == ["data", "saved"]


def test_one_that_appears_meanwhile_is_not_replaced(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module._write

    def slow(*arguments: Any) -> None:
        write(*arguments)
        (tmp_path / "saved").write_text("of another one")

    monkeypatch.setattr(module, "_write", slow)
    with pytest.raises(AlreadyExists):
        save(data)
    assert (tmp_path / "saved").read_text() == "of another one"
    assert sorted(os.listdir(tmp_path)) == ["data", "saved"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("older", [False, True])
def test_a_folder_that_cannot_be_synced_leaves_no_file_that_may_vanish(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool, links: bool
) -> None:
    """With an older one in its place, which is gone by then, the new one stays."""
    (tmp_path / "out").mkdir()
    path = tmp_path / "out/saved"
    if older:
        path.write_text("older")

    def fail(folder: Path) -> None:
        assert folder == path.parent and path.exists(), "it has its name by now"
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(module, "sync_directory", fail)
        if not links:
            patch.setattr(os, "link", no_link)
        with pytest.raises(FailedPrecondition, match="Input/output error") as caught:
            back_up(data, path, SystemClock(), replace=older)
    assert os.listdir(path.parent) == ["saved"] * older
    if older:
        assert "is written and in its place" in str(caught.value)
        check_backup(path)
    back_up(data, path, SystemClock(), replace=older)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_disk_without_hard_links_holds_backups_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    taken: list[str] = []

    def link(source: Path, path: Path) -> None:
        if taken:
            path.write_text(taken[0])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    made = save(data)
    assert check_backup(made.path) == made.manifest
    made.path.unlink()
    taken.append("of another one")
    with pytest.raises(AlreadyExists):
        save(data)
    assert made.path.read_text() == "of another one"
    assert sorted(os.listdir(tmp_path)) == ["data", "saved"]


def test_a_disk_without_modes_holds_backups_that_are_private(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [0o600, 0o640]

    def fchmod(fd: int, mode: int) -> None:
        os.chmod(fd, modes.pop(0))
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", fchmod)
    save(data).path.unlink()
    with pytest.raises(FailedPrecondition, match="not permitted"):
        save(data)
    assert os.listdir(tmp_path) == ["data"]


def test_a_source_that_cannot_be_read_is_named_and_not_the_target(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module._write

    class Failing(io.BytesIO):
        def read(self, count: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def meddled(*arguments: Any) -> None:
        monkeypatch.setattr(module, "_open", lambda *_: Failing())
        write(*arguments)

    monkeypatch.setattr(module, "_write", meddled)
    with pytest.raises(FailedPrecondition, match=f"cannot read {data}/.*: Input/output error"):
        save(data)
    assert os.listdir(data.parent) == ["data"]


@pytest.mark.parametrize("name", ["data/saved", "data/history/saved", "data", "."])
def test_a_backup_goes_elsewhere(data: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument):
        back_up(data, tmp_path / name, SystemClock(), replace=True)


def test_a_device_is_never_replaced(data: Path) -> None:
    with pytest.raises(InvalidArgument):
        back_up(data, Path("/dev/null"), SystemClock(), replace=True)
    assert Path("/dev/null").is_char_device()


def test_a_running_broker_is_left_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = DataDirectory.open(str(data))
    try:
        with pytest.raises(FailedPrecondition, match=f"in use by the server with pid {os.getpid()}; stop that one"):  # fmt: skip
            save(data)
    finally:
        holder.close()
    monkeypatch.setattr(module, "_LOCK_MS", 10)
    for folder in ("logs/0000", "metadata"):
        lock = LogLock(data / folder, 0)
        try:
            with pytest.raises(FailedPrecondition, match="in use by process"):
                save(data)
        finally:
            lock.release()
    assert not (data.parent / "saved").exists()
    save(data)


def test_nothing_is_made_where_no_broker_was(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="--data-dir"):
        save(tmp_path / "typo")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["metadata/data.mdb", "logs/0000/00000000000000000000.seg"])
@pytest.mark.parametrize("change", ["content", "longer", "shorter", "gone"])
def test_a_file_that_changes_meanwhile_makes_no_backup(
    data: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    write, path = module._write, data / name

    def meddled(*arguments: Any) -> None:
        content = path.read_bytes()
        if change == "gone":
            path.unlink()
        else:
            path.write_bytes({"content": b"x" + content[1:], "longer": b"x" + content, "shorter": content[:-1]}[change])  # fmt: skip
        write(*arguments)

    monkeypatch.setattr(module, "_write", meddled)
    with pytest.raises(FailedPrecondition, match=path.name):
        save(data)
    assert os.listdir(data.parent) == ["data"]


def test_what_is_not_the_brokers_is_left_out_and_named(data: Path, tmp_path: Path) -> None:
    before = save(data, replace=True).manifest.files
    secret = tmp_path / "elsewhere"
    secret.write_text("of someone else")
    foreign = [
        ".hidden", "audit/audit.jsonl.old", "audit/loop", "audit/pipe", "history/ann.key", "history/objects/ann.key",
        "history/objects/more", "history/other", "logs/0000/00000000000000000000.seg.old", "logs/0000/more", "logs/0000/x",
        "logs/0000/x.tmp", "logs/file", "logs/other", "metadata/ann.key", "metadata/data.mdb.old", "metadata/deep",
    ]  # fmt: skip
    for name in foreign:
        path = data / name
        match path.name:
            case "pipe":
                os.mkfifo(path)
            case "loop":
                path.symlink_to(data / "audit")
            case "x":
                path.symlink_to(secret)
            case "other" | "more" | "deep":
                path.mkdir()
                (path / "00000000000000000000.seg").write_text("of someone else")
            case _:
                path.write_text("of someone else")
    for with_secrets in (True, False):
        made = save(data, replace=True, with_secrets=with_secrets)
        assert sorted(made.unknown) == sorted([*foreign, "tls.key"])
        assert b"of someone else" not in unpacked(made.path.read_bytes())
    assert save(data, replace=True).manifest.files == before


@pytest.mark.parametrize("name", ["metadata/data.mdb", "logs/0000/00000000000000000000.seg", "history/objects/00000001/000000000001", "LOGS"])  # fmt: skip
@pytest.mark.parametrize("what", ["link", "dangling link", "pipe"])
def test_a_file_of_the_broker_that_is_none_makes_no_backup(
    data: Path, tmp_path: Path, name: str, what: str
) -> None:
    path = data / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    if what == "link":
        (tmp_path / "elsewhere").write_text("of someone else")
    if what == "link" and name == "LOGS":
        assert name in {each.path for each in save(data).manifest.files}, "as the broker follows it"
        return
    with pytest.raises(FailedPrecondition, match=f"{path} has the name .* and is none"):
        save(data)
    assert not (tmp_path / "saved").exists()


def test_names_of_history_are_the_brokers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "history", SystemClock())
    upload = store.begin(object_key(1, 3))
    claim_epoch(store, 2, b"token")
    hold = Hold(id="ab" * 8, expires_ms=7, keys=[])
    keys = [object_key(1, 2), manifest_key(7, 9), f"{manifest_prefix(7)}{PRUNED_NAME}", hold.key]
    keys.append(f"{SUPERSEDED_PREFIX}{7:010d}/{9:012d}/{PRUNED_NAME}")
    for key in keys:
        store.create(key, b"x")
    found = [path.relative_to(tmp_path) for path in tmp_path.rglob("*")]
    assert len(found) > len(keys) and any(upload.upload_id in str(path) for path in found)
    for path in found:
        is_folder = (tmp_path / path).is_dir()
        kind = kind_of(str(path), is_folder=is_folder)
        assert kind is (Kind.FOLDER if is_folder else Kind.FILE), path


def test_a_link_that_takes_a_files_place_meanwhile_is_not_followed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = data / "logs/0000/losses.jsonl", module._write

    def meddled(*arguments: Any) -> None:
        path.rename(data.parent / "elsewhere")
        path.symlink_to(data.parent / "elsewhere")
        write(*arguments)

    monkeypatch.setattr(module, "_write", meddled)
    with pytest.raises(FailedPrecondition, match=path.name):
        save(data)
    assert sorted(os.listdir(data.parent)) == ["data", "elsewhere"]


def test_a_folder_on_another_disk_is_saved_with_the_rest(data: Path, tmp_path: Path) -> None:
    (data / "history").rename(tmp_path / "elsewhere")
    (data / "history").symlink_to(tmp_path / "elsewhere")
    restore(save(data).path, tmp_path / "new")
    assert (tmp_path / "new" / LONG_NAME).read_bytes() == (data / LONG_NAME).read_bytes()
    assert not (tmp_path / "new/history").is_symlink()


# ---------------------------------------------------------------- restore


def test_a_restore_overwrites_nothing(data: Path, tmp_path: Path) -> None:
    made = save(data)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("new", "file", "data"):
        with pytest.raises(AlreadyExists, match="move it away"):
            restore(made.path, tmp_path / name)
    with pytest.raises(NotFound, match="make it first"):
        restore(made.path, tmp_path / "missing/new")
    with pytest.raises(InvalidArgument, match="mount"):
        restore(made.path, Path("/dev/shm"))
    assert sorted(os.listdir(tmp_path)) == ["data", "file", "new", "saved"]
    (tmp_path / "new/mine").unlink()
    restore(made.path, tmp_path / "new")
    assert tree(tmp_path / "new") == tree(data)


def test_an_empty_directory_of_another_user_is_not_taken_from_that_user(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = save(data)
    (tmp_path / "new").mkdir()
    before = (tmp_path / "new").stat()
    monkeypatch.setattr(os, "geteuid", lambda: before.st_uid + 1)
    with pytest.raises(FailedPrecondition, match=f"id {before.st_uid}, .*run this as that user"):
        restore(made.path, tmp_path / "new")
    assert (tmp_path / "new").stat().st_ino == before.st_ino
    assert sorted(os.listdir(tmp_path)) == ["data", "new", "saved"]
    restore(made.path, tmp_path / "newer")


def test_a_directory_whose_name_cannot_be_synced_is_said_to_be_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sync = save(data), restoring.sync_directory

    def failing(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    monkeypatch.setattr(restoring, "sync_directory", failing)
    with pytest.raises(FailedPrecondition, match=r"in its place, but .*Input/output error.*restore again"):  # fmt: skip
        restore(made.path, tmp_path / "new")
    assert tree(tmp_path / "new") == tree(data)


def test_a_directory_that_fills_meanwhile_stays(data: Path, tmp_path: Path) -> None:
    made = save(data)

    def meddle(done: int, total: int) -> None:
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new/mine").write_text("x")

    with pytest.raises(AlreadyExists):
        restore(made.path, tmp_path / "new", meddle)
    assert sorted(os.listdir(tmp_path)) == ["data", "new", "saved"]
    assert os.listdir(tmp_path / "new") == ["mine"]


def test_what_is_no_backup_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        restore(tmp_path / "typo", tmp_path / "new")
    with pytest.raises(FailedPrecondition, match="cannot read"):
        restore(tmp_path, tmp_path / "new")
    for content in (b"", b"x", b"text, and no backup" * 99, b"\x1f\x8b" + bytes(600)):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(InvalidArgument, match="no backup"):
            restore(tmp_path / "file", tmp_path / "new")
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    with pytest.raises(InvalidArgument, match="no backup"):
        restore(tmp_path / "other.tar", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["file", "other.tar"]


def test_a_broker_without_files_yet_is_saved(tmp_path: Path) -> None:
    DataDirectory.open(str(tmp_path / "data")).close()
    made = save(tmp_path / "data")
    assert made.manifest.broker == "" and made.manifest.secrets == []
    restore(made.path, tmp_path / "new")
    assert tree(tmp_path / "new") == tree(tmp_path / "data")


def test_a_restored_directory_can_be_saved_again(data: Path, tmp_path: Path) -> None:
    first = save(data)
    restore(first.path, tmp_path / "new")
    second = back_up(tmp_path / "new", tmp_path / "again", SystemClock())
    assert second.manifest.files == first.manifest.files


def test_a_damaged_file_is_named(data: Path, tmp_path: Path) -> None:
    made = save(data)
    made.path.write_bytes(made.path.read_bytes()[:-5000])
    with pytest.raises(DataLoss, match=f"{made.path} is damaged.*another backup"):
        check_backup(made.path)
