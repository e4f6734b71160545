"""Another file of issuers without a restart: which file counts, which keys are kept, and which sign-ons end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument, Unavailable
from danube_fast.security.live_files import LiveFiles
from danube_fast.security.policy import Policy
from danube_fast.workers.sign_on import key_cache
from danube_fast.workers.sign_on.issuer_watch import RETRY_NS, IssuerWatch, issuer_files
from danube_fast.workers.sign_on.verifier import Verifier
from tests.delivery.sign_on_rig import IssuerKey, issuer_toml

B = {"name": "b", "issuer": "https://b.example.com/"}


def read(path: Path) -> str:
    text = path.read_text() if path.exists() else "bad: missing"
    if text.startswith("bad"):
        raise InvalidArgument(text)
    return text


def test_a_changed_file_counts_when_it_is_whole_and_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    files = LiveFiles("the file", [path], lambda: read(path))
    now_ns = 0

    def look() -> bool:
        nonlocal now_ns
        now_ns += SECOND_NS
        return files.refresh(now_ns)

    assert files.loaded == "one" and not look()
    path.write_text("two is longer")
    assert not look() and files.loaded == "one", "it may be half written"
    assert not files.refresh(now_ns + 1), "not so soon"
    assert look() and files.loaded == "two is longer" and not look()
    path.write_text("bad one")
    with caplog.at_level(logging.ERROR):
        assert not any(look() for _ in range(4))
    assert files.fault == "bad one" and files.loaded == "two is longer"
    assert len(caplog.records) == 1, "said once"
    path.unlink()
    assert not any(look() for _ in range(3)) and files.fault == "bad: missing"
    (tmp_path / "new").write_text("three")
    (tmp_path / "new").rename(path)
    assert [look(), look()] == [False, True]
    assert files.loaded == "three" and files.fault == ""


class Watch:
    """The watch of a file of issuers, and a coordinator that answers when it is told to."""

    def __init__(self, path: Path, text: str, **options: Any) -> None:
        self.path, self.now_ns = path, 0
        self.asked: list[tuple[Any, Callable[[Any], None]]] = []
        mailbox: Any = SimpleNamespace(
            call=lambda peer, message, on_reply, timeout_ms: self.asked.append((message, on_reply))
        )
        for name in "abc":
            keys = path.with_name(name)
            keys.write_text(json.dumps({"keys": [IssuerKey().jwk()]}))
            keys.chmod(0o644)
        self.write(text)
        settings: Any = SimpleNamespace(tokens=str(path))
        files = issuer_files(settings, **options)
        authenticator: Any = SimpleNamespace(verify=lambda text, address: pytest.fail("it saw it"))
        self.verifier = Verifier(Policy(), files.loaded, SystemClock(), authenticator)
        self.watch = IssuerWatch(files, self.verifier, mailbox)
        self.watch.start()

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o644)

    def turn(self, seconds: float = 1.0) -> None:
        self.now_ns += int(seconds * SECOND_NS)
        self.watch.do_work(self.now_ns)

    def answer(self, error: Exception | None = None) -> Any:
        """Answer what was asked; the message."""
        (message, on_reply), *_ = self.asked
        self.asked.clear()
        on_reply(SimpleNamespace(error=error, value=None))
        return message

    def heard(self) -> list[Any]:
        """All that the coordinator is told in the next seconds."""
        found = []
        for _ in range(6):
            self.turn()
            while self.asked:
                found.append(self.answer())
                self.turn(0)
        return found

    def told(self) -> dict[str, str]:
        """Digests of the entries of a file that is in use, which the coordinator is told once in the next seconds."""
        (read,) = self.heard()
        assert read.fault == ""
        return dict(read.issuers)


def run(test: Callable[[], None]) -> None:
    """Run a test in an event loop, which loads of keys need."""

    async def inside() -> None:
        test()

    asyncio.run(inside())


def test_the_coordinator_is_told_which_entries_are_in_use(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    a, b = issuer_toml(jwks_file="a"), issuer_toml(jwks_file="b", **B)
    c = issuer_toml(jwks_file="c", name="c", issuer="https://c.example.com/")

    def test() -> None:
        watch = Watch(path, a + b)
        first = watch.told()
        assert set(first) == {"corp", "b"} == set(watch.verifier.caches)
        kept = watch.verifier.caches["corp"]
        watch.write(a + c)
        second = watch.told()
        assert set(second) == {"corp", "c"} and second["corp"] == first["corp"]
        assert list(watch.verifier.caches) == ["corp", "c"]
        assert watch.verifier.caches["corp"] is kept, "its keys are not fetched anew"
        watch.write(issuer_toml(jwks_file="a", audience="other") + c)
        third = watch.told()
        assert third["c"] == second["c"] and third["corp"] != second["corp"]
        assert watch.verifier.caches["corp"] is not kept
        watch.write("issuer = []")
        assert watch.told() == {} == watch.verifier.caches
        watch.write("[[issuer]]")
        (read,) = watch.heard()
        assert isinstance(read, m.IssuersRead) and "issuers.toml" in read.fault
        assert read.issuers == {}, "the old file counts"
        watch.write(a)
        assert watch.told() == {"corp": first["corp"]}
        assert list(watch.verifier.caches) == ["corp"]
        assert watch.heard() == []
        watch.watch.tell_again()
        assert watch.told() == {"corp": first["corp"]}
        assert Watch(path, b + a).told() == first, "the order means nothing"

    run(test)


def test_an_issuer_that_needs_a_missing_library_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def test() -> None:
        watch = Watch(tmp_path / "issuers.toml", "issuer = []")
        watch.heard()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "jwt.algorithms", None)
            watch.write(issuer_toml(jwks_file="a"))
            (told,) = watch.heard()
        assert isinstance(told, m.IssuersRead) and "PyJWT" in told.fault
        assert watch.verifier.caches == {}
        assert watch.heard()[-1].fault == "", "it is there now"
        assert list(watch.verifier.caches) == ["corp"]

    run(test)


def test_a_file_that_could_never_be_used_is_waited_for(tmp_path: Path) -> None:
    """What it trusts is not known: no other may look at what may be a token, and the coordinator ends nothing."""
    path = tmp_path / "issuers.toml"
    a = issuer_toml(jwks_file="a")

    def test() -> None:
        first = Watch(path, a).told()
        with pytest.raises(InvalidArgument, match=r"issuers\.toml"):
            Watch(path, "[[issuer]")
        watch = Watch(path, "[[issuer]", may_wait=True)
        (read,) = watch.heard()
        assert read.issuers is None and "issuers.toml" in read.fault
        with pytest.raises(Unavailable, match="which issuers it trusts"):
            watch.verifier.verify("a.token.of-an-issuer", "").send(None)
        watch.write(a)
        assert watch.told() == first and set(watch.verifier.caches) == {"corp"}
        watch.write("[[issuer]")
        (read,) = watch.heard()
        assert read.issuers == first, "the file before counts"

    run(test)


SECRET = {"algorithms": ["HS256"], "secret_file": "secret"}
"""Fields of an issuer that shares a secret."""


@pytest.mark.parametrize(
    ("fields", "content", "mode", "reason"),
    [
        (SECRET, "s" * 40, 0o644, r"/secret \(mode 0644\): run `chmod 600"),
        (SECRET, "short", 0o600, "/secret is too short"),
        (SECRET, "", 0o600, "/secret is empty"),
        (SECRET, None, 0o600, "no secret file .*/secret"),
        ({"jwks_file": "keys.json"}, None, 0o644, r"no file of keys .*/keys\.json"),
        ({"jwks_file": "keys.json"}, "{}", 0o644, r"corp are no JWKS .*/keys\.json"),
        ({"jwks_file": "keys.json"}, '{"keys": []}', 0o644, r"have none for ES256.*/keys\.json"),
        ({"jwks_file": "keys.json"}, "{}", 0o666, r"/keys\.json \(mode 0666\)"),
        ({"jwks_url": "https://h/", "jwks_ca": "ca.pem"}, None, 0o644, r"ca\.pem.*No such file"),
        ({"jwks_url": "https://h/", "jwks_ca": "ca.pem"}, "x", 0o644, r"ca\.pem"),
    ],
    ids=range(10),
)
def test_a_file_counts_only_if_the_files_that_it_names_do(
    tmp_path: Path, fields: dict[str, Any], content: str | None, mode: int, reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    named = tmp_path / str(list(fields.values())[-1])
    if content is not None:
        named.write_text(content)
        named.chmod(mode)
    good, bad = issuer_toml(jwks_file="a", **B), issuer_toml(**fields)

    def test() -> None:
        watch = Watch(tmp_path / "issuers.toml", good)
        assert set(watch.told()) == {"b"}
        kept = watch.verifier.caches["b"]
        with caplog.at_level(logging.ERROR):
            watch.write(bad)
            (read,) = watch.heard()
        assert re.search(reason, read.fault) and set(read.issuers) == {"b"}
        assert watch.verifier.caches == {"b": kept}, "the old one stays"
        (said,) = caplog.records
        assert re.search(reason, said.getMessage())
        with pytest.raises(DanubeError, match=reason):  # at a start
            Watch(tmp_path / "issuers.toml", bad)

    run(test)


def test_a_file_counts_when_what_it_names_is_repaired(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    secret.chmod(0o644)

    def test() -> None:
        watch = Watch(tmp_path / "issuers.toml", issuer_toml(jwks_file="a", **B))
        watch.told()
        watch.write(issuer_toml(**SECRET))
        assert watch.heard()[-1].fault
        secret.chmod(0o600)
        assert set(watch.told()) == {"corp"} == set(watch.verifier.caches)

    run(test)


def test_keys_that_cannot_be_read_again_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys before count meanwhile, so no client tells."""
    monkeypatch.setattr(key_cache, "FILE_SECONDS", 0.01)
    path, keys = tmp_path / "issuers.toml", tmp_path / "a"

    async def until(watch: Watch, done: Callable[[str], bool]) -> str:
        async with asyncio.timeout(20):
            while True:
                for read in watch.heard():
                    if done(read.fault):
                        return str(read.fault)
                await asyncio.sleep(0.01)

    async def test() -> None:
        watch = Watch(path, issuer_toml(jwks_file="a") + issuer_toml(jwks_file="b", **B))
        assert watch.told()
        sound = keys.read_text()
        keys.write_text("garbage")
        fault = await until(watch, bool)
        assert fault.startswith("issuer corp (its keys before count for ") and str(keys) in fault
        keys.write_text(sound)
        await until(watch, lambda fault: fault == "")
        watch.watch.close()

    asyncio.run(test())


def test_it_is_told_until_it_has_stored_it(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    a, b = issuer_toml(jwks_file="a"), issuer_toml(jwks_file="b", **B)

    def test() -> None:
        watch = Watch(path, a + b)
        assert set(watch.told()) == {"corp", "b"}
        watch.write(a)
        watch.turn()
        watch.turn()
        assert set(watch.answer(Unavailable("it starts again")).issuers) == {"corp"}
        watch.turn(RETRY_NS / SECOND_NS / 2)
        assert watch.asked == [], "not at once"
        watch.turn(RETRY_NS / SECOND_NS)
        watch.write(a + issuer_toml(jwks_file="b", audience="x", **B))
        for _ in range(3):
            watch.turn()
        assert set(watch.answer().issuers) == {"corp"}, "one at a time"
        assert set(watch.told()) == {"corp", "b"}, "it has come back meanwhile"

    run(test)
