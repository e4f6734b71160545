"""Key files: what is read back, and what is refused with which remedy."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from danube_fast.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from danube_fast.security import curve
from danube_fast.security.curve import (
    KeyPair,
    is_public_key,
    load_or_make,
    new_key_pair,
    read_key_file,
    write_key_file,
)

# of the specification of CurveZMQ
KNOWN = KeyPair(
    "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker.key"


def test_a_pair_is_read_as_it_was_written(path: Path) -> None:
    pair = new_key_pair()
    write_key_file(path, pair)
    assert read_key_file(path) == pair
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("# ")
    assert os.listdir(path.parent) == [path.name]


def test_a_known_pair_belongs_together(path: Path) -> None:
    write_key_file(path, KNOWN)
    assert read_key_file(path) == KNOWN


def test_a_key_file_is_never_overwritten(path: Path) -> None:
    write_key_file(path, KNOWN)
    with pytest.raises(AlreadyExists, match="never overwritten"):
        write_key_file(path, new_key_pair())
    assert read_key_file(path) == KNOWN
    assert os.listdir(path.parent) == [path.name]


def test_a_link_to_nowhere_is_not_followed_by_a_write(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(AlreadyExists):
        write_key_file(path, KNOWN)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_cannot_be_written_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FailedPrecondition, match="no space"):
        write_key_file(path, KNOWN)
    assert os.listdir(path.parent) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="nowhere"):
        write_key_file(tmp_path / "nowhere" / "broker.key", KNOWN)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o644])
def test_a_file_that_others_reach_is_refused(path: Path, mode: int) -> None:
    write_key_file(path, KNOWN)
    path.chmod(mode)
    with pytest.raises(FailedPrecondition, match=f"mode {mode:04o}.*chmod 600"):
        read_key_file(path)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_key_file(path, KNOWN)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # whom every process trusts
        assert read_key_file(path) == KNOWN
        os.chown(path, 12345, -1)
    with pytest.raises(FailedPrecondition, match="belongs to user"):
        read_key_file(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="there is no key file"):
        read_key_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        'public = "only"\n',
        f'public = "{KNOWN.public}"\n',
        f'public = "{KNOWN.public}"\nsecret = 5\n',
        f'public = "{KNOWN.public}"\nsecret = "short"\n',
        f'public = "{KNOWN.public}"\nsecret = "{KNOWN.secret}"\nmore = 1\n',
        f'public = "{KNOWN.public}"\nsecret = "{KNOWN.secret}',
        f'public = "{"#" * 40}"\nsecret = "{KNOWN.secret}"\n',
        "# \u00e9\n",
        "#" * 5000,
    ],
)
def test_what_is_no_key_file_is_refused_and_not_quoted(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(InvalidArgument) as raised:
        read_key_file(path)
    assert KNOWN.secret not in str(raised.value)
    assert raised.value.__cause__ is None


def test_keys_that_do_not_belong_together_are_refused(path: Path) -> None:
    write_key_file(path, KeyPair(new_key_pair().public, KNOWN.secret))
    with pytest.raises(InvalidArgument, match="does not belong"):
        read_key_file(path)


def test_what_is_not_a_file_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidArgument, match="not a file"):
        read_key_file(path)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(InvalidArgument, match="not a file"):
        read_key_file(path)


def test_a_pair_is_made_once(path: Path) -> None:
    made = load_or_make(path)
    assert load_or_make(path) == made == read_key_file(path)


def test_all_who_make_a_pair_at_once_get_the_same(path: Path) -> None:
    found: list[KeyPair] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait(60)
        found.append(load_or_make(path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8, "a thread has not ended"
    assert set(found) == {read_key_file(path)}


def test_a_damaged_file_is_not_replaced(path: Path) -> None:
    path.touch(mode=0o600)
    with pytest.raises(InvalidArgument):
        load_or_make(path)
    assert path.read_bytes() == b""


def test_the_secret_is_not_shown() -> None:
    assert KNOWN.secret not in repr(KNOWN)
    assert KNOWN.secret not in f"{KNOWN}"


def test_public_keys() -> None:
    assert is_public_key(KNOWN.public)
    assert is_public_key(new_key_pair().public)
    for text in ("", "a", KNOWN.public[:-1], KNOWN.public + "a", "~" * 40, "\u00e9" * 40, "0" * 40):
        assert not is_public_key(text)
    assert is_public_key("%nSc0" * 8)  # 2**32 - 1
    assert not is_public_key("%nSc1" * 8)
    assert len(curve._DIGITS) == 85


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("server.key", "recover --data-dir {} --new-server-key --yes"),
        ("bootstrap-admin.key", "good for one connection.*restart.*recover --data-dir {}"),
        ("ann.key", "register its public key"),
    ],
    ids=["server", "bootstrap", "user"],
)
def test_a_missing_or_damaged_key_names_its_own_way_out(
    tmp_path: Path, name: str, remedy: str
) -> None:
    path, told = tmp_path / name, remedy.format(tmp_path)
    with pytest.raises(FailedPrecondition, match=told):
        read_key_file(path)
    path.write_text("damaged")
    path.chmod(0o600)
    with pytest.raises(InvalidArgument, match=told):
        read_key_file(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(InvalidArgument, match=told):
        read_key_file(path)


def test_a_key_file_has_a_name() -> None:
    with pytest.raises(InvalidArgument, match="no name"):
        write_key_file(Path(""), KNOWN)
