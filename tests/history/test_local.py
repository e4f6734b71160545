"""The store in a folder: what every store does, and files that survive kills, full disks and lost mounts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.history.stores import local
from danube_fast.history.stores.local import LocalStore
from tests.history.conformance import WAIT_SECONDS, Conformance, keys

ROUNDS = 12

WRITER = """
import sys
from pathlib import Path
from danube_fast.clock import SystemClock
from danube_fast.errors import AlreadyExists
from danube_fast.history.stores.local import LocalStore

store = LocalStore(Path(sys.argv[1]), SystemClock())
notes = open(sys.argv[2], "w")
number = int(sys.argv[3])
while True:
    data = b"%010d" % number * 20_000
    key = f"{number % 3}/{number:06d}"
    try:
        if number % 2:
            store.create(key, data)
        else:
            upload = store.begin(key)
            half = len(data) // 2
            parts = [store.put_part(upload, 1, 0, data[:half])]
            parts.append(store.put_part(upload, 2, half, data[half:]))
            store.complete(upload, parts)
    except AlreadyExists:
        store.abort(upload) if not number % 2 else None
    else:
        print(number, file=notes, flush=True)
    number += 1
"""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, f"the writers wrote nothing in {WAIT_SECONDS} s"
        time.sleep(0.005)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    made = LocalStore(tmp_path / "store", SystemClock())
    yield made
    made.close()


class TestLocalStore(Conformance):
    pass


def test_writers_that_are_killed_leave_whole_objects(tmp_path: Path) -> None:
    """Two processes race for the same keys and are killed; every key has one maker and all of its bytes."""
    folder = tmp_path / "store"
    made: dict[int, str] = {}
    for round_number in range(ROUNDS):
        notes = [tmp_path / f"{round_number}-{name}" for name in ("a", "b")]
        for note in notes:
            note.touch()
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(note), str(len(made))])
            for note in notes
        ]
        try:
            wait_for(lambda notes=notes: any(note.stat().st_size for note in notes))
        finally:
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait(WAIT_SECONDS)
        for note in notes:
            for number in note.read_text().split():
                assert int(number) not in made, f"{number}: {made[int(number)]} and {note.name}"
                made[int(number)] = note.name
    assert len(made) > ROUNDS
    store = LocalStore(folder, SystemClock())
    found = {info.key: info.size for info in store.list()}
    for number in made:
        assert f"{number % 3}/{number:06d}" in found
    for key in found:
        number = int(key[2:])
        assert store.read(key) == b"%010d" % number * 20_000
    for upload, _ in list(store.uploads()):
        store.abort(upload)
    assert os.listdir(folder / local.UPLOADS_NAME) == []


def test_what_a_killed_maker_left_is_an_upload(store: LocalStore) -> None:
    (store.directory / local.UPLOADS_NAME / "00000000000000000017-ab.new").write_bytes(b"half")
    ((upload, began),) = store.uploads("any/")
    assert began == 17
    store.abort(upload)
    assert list(store.uploads()) == []


def test_a_completion_that_was_cut_short_is_ended(store: LocalStore) -> None:
    """It had given the object its name, and left the upload; that of another one goes on."""
    upload = store.begin("a/1")
    part = store.put_part(upload, 1, 0, b"x")
    data = store.seal(upload, [part])
    (store.directory / "a").mkdir()
    os.link(data, store.directory / "a/1")
    other = store.begin("a/1")
    with pytest.raises(AlreadyExists):
        store.complete(other, [store.put_part(other, 1, 0, b"x")])
    with pytest.raises(AlreadyExists):
        store.complete(upload, [part])
    assert store.read("a/1") == b"x"
    assert [found for found, _ in store.uploads()] == [other]


def test_the_folder_above_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="make the folder or correct"):
        LocalStore(tmp_path / "no" / "store", SystemClock())
    assert not (tmp_path / "no").exists()


def test_a_store_that_went_away_has_not_lost_its_objects(store: LocalStore, tmp_path: Path) -> None:
    """An unmounted disk must not look like a store without the object."""
    store.create("a/1", b"x")
    upload = store.begin("a/2")
    part = store.put_part(upload, 1, 0, b"y")
    store.directory.rename(tmp_path / "elsewhere")
    calls = [
        lambda: store.read("a/1"),
        lambda: store.head("a/1"),
        lambda: list(store.list()),
        lambda: store.create("a/3", b""),
        lambda: store.begin("a/3"),
        lambda: store.put_part(upload, 1, 0, b"y"),
        lambda: store.complete(upload, [part]),
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition, match="folder"):
            call()
    (tmp_path / "elsewhere").rename(store.directory)
    store.complete(upload, [part])
    assert keys(store) == ["a/1", "a/2"]


def test_a_file_that_is_cut_is_a_loss(store: LocalStore) -> None:
    store.create("cut", b"0123456789")
    os.truncate(store.directory / "cut", 4)
    with pytest.raises(DataLoss, match="cut has 4 bytes"):
        store.read("cut", 2, 5)


@pytest.mark.parametrize(
    ("number", "expected", "remedy"),
    [
        (errno.ENOSPC, ResourceExhausted, "make room"),
        (errno.EDQUOT, ResourceExhausted, "make room"),
        (errno.EACCES, PermissionDenied, "let the broker's user write"),
        (errno.EROFS, PermissionDenied, "let the broker's user write"),
        (errno.EIO, Unavailable, "Input/output"),
    ],
)
def test_what_the_system_refuses_is_told(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[Exception],
    remedy: str,
) -> None:
    upload = store.begin("b")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(expected, match=remedy):
        store.create("a", b"data")
    with pytest.raises(expected, match=remedy):
        store.put_part(upload, 1, 0, b"data")
    monkeypatch.undo()
    assert keys(store) == []
    store.create("a", b"data")


def test_parts_that_were_not_sent_are_missed(store: LocalStore) -> None:
    upload = store.begin("short")
    part = store.put_part(upload, 1, 0, b"data")
    with pytest.raises(InvalidArgument, match="4 are there"):
        store.complete(upload, [part._replace(size=5)])
    assert keys(store) == []


def test_a_folder_that_is_removed_at_the_last_moment_is_made_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("a/1", b"x")
    link = os.link
    removed = []

    def remove_first(source: Path, target: Path) -> None:
        if not removed:
            removed.append(target)
            store.delete(["a/1"])
        link(source, target)

    monkeypatch.setattr(os, "link", remove_first)
    store.create("a/2", b"y")
    assert keys(store) == ["a/2"]


def test_names_are_durable_before_an_object_is_told(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of system calls: bytes, then the name, then each folder that got an entry."""
    calls: list[str] = []
    link, fsync = os.link, os.fsync

    def seen_link(source: Path, target: Path) -> None:
        link(source, target)
        calls.append("link")

    def seen_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)
        calls.append("file" if path.is_file() else str(path.relative_to(store.directory)))

    monkeypatch.setattr(os, "link", seen_link)
    monkeypatch.setattr(os, "fsync", seen_fsync)
    store.create("n/m/1", b"x")
    assert calls[:2] == ["file", "link"]
    assert set(calls[2:]) == {"n/m", "n", "."}
    calls.clear()
    with pytest.raises(AlreadyExists):
        store.create("n/m/1", b"x")
    assert calls == ["file", "n/m", "n", "."], "its maker may not have come so far"
    calls.clear()
    store.create("n/m/2", b"x")
    assert calls == ["file", "link", "n/m", "n", "."]


