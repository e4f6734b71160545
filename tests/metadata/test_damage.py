"""A store that is damaged, missing, old or another one's: refused by name, or served exactly."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import lmdb
import pytest

from danube_fast import lmdb_file
from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.lmdb_file import check_lmdb_file
from danube_fast.metadata import layout
from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.metadata.seal import SLOT_DISTANCE_BYTES, Seal, SealFile
from tests.metadata.conformance import ManualClock

CASES = int(os.environ.get("DANUBE_DAMAGE_CASES", "150"))
SEED = int(os.environ.get("DANUBE_DAMAGE_SEED", "1"))
PAGE = lmdb_file.PAGE_BYTES


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def content(store: LmdbStore) -> dict[str, tuple[bytes, int]]:
    return {key: (entry.value, entry.revision) for key, entry in store.list("/")}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with branch pages, long values and a list of free pages, under a seal."""
    root = tmp_path_factory.mktemp("filled")
    (root / "seal").touch()
    store = LmdbStore(root / "metadata", ManualClock(), root / "seal")
    draw = random.Random(SEED)
    for number in range(300):
        store.put(f"/topics/default/t{number:04}", draw.randbytes(draw.choice([20, 300, 5000])))
        if number % 3 == 0:
            store.delete(f"/topics/default/t{draw.randrange(number + 1):04}")
    store.close()
    return root


class Copy:
    """A copy to be damaged."""

    def __init__(self, source: Path, target: Path) -> None:
        self.metadata, self.seal = target / "metadata", target / "seal"
        shutil.copytree(source, target)

    @property
    def data(self) -> Path:
        return self.metadata / layout.DATA_FILE

    def open(self) -> LmdbStore:
        return LmdbStore(self.metadata, ManualClock(), self.seal)


@pytest.fixture
def copy(filled: Path, tmp_path: Path) -> Copy:
    return Copy(filled, tmp_path / "copy")


