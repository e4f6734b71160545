"""The store on disk: conformance, and what a disk adds: kills, full disks, formats, a second process."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from danube_fast.errors import DataLoss, FailedPrecondition, ResourceExhausted, Unavailable
from danube_fast.metadata import layout, lmdb_store
from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.metadata.store import Entry
from tests.metadata.conformance import Conformance, ManualClock

WRITER = """
import sys
from danube_fast.clock import SystemClock
from danube_fast.metadata.lmdb_store import LmdbStore

store = LmdbStore(sys.argv[1], SystemClock())
number = 0
while True:
    revision = store.put(f"/k/{number % 50}", str(number).encode())
    sys.stdout.write(f"{number} {revision}\\n")
    sys.stdout.flush()
    number += 1
"""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[LmdbStore]:
    opened = LmdbStore(tmp_path / "metadata", clock)
    yield opened
    opened.close()


class TestLmdbStore(Conformance):
    pass


def test_others_may_not_write_in_its_folder(tmp_path: Path, clock: ManualClock) -> None:
    before = os.umask(0)
    try:
        LmdbStore(tmp_path / "metadata", clock).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "metadata").stat().st_mode) == 0o750


def test_everything_is_there_after_reopening(tmp_path: Path, clock: ManualClock) -> None:
    first = LmdbStore(tmp_path, clock)
    first.put("/a", b"1")
    first.put("/b", b"2")
    first.delete("/a")
    first.close()
    again = LmdbStore(tmp_path, clock)
    assert again.revision == 3
    assert again.list("/") == [("/b", Entry(b"2", 2))]
    assert again.put("/c", b"") == 4
    again.close()


def test_keys_under_a_lease_do_not_outlive_the_process(tmp_path: Path, clock: ManualClock) -> None:
    first = LmdbStore(tmp_path, clock)
    lease = first.lease(1000)
    first.put("/leased", b"1", lease)
    first.put("/freed", b"1", lease)
    first.put("/freed", b"2")
    first.close()
    again = LmdbStore(tmp_path, clock)
    assert [key for key, _ in again.list("/")] == ["/freed"]
    assert again.revision == 4  # the vanishing was a change
    again.close()


def test_a_second_opener_is_refused(store: LmdbStore, tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(FailedPrecondition, match="another process"):
        LmdbStore(tmp_path / "metadata", clock)
    store.close()
    LmdbStore(tmp_path / "metadata", clock).close()


def test_a_newer_format_is_refused_in_one_sentence(tmp_path: Path, clock: ManualClock) -> None:
    LmdbStore(tmp_path, clock).close()
    environment = lmdb.open(str(tmp_path), max_dbs=8, lock=False)
    database = environment.open_db(layout.STORE_DATABASE)
    with environment.begin(write=True, db=database) as writing:
        writing.put(layout.FORMAT_KEY, layout.FORMAT.pack(layout.FORMAT_VERSION + 1))
    environment.close()
    with pytest.raises(FailedPrecondition, match="newer") as caught:
        LmdbStore(tmp_path, clock)
    assert "\n" not in str(caught.value)
    with pytest.raises(FailedPrecondition, match="newer"):
        LmdbStore(tmp_path, clock)  # the refusal gave the lock back


def test_damage_is_named(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / layout.DATA_FILE).write_bytes(b"not a database" * 4096)
    with pytest.raises(DataLoss, match=r"data\.mdb is damaged at byte 0.*backup"):
        LmdbStore(tmp_path, clock)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="file/metadata"):
        LmdbStore(tmp_path / "file" / "metadata", clock)


def test_the_map_grows(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_store, "MAP_BYTES", 128 * 1024)
    monkeypatch.setattr(lmdb_store, "MAP_BYTES_MAX", 4 * 1024 * 1024)
    growing = LmdbStore(tmp_path, clock)
    written = {}

    def fill() -> None:
        for number in range(10_000):
            growing.put(f"/k/{number}", bytes(50_000))
            written[f"/k/{number}"] = number + 1

    with pytest.raises(ResourceExhausted, match="delete topics"):
        fill()
    assert len(written) > 40
    assert {key: entry.revision for key, entry in growing.list("/")} == written
    assert growing.delete("/k/0")  # room can be made
    growing.close()


@pytest.mark.parametrize("writes", [1, 60, 200])
def test_what_was_acknowledged_survives_kill_9(
    tmp_path: Path, clock: ManualClock, writes: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(writes)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()  # what it had said before it died
    last: dict[str, tuple[int, int]] = {}
    for line in acknowledged:
        if line.endswith("\n"):
            number, revision = map(int, line.split())
            last[f"/k/{number % 50}"] = (number, revision)
    assert last, "the writer never wrote"
    store = LmdbStore(tmp_path, clock)
    found = dict(store.list("/k/"))
    newest = max(revision for _, revision in last.values())
    assert store.revision in (newest, newest + 1)  # one commit may have landed unheard
    for key, (number, revision) in last.items():
        if found[key].revision == newest + 1:
            continue
        assert found[key] == Entry(str(number).encode(), revision)
    store.close()


FULL = """
import json, resource, signal, sys
from danube_fast.clock import SystemClock
from danube_fast.errors import ResourceExhausted
from danube_fast.metadata.lmdb_store import LmdbStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = LmdbStore(sys.argv[1], SystemClock())
store.put("/before", b"kept")
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
written, text = [], ""
try:
    for number in range(100):
        store.put(f"/k/{number}", bytes(20_000))
        written.append(number)
except ResourceExhausted as error:
    text = str(error)
before = store.get("/before")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.put("/after", b"room again")
print(json.dumps({"written": written, "text": text, "before": before[0].decode()}))
"""


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path: Path, clock: ManualClock) -> None:
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.fail("this test needs an unlimited file size to limit it itself")
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert "free some space" in outcome["text"]
    assert outcome["before"] == "kept"
    assert 0 < len(outcome["written"]) < 30
    store = LmdbStore(tmp_path, clock)
    keys = {key for key, _ in store.list("/")}
    assert keys == {f"/k/{number}" for number in outcome["written"]} | {"/before", "/after"}
    store.close()
