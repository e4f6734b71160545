"""Key pairs of a broker on disk: steps of a rotation, and a crash in front of every change of a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.security import server_keys as module
from danube_fast.security.curve import new_key_pair, read_key_file, write_key_file
from danube_fast.security.server_keys import ServerKeys, Stage, server_keys


class Killed(BaseException):
    """In place of SIGKILL."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_rotation_step_by_step(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    old = keys.open().active
    assert server_keys(tmp_path) == [old]
    prepared = keys.prepare()
    assert prepared.stage is Stage.PREPARED and prepared.active == old
    new = prepared.other
    assert server_keys(tmp_path) == [new, old]
    assert keys.prepare() == prepared, "a second one is made although the first is given out"
    activated = keys.activate()
    assert (activated.stage, activated.active, activated.other) == (Stage.ACTIVATED, new, old)
    assert server_keys(tmp_path) == [new, old]
    assert read_key_file(tmp_path / "server.key").public == new
    assert keys.activate() == activated
    assert keys.retire().keys == [new]
    assert names(tmp_path) == {"server.key", "server.pub"}
    assert old not in (tmp_path / "server.pub").read_text()
    assert ServerKeys(tmp_path).open().keys == [new]


def test_each_step_can_be_undone(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    old = keys.open().active
    new = keys.prepare().other
    keys.activate()
    reverted = keys.revert()
    assert (reverted.stage, reverted.active, reverted.other) == (Stage.PREPARED, old, new)
    assert keys.revert().keys == [old]
    assert names(tmp_path) == {"server.key", "server.pub"}


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    keys.open()
    with pytest.raises(FailedPrecondition, match="prepare"):
        keys.activate()
    for step in (keys.revert, keys.retire):
        with pytest.raises(FailedPrecondition, match="there is one key"):
            step()
    keys.prepare()
    with pytest.raises(FailedPrecondition, match="activate it first"):
        keys.retire()
    keys.activate()
    with pytest.raises(FailedPrecondition, match="retire"):
        keys.prepare()


def test_the_key_of_another_is_no_server_key(tmp_path: Path) -> None:
    """Clients would take the broker for an impostor, and the holder of that key could pose as it."""
    keys = ServerKeys(tmp_path)
    keys.open()
    known = (tmp_path / "server.pub").read_bytes()
    (tmp_path / "server.key").unlink()
    write_key_file(tmp_path / "server.key", new_key_pair())
    with pytest.raises(
        FailedPrecondition, match=r"server\.pub.*rotated since.*remove.*else put .*back"
    ):
        keys.open()
    assert (tmp_path / "server.pub").read_bytes() == known
    (tmp_path / "server.pub").unlink()
    assert keys.open().active == read_key_file(tmp_path / "server.key").public


def test_public_keys_that_were_not_written_behind_a_step_refuse_no_start(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    keys.open()
    known = (tmp_path / "server.pub").read_bytes()
    keys.prepare()
    new = keys.activate().active
    (tmp_path / "server.pub").write_bytes(known)  # the disk was full
    keys.check_known()
    assert keys.open().active == new
    assert new in (tmp_path / "server.pub").read_text()


def test_files_with_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = ServerKeys(tmp_path)
        keys.open()
        keys.prepare()
        for step in (keys.activate, keys.revert):
            step()
            for path in tmp_path.glob("server.key*"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    finally:
        os.umask(before)


def test_a_lost_key_is_not_made_anew_in_silence(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    old = keys.open().active
    (tmp_path / "server.key").unlink()
    with pytest.raises(FailedPrecondition, match="--new-server-key"):
        keys.open()
    new = keys.replace().active
    assert new != old and keys.open().keys == [new]


def test_a_damaged_key_is_refused(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    keys.open()
    (tmp_path / "server.key").write_text("what?")
    with pytest.raises(InvalidArgument):
        keys.open()
    assert keys.replace().stage is Stage.ONE_KEY


def test_a_replaced_key_leaves_nothing_of_a_rotation(tmp_path: Path) -> None:
    keys = ServerKeys(tmp_path)
    keys.open()
    keys.prepare()
    keys.replace()
    assert names(tmp_path) == {"server.key", "server.pub"}


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Kill in front of the change of a file with that number; how many there were."""
    count = 0

    def wrap(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def run(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == at:
                raise Killed
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, run)

    for owner, name in (
        (os, "link"), (os, "replace"), (Path, "unlink"), (Path, "replace"),
        (module, "sync_directory"), (module, "replace_file"), (module, "write_key_file"),
    ):  # fmt: skip
        wrap(owner, name)
    return lambda: count


STEPS = ["prepare", "activate", "revert", "retire"]
BEFORE = {
    "prepare": [], "activate": ["prepare"], "revert": ["prepare", "activate"],
    "retire": ["prepare", "activate"],
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_anywhere_leaves_a_broker_that_starts_with_one_of_the_keys(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, was_killed = 0, True
    while was_killed:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        keys = ServerKeys(folder)
        keys.open()
        for before in BEFORE[step]:
            getattr(keys, before)()
        known = set(server_keys(folder))
        with monkeypatch.context() as patch:
            killing(patch, at)
            try:
                getattr(keys, step)()
                was_killed = False
            except Killed:
                pass
        started = ServerKeys(folder).open()
        assert started.active in known, f"killed at {at}"
        assert server_keys(folder) == started.keys
        assert (folder / "server.pub").read_text().splitlines()[1:] == started.keys
        assert names(folder) <= {"server.key", "server.key.next", "server.key.previous", "server.pub"}  # fmt: skip
        assert len(names(folder)) == 1 + len(started.keys), names(folder)
    assert at > 3, "nothing was killed"


def test_another_process_reads_keys_while_they_change(tmp_path: Path) -> None:
    """Between any two changes of files `server_keys` finds the key in use."""
    keys = ServerKeys(tmp_path)
    old = keys.open().active
    new = keys.prepare().other
    seen: list[list[str]] = []
    original = os.replace

    def look(*arguments: object) -> None:
        seen.append(server_keys(tmp_path))
        original(*arguments)  # type: ignore[arg-type]
        seen.append(server_keys(tmp_path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", look)
        keys.activate()
    assert seen[:2] == [[new, old], [new, old]]