def test_flips_anywhere_are_refused_or_harmless(filled: Path, copy: Copy) -> None:
    """Half of the places are in the heads of pages and their first nodes, where LMDB trusts most."""
    sound = copy.data.read_bytes()
    store = copy.open()
    expected = content(store)
    store.close()
    draw = random.Random(SEED)
    refusals: list[str] = []
    for case in range(CASES):
        damaged = bytearray(sound)
        page = draw.choice([0, 1, *(draw.randrange(len(sound) // PAGE) for _ in range(6))])
        at = page * PAGE + draw.choice(
            [draw.randrange(16), draw.randrange(240), draw.randrange(PAGE)]
        )
        bit = draw.randrange(8)
        damaged[at] ^= 1 << bit
        shutil.rmtree(copy.metadata)
        shutil.copytree(filled / "metadata", copy.metadata)
        copy.data.write_bytes(damaged)
        about = f"bit {bit} of byte {at} flipped (case {case}, DANUBE_DAMAGE_SEED={SEED})"
        try:
            store = copy.open()
            found = content(store)
        except DataLoss as fault:
            refusals.append(str(fault))
            continue
        store.put("/topics/default/new", bytes(9000))
        store.close()
        assert found == expected, about
    assert len(refusals) > CASES // 5
    assert all(str(copy.metadata) in text and "backup" in text for text in refusals)


def test_a_cut_anywhere_is_refused_or_harmless(copy: Copy) -> None:
    sound = copy.data.read_bytes()
    refusals: list[str] = []
    for size in range(1, len(sound), len(sound) // 60):
        os.truncate(copy.data, 0)
        copy.data.write_bytes(sound[:size])
        try:
            check_lmdb_file(copy.data)
        except DataLoss as fault:
            refusals.append(str(fault))
    assert len(refusals) > 40
    assert all("ends" in text for text in refusals)


def test_every_change_leaves_a_file_that_is_found_sound(tmp_path: Path) -> None:
    """What LMDB really writes, over many transactions, with everything that it has in a file."""
    draw = random.Random(SEED)
    known: list[bytes] = []
    for _ in range(25):
        environment = lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=4, lock=False, sync=False)
        databases = [environment.open_db(name) for name in (b"a", b"b", b"c")]
        for _ in range(4):
            with environment.begin(write=True) as writing:
                for _ in range(draw.choice([1, 5, 200])):
                    if known and draw.random() < 0.4:
                        writing.delete(known.pop(draw.randrange(len(known))), db=databases[0])
                    key = draw.randbytes(draw.choice([3, 12, 200]))
                    known.append(key)
                    value = bytes(draw.choice([0, 24, 3000, 20_000]))
                    writing.put(key, value, db=databases[0])
                    writing.put(key, b"x", db=databases[1])
        environment.close()
        check_lmdb_file(tmp_path / "data.mdb")


# -- the seal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "file deleted", "emptied", "cut to nothing"])
def test_metadata_that_is_gone_is_not_made_anew(copy: Copy, how: str) -> None:
    if how == "deleted":
        shutil.rmtree(copy.metadata)
    elif how == "file deleted":
        copy.data.unlink()
    elif how == "emptied":
        for path in copy.metadata.iterdir():
            path.unlink()
    else:
        os.truncate(copy.data, 0)
    for _ in range(2):  # a refused start leaves nothing that the next one takes for a store
        with pytest.raises(DataLoss, match=r"metadata is missing or empty.*revision.*backup"):
            copy.open()


def test_an_older_copy_is_refused(copy: Copy, tmp_path: Path) -> None:
    shutil.copytree(copy.metadata, tmp_path / "older")
    store = copy.open()
    store.put("/topics/default/newest", b"acknowledged")
    newest = store.revision
    store.close()
    shutil.rmtree(copy.metadata)
    (tmp_path / "older").rename(copy.metadata)
    with pytest.raises(DataLoss, match=f"revision {newest} was acknowledged.*older"):
        copy.open()
    copy.seal.unlink()  # what the text says: accept it
    copy.open().close()


def test_another_directorys_metadata_is_refused(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "other-seal").touch()
    other = LmdbStore(tmp_path / "other", ManualClock(), tmp_path / "other-seal")
    for number in range(700):
        other.put("/x", str(number).encode())
    other.close()
    shutil.rmtree(copy.metadata)
    (tmp_path / "other").rename(copy.metadata)
    with pytest.raises(DataLoss, match="belongs to another data directory"):
        copy.open()


@pytest.mark.parametrize("how", ["deleted", "cut", "one slot", "both slots"])
def test_without_its_seal_a_sound_store_is_served(copy: Copy, how: str) -> None:
    store = copy.open()
    expected = content(store)
    store.close()
    damaged = bytearray(copy.seal.read_bytes())
    damaged[20] ^= 1
    if how == "both slots":
        damaged[SLOT_DISTANCE_BYTES + 20] ^= 1
    if how == "deleted":
        copy.seal.unlink()
    else:
        copy.seal.write_bytes(damaged[:7] if how == "cut" else damaged)
    store = copy.open()
    assert content(store) == expected
    revision = store.put("/again", b"sealed")
    store.close()
    seal = SealFile(copy.seal).read()
    assert seal is not None and seal.revision == revision


def test_no_store_is_made_beside_logs_without_a_seal(tmp_path: Path, clock: ManualClock) -> None:
    for _ in range(2):
        with pytest.raises(DataLoss, match=r"missing or empty.*logs"):
            LmdbStore(tmp_path / "metadata", clock, tmp_path / "seal")


def test_a_kill_between_the_commit_and_the_seal_is_no_loss(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seal").touch()
    store = LmdbStore(tmp_path / "metadata", clock, tmp_path / "seal")
    store.put("/a", b"1")
    monkeypatch.setattr(SealFile, "write", lambda fd, seal: None)
    store.put("/b", b"2")
    store.close()
    again = LmdbStore(tmp_path / "metadata", clock, tmp_path / "seal")
    assert set(content(again)) == {"/a", "/b"}
    again.close()


def test_a_newer_seal_is_refused(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube_fast.metadata.seal.VERSION", 2)
    SealFile(copy.seal).create(Seal(bytes(16), 1))
    monkeypatch.undo()
    with pytest.raises(FailedPrecondition, match="format 2"):
        copy.open()


# -- formats -----------------------------------------------------------------------------------


def test_version_one_is_read(tmp_path: Path, clock: ManualClock) -> None:
    environment = lmdb.open(str(tmp_path / "metadata"), max_dbs=8, lock=False)
    store, entries = (environment.open_db(name) for name in (b"store", b"entries"))
    with environment.begin(write=True) as writing:
        writing.put(b"format", b"\1\0\0\0", db=store)
        writing.put(b"revision", (7).to_bytes(8, "little"), db=store)
        for key, flags in ((b"/kept", 0), (b"/leased", 1)):
            writing.put(key, layout.ENTRY_HEADER.pack(5, flags) + b"value", db=entries)
    environment.close()
    for revision in (8, 9):
        opened = LmdbStore(tmp_path / "metadata", clock, tmp_path / "seal")
        assert opened.revision == revision - (revision == 9)
        assert content(opened) == {"/kept": (b"value", 5)}
        opened.close()


def test_values_are_pinned() -> None:
    assert layout.encode_entry(b"/k", 3, 1, b"value").hex() == (
        "030000000000000001000000499961c976616c7565"
    )
    assert layout.decode_entry(b"/k", layout.encode_entry(b"/k", 3, 1, b"value")) == (
        3,
        1,
        b"value",
    )
    assert layout.decode_entry(b"/l", layout.encode_entry(b"/k", 3, 1, b"value")) is None
    assert Seal(b"i" * 16, 9).encode().hex()[:80] == (
        "44616e7562654d640100000000000000" + "69" * 16 + "0900000000000000"
    )


def test_a_changed_value_is_told_when_it_is_read(copy: Copy) -> None:
    store = copy.open()
    key = next(iter(content(store)))
    environment = store._environment
    with environment.begin(write=True, db=store._entries) as writing:
        stored = bytearray(writing.get(key.encode()))
        stored[-1] ^= 1
        writing.put(key.encode(), bytes(stored))
    with pytest.raises(DataLoss, match=key):
        store.get(key)
    with pytest.raises(DataLoss, match=key):
        store.list("/")
    store.close()