def test_an_object_does_not_change_with_the_upload_that_it_came_from(store: LocalStore) -> None:
    """As after a kill between the name and the end of the upload."""
    upload = store.begin("k")
    parts = [store.put_part(upload, 1, 0, b"0123456789")]
    data = store.directory / local.UPLOADS_NAME / upload.upload_id / "data"
    os.link(data, store.directory / "k")
    with pytest.raises(NotFound, match="has ended"):
        store.put_part(upload, 1, 0, b"abc")
    with pytest.raises(AlreadyExists):
        store.complete(upload, [parts[0]._replace(size=4)])
    assert store.read("k") == b"0123456789"


def test_a_folder_for_reading_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="correct the store's URL"):
        LocalStore(tmp_path / "absent", SystemClock(), must_exist=True)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_without_uploads_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "0").write_bytes(b"0123")
    store = LocalStore(tmp_path, SystemClock(), must_exist=True)
    assert [info.key for info in store.list()] == ["objects/0"]
    assert store.read("objects/0", 1, 2) == b"12"
    assert store.head("objects/1") is None
    assert [path.name for path in tmp_path.iterdir()] == ["objects"]


@pytest.mark.parametrize("with_uploads", [False, True])
def test_a_folder_for_reading_that_goes_is_told(tmp_path: Path, with_uploads: bool) -> None:
    folder = tmp_path / "store"
    if with_uploads:
        LocalStore(folder, SystemClock())
    else:
        folder.mkdir()
    store = LocalStore(folder, SystemClock(), must_exist=True)
    folder.rename(tmp_path / "elsewhere")
    if with_uploads:
        folder.mkdir()  # where it was mounted
    with pytest.raises(FailedPrecondition, match="mount it again"):
        store.head("objects/0")
