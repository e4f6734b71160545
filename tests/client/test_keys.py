"""What `connect` takes for keys, and what it refuses before anything is sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

import danube_fast
from danube_fast.client.link.trust import Trust, trust_of
from danube_fast.security.curve import KeyPair, is_public_key, read_key_file

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
OTHER = zmq.curve_keypair()[0].decode()
NOWHERE = "danube://127.0.0.1:1"


def key_file(folder: Path, text: str | None = None, mode: int = 0o600) -> Path:
    path = folder / "client.key"
    path.write_text(text or f'# mine\npublic = "{PUBLIC}"\nsecret = "{SECRET}"\n')
    path.chmod(mode)
    return path


def test_a_key_file_is_read(tmp_path: Path) -> None:
    assert read_key_file(key_file(tmp_path)) == KeyPair(PUBLIC, SECRET)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o700 | 0o010])
def test_a_key_file_is_its_owners_alone(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(danube_fast.FailedPrecondition, match=f"chmod 600 {path}"):
        read_key_file(path)


def test_a_key_file_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(danube_fast.FailedPrecondition, match="there is no key file"):
        read_key_file(tmp_path / "none")
    with pytest.raises(danube_fast.InvalidArgument, match="is not a file"):
        read_key_file(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(danube_fast.InvalidArgument, match="is not a file"):
        read_key_file(tmp_path / "fifo")


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f'secret = "{SECRET}"',
        f'public = "{PUBLIC}"',
        f'public = "{PUBLIC}"\nsecret = 5',
        f'public = "{PUBLIC}"\nsecret = "{SECRET}"\nmore = 1',
        f'public = "{PUBLIC}"\nsecret = "{SECRET[:-1]}"',
        f'public = "{PUBLIC}"\nsecret = "{SECRET[:-1]}~"',
        f'public = "{PUBLIC}"\nsecret = "%%%%%{SECRET[5:]}"',
        f'public = "{OTHER}"\nsecret = "{SECRET}"',
        f'public = "{PUBLIC}"\nsecret = "{SECRET}"\n' + "#" * 5000,
    ],
    ids=range(10),  # the keys are drawn anew in each process
)
def test_a_key_file_without_a_key_pair(tmp_path: Path, text: str) -> None:
    with pytest.raises(danube_fast.InvalidArgument) as found:
        read_key_file(key_file(tmp_path, text))
    assert SECRET[:10] not in str(found.value) and found.value.__cause__ is None


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(danube_fast.InvalidArgument, match="is no key file"):
        read_key_file(path)


def test_keys_are_z85() -> None:
    assert is_public_key(PUBLIC)
    for text in (
        "",
        PUBLIC[:-1],
        PUBLIC + "0",
        "~" * 40,
        "%" * 40,
        "\u0660" * 40,
    ):
        assert not is_public_key(text), text


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    trust = trust_of(OTHER, key_file(tmp_path), None)
    assert trust.secret == SECRET and SECRET not in repr(trust) and OTHER in repr(trust)


def test_who_is_believed() -> None:
    mine = {os.geteuid(), 0}
    assert trust_of(None, None, None) == Trust(users=frozenset(mine))
    pinned = trust_of(None, None, 77)
    assert pinned.users == mine | {77} and pinned.is_secured
    for user in (-1, 1 << 32, "root", True, 1.5):
        with pytest.raises(danube_fast.InvalidArgument, match="server_uid"):
            trust_of(None, None, user)  # type: ignore[arg-type]


def sync(**options: Any) -> None:
    danube_fast.connect(NOWHERE, timeout=0.01, **options)


def awaited(**options: Any) -> None:
    async def main() -> None:
        await danube_fast.connect_async(NOWHERE, timeout=0.01, **options)

    asyncio.run(main())


CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"server_key": OTHER}, danube_fast.InvalidArgument, "needs key_file="),
    ({"key_file": "FILE"}, danube_fast.InvalidArgument, "with server_key= only"),
    ({"server_key": "x", "key_file": "FILE"}, danube_fast.InvalidArgument, "40 characters of Z85"),
    ({"server_key": b"x", "key_file": "FILE"}, danube_fast.InvalidArgument, "40 characters"),
    ({"server_key": OTHER, "key_file": 5}, danube_fast.InvalidArgument, "path of a file"),
    ({"server_key": OTHER, "key_file": "/none"}, danube_fast.FailedPrecondition, "no key file"),
    ({"server_key": OTHER, "key_file": "FILE"}, danube_fast.Unavailable, "no broker answers"),
    ({"server_uid": "root"}, danube_fast.InvalidArgument, "server_uid"),
    ({"server_uid": 77}, danube_fast.Unavailable, "no broker answers"),
]


@pytest.mark.parametrize("connect", [sync, awaited], ids=["connect", "connect_async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[0]) + "-" + case[2][:10])
def test_arguments_of_connect(
    tmp_path: Path, connect: Callable[..., None], case: tuple[dict[str, Any], type[Exception], str]
) -> None:
    options, kind, text = case
    path = key_file(tmp_path)
    given = {name: path if value == "FILE" else value for name, value in options.items()}
    with pytest.raises(kind, match=text):
        connect(**given)


@pytest.mark.parametrize("mark", ["?secret=", "/?key_file=", "#secret=", "?"])
def test_an_address_holds_no_secret(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    url = f"{NOWHERE}{mark}{SECRET}"
    monkeypatch.setenv("DANUBE_URL", url)
    for given in (url, None):
        with pytest.raises(danube_fast.InvalidArgument, match="has no options") as found:
            danube_fast.connect(given)
        assert SECRET not in str(found.value)
