"""Another file of issuers without a restart: which file counts, which keys are kept, and which sign-ons end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import InvalidArgument, Unavailable
from danube_fast.security.curve import new_key_pair
from danube_fast.security.live_files import LiveFiles
from danube_fast.security.policy import Policy
from danube_fast.security.records import Principal, SignOn
from danube_fast.workers.sign_on.issuer_watch import RETRY_NS, IssuerWatch, issuer_files
from danube_fast.workers.sign_on.verifier import Verifier
from tests.delivery.sign_on_rig import issuer_toml

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

    def __init__(self, path: Path, text: str, *records: Any) -> None:
        self.path, self.now_ns = path, 0
        self.digests: dict[str, str] = {}
        """Of the entries, as the coordinator was told last."""
        self.asked: list[tuple[Any, Callable[[Any], None]]] = []
        self.policy = Policy()
        for record in (Principal("pia"), *records):
            self.policy.put(record)
        mailbox: Any = SimpleNamespace(
            call=lambda peer, message, on_reply, timeout_ms: self.asked.append((message, on_reply))
        )
        self.write(text)
        settings: Any = SimpleNamespace(tokens=str(path))
        files = issuer_files(settings)
        self.verifier = Verifier(self.policy, files.loaded, SystemClock(), None)
        self.watch = IssuerWatch(files, self.verifier, self.policy, mailbox)
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
        """All that the coordinator is told in the next seconds, digests of entries left out."""
        found = []
        for _ in range(6):
            self.turn()
            while self.asked:
                message = self.answer()
                if isinstance(message, m.IssuersRead):
                    self.digests = message.issuers
                    message = m.IssuersRead(message.fault)
                found.append(message)
                self.turn(0)
        return found


def run(test: Callable[[], None]) -> None:
    """Run a test in an event loop, which loads of keys need."""

    async def inside() -> None:
        test()

    asyncio.run(inside())


def signed(source: str) -> SignOn:
    return SignOn(new_key_pair().public, "pia", [], 2**62, source)


def test_issuers_that_are_gone_or_differ_end_their_sign_ons(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    a, b = issuer_toml(jwks_file="a"), issuer_toml(jwks_file="b", **B)
    c = issuer_toml(jwks_file="c", name="c", issuer="https://c.example.com/")

    def test() -> None:
        watch = Watch(
            path, a + b, signed("jwt:corp"), signed("jwt:b"), signed("api_key:" + "k" * 16)
        )
        assert watch.heard() == [m.IssuersRead("")]
        kept = watch.verifier.caches["corp"]
        watch.write(a + c)
        assert watch.heard() == [m.EndSignOns("jwt:b"), m.IssuersRead("")]
        assert list(watch.verifier.caches) == ["corp", "c"]
        assert watch.verifier.caches["corp"] is kept, "its keys are not fetched anew"
        watch.write(issuer_toml(jwks_file="a", audience="other") + c)
        assert watch.heard() == [m.EndSignOns("jwt:corp"), m.IssuersRead("")]
        assert watch.verifier.caches["corp"] is not kept
        watch.write("issuer = []")
        *ends, _ = watch.heard()
        assert sorted(each.source for each in ends) == ["jwt:c", "jwt:corp"]
        assert watch.verifier.caches == {}
        watch.write("[[issuer]]")
        (told,) = watch.heard()
        assert isinstance(told, m.IssuersRead) and "issuers.toml" in told.fault
        watch.write(a)
        assert watch.heard() == [m.IssuersRead("")]
        assert list(watch.verifier.caches) == ["corp"]

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


def test_an_end_is_asked_for_until_the_coordinator_has_it(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    a, b = issuer_toml(jwks_file="a"), issuer_toml(jwks_file="b", **B)

    def test() -> None:
        watch = Watch(path, a + b)
        assert watch.heard() == [m.IssuersRead("")]
        watch.write(a)
        watch.turn()
        watch.turn()
        assert watch.answer(Unavailable("it starts again")) == m.EndSignOns("jwt:b")
        watch.turn(RETRY_NS / SECOND_NS / 2)
        assert watch.asked == [], "not at once"
        watch.turn(RETRY_NS / SECOND_NS)
        watch.write(a + issuer_toml(jwks_file="b", audience="x", **B))
        for _ in range(3):
            watch.turn()
        watch.write(a)
        for _ in range(3):
            watch.turn()
        assert watch.answer() == m.EndSignOns("jwt:b")
        assert watch.heard() == [m.EndSignOns("jwt:b"), m.IssuersRead("")], (
            "it has gone again meanwhile"
        )

    run(test)


def test_the_coordinator_is_told_which_entries_are_in_use(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    a, b = issuer_toml(jwks_file="a"), issuer_toml(jwks_file="b", **B)

    def test() -> None:
        first = Watch(path, a + b)
        first.heard()
        assert set(first.digests) == {"corp", "b"}
        again = Watch(path, b + a)
        again.heard()
        assert again.digests == first.digests, "the order means nothing"
        again = Watch(path, a + issuer_toml(jwks_file="b", prefix="x", **B))
        again.heard()
        differ = {name for name in first.digests if again.digests[name] != first.digests[name]}
        assert differ == {"b"}

    run(test)


def test_what_is_not_trusted_when_a_process_starts_ends(tmp_path: Path) -> None:
    def test() -> None:
        text = issuer_toml(jwks_file="a")
        watch = Watch(tmp_path / "issuers.toml", text, signed("jwt:corp"), signed("jwt:b"))
        assert watch.heard() == [m.EndSignOns("jwt:b"), m.IssuersRead("")]
        watch.policy.put(signed("jwt:gone"))
        watch.watch.compare()  # the coordinator has started again
        assert {each.source for each in watch.heard() if isinstance(each, m.EndSignOns)} == {
            "jwt:b", "jwt:gone",
        }  # fmt: skip

    run(test)
