"""The index of a log, damaged: built anew, at the start or while it is used; never a wrong answer."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import numpy as np
import pytest

from danube_fast.errors import DataLoss
from danube_fast.wal.index import _checks, mix
from danube_fast.wal.layout import RUN_DTYPE
from danube_fast.wal.log import Log
from tests.wal.rig import (
    SETTINGS,
    abandon,
    open_log,
    put,
    segments,
    start_log,
    wait_synced,
    wait_until,
)

CASES = int(os.environ.get("DANUBE_DAMAGE_CASES", "25"))
SEED = int(os.environ.get("DANUBE_DAMAGE_SEED", "1"))
SMALL = msgspec.structs.replace(SETTINGS, segment_bytes=128 * 1024)
OFFSETS = range(0, 640, 9)
Answers = list[Any]


def answers(log: Log) -> Answers:
    """All that a lookup can say, and all that is read by it."""
    found: Answers = [log.runs(partition, at, 20_000) for partition in (5, 6, 7) for at in OFFSETS]
    found += [log.find_time(partition, at) for partition in (5, 6) for at in OFFSETS]
    found += [bytes(log.read_run(run)) for run in log.runs(5, 0, 1 << 30)]
    return found


def settle(log: Log) -> None:
    """All that is written is synced and in the index."""
    wait_synced(log)
    while len(log._runs._tail):
        assert log._runs.work(log.synced_position, idle=True), "the index takes nothing more"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A killed log of several segments, all of it indexed and behind no snapshot's position."""
    directory = tmp_path_factory.mktemp("filled") / "log"
    log = start_log(directory, SMALL)
    put(log, ([bytes([number % 251]) * 700] * 3 for number in range(200)), time_ns=3)
    put(log, ([b"b"] for _ in range(300)), partition_id=6, time_ns=50)
    settle(log)
    assert len(segments(directory)) > 3
    before = answers(log)
    shutil.copytree(directory, directory.with_name("kept"))
    abandon(log)
    return directory.with_name("kept"), before


@pytest.fixture
def copy(filled: tuple[Path, Answers], tmp_path: Path) -> Path:
    shutil.copytree(filled[0], tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))


def test_damage_at_rest_costs_only_time(filled: tuple[Path, Answers], copy: Path) -> None:
    """Flips, cuts and zeroed pages of the file; the log serves exactly what it did."""
    data = copy / "index" / "data.mdb"
    content = data.read_bytes()
    used = [page for page in range(len(content) // 4096) if any(content[page * 4096 :][:4096])]
    draw = random.Random(SEED)
    for case in range(CASES):
        shutil.rmtree(copy)
        shutil.copytree(filled[0], copy)
        page = draw.choice(used)
        how = draw.choice(["flip", "flip", "flip", "cut", "zero"])
        at = page * 4096 + draw.choice([draw.randrange(200), draw.randrange(4096)])
        if how == "flip":
            flip(data, at, draw.randrange(8))
        elif how == "cut":
            os.truncate(data, at)
        else:
            with data.open("r+b") as file:
                file.seek(page * 4096)
                file.write(bytes(4096))
        log = start_log(copy, SMALL)
        found = answers(log)
        abandon(log)
        assert found == filled[1], f"{how} at {at} (case {case}, DANUBE_DAMAGE_SEED={SEED})"


@pytest.mark.parametrize("name", [b"offset", b"time"])
@pytest.mark.parametrize("part", ["key", "value", "length"])
def test_an_entry_that_changed_is_found_out_and_the_index_built_anew(
    filled: tuple[Path, Answers], copy: Path, name: bytes, part: str
) -> None:
    with lmdb.open(str(copy / "index"), max_dbs=3, lock=False) as environment:
        database = environment.open_db(name)
        with environment.begin(write=True, db=database) as writing:
            pairs = [(bytes(key), bytes(value)) for key, value in writing.cursor()]
            key, value = pairs[len(pairs) // 2 if name == b"offset" else 0]
            writing.delete(key)
            if part == "key":
                key = key[:-1] + bytes([key[-1] ^ 1])
            elif part == "value":
                value = value[:3] + bytes([value[3] ^ 16]) + value[4:]
            writing.put(key, value[:-1] if part == "length" else value)
    log = start_log(copy, SMALL)
    assert answers(log) == filled[1]
    log.close()


def test_an_error_while_it_is_used_becomes_a_new_index(
    filled: tuple[Path, Answers], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = start_log(copy, SMALL)
    put(log, ([b"new"] for _ in range(5)), base_offset=600)  # in the tail table
    expected = [log.find(5, at) for at in (0, 300, 599, 602)]
    broken = log._runs._index._environment

    class Broken:
        def begin(self, **_: Any) -> Any:
            raise lmdb.PageNotFoundError("mdb_get: MDB_PAGE_NOTFOUND")

        def __getattr__(self, name: str) -> Any:
            return getattr(broken, name)

    monkeypatch.setattr(log._runs._index, "_environment", Broken())
    assert [log.find(5, at) for at in (0, 300, 599, 602)] == expected
    assert isinstance(log._runs._index._environment, lmdb.Environment)
    settle(log)
    log.close()
    log = start_log(copy, SMALL)
    assert answers(log)[: len(filled[1])] != [], "nothing is found"
    assert [log.find(5, at) for at in (0, 300, 599, 602)] == expected
    log.close()


def test_old_damage_stops_a_rebuild_instead_of_hiding_messages(
    filled: tuple[Path, Answers], copy: Path
) -> None:
    """Behind a damaged header nothing can be found: without a word it would be a loss."""
    log = start_log(copy, SMALL)
    log.save_snapshot(log.written_position, b"state")
    wait_until(lambda: log.snapshot_position == log.written_position, "the snapshot")
    run = log.find(5, 30)
    assert run is not None
    log.close(b"state")
    flip(segments(copy)[0], 4096 + run.position + 8, 3)
    shutil.rmtree(copy / "index")
    log = open_log(copy, SMALL)
    text = rf"\.seg is damaged at position {run.position}:.*accept-loss"
    with pytest.raises(DataLoss, match=text):
        list(log.replay())
    log.close()


def test_an_index_that_knows_more_proves_a_loss(copy: Path) -> None:
    """The newest segment is gone, no snapshot was there to tell."""
    segments(copy)[-1].unlink()
    log = open_log(copy, SMALL)
    with pytest.raises(DataLoss, match=r"durable up to position \d+, says its index") as caught:
        list(log.replay())
    log.close()
    assert f"removing {copy / 'index'}" in str(caught.value)
    shutil.rmtree(copy / "index")  # accepted
    start_log(copy, SMALL).close()


def test_all_segments_gone_is_a_loss_too(copy: Path) -> None:
    for path in segments(copy):
        path.unlink()
    log = open_log(copy, SMALL)
    with pytest.raises(DataLoss, match="says its index"):
        list(log.replay())
    log.close()


def test_rows_and_numbers_mix_alike() -> None:
    rows = np.zeros(3, dtype=RUN_DTYPE)
    rows["base_offset"] = [1, 2**63, 2**64 - 1]
    rows["position"] = [0, 7, 2**40]
    found = _checks(rows["base_offset"], rows["position"]).tolist()
    assert found == [mix(1, 0), mix(2**63, 7), mix(2**64 - 1, 2**40)]
    assert len({mix(1 << bit) for bit in range(64)}) == 64
