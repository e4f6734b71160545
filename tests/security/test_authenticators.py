"""Authenticators of other packages: what they say is checked, and their faults let no one in."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.config import Settings, load_settings
from danube_fast.errors import InvalidArgument, PermissionDenied, Unavailable
from danube_fast.security.authenticators import (
    LIFETIME_NS_MAX,
    AuthenticatorRules,
    check_authenticator,
)
from danube_fast.security.issuers import Issuer
from danube_fast.security.policy import Policy
from danube_fast.security.question_threads import (
    ANSWER_SECONDS,
    THREADS_MAX,
    THREADS_OF_ONE_MAX,
)
from danube_fast.security.tokens import Verified
from danube_fast.workers.sign_on import authenticator, sign_on
from danube_fast.workers.sign_on.authenticator import AskedAuthenticator, load_authenticator
from danube_fast.workers.sign_on.verifier import Verifier
from tests.delivery.sign_on_rig import AUDIENCE, ISSUER, IssuerKey
from tests.security.authorizer_rig import Moved
from tests.security.rules import install_logins
from tests.workers.broker import ROOT, wait_until

PAGE = ROOT / "docs/security.md"
HERE = "192.0.2.7"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what it was asked; the package is on the module path."""
    install_logins(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return tmp_path / "asked"


def loaded(asked: Path, **rules: Any) -> AskedAuthenticator:
    settings = Settings(authenticator=f"logins:{asked}", **rules)
    found = load_authenticator(settings, SystemClock())
    assert found is not None
    return found


def answer(question: Coroutine[Any, Any, Verified]) -> Verified:
    return asyncio.run(question)


def refused(asked: Path, secret: str, **rules: Any) -> str:
    with pytest.raises(PermissionDenied) as caught:
        answer(loaded(asked, **rules).verify(secret, HERE))
    return str(caught.value)


def test_it_says_whose_a_secret_is(asked: Path) -> None:
    before_ns = time.time_ns()
    found = answer(loaded(asked).verify("user:pia+auditors+auditors+not/a/name", HERE))
    assert found[:2] == ("pia", ["auditors"])
    assert (found.source, found.registered) == ("authenticator:logins", True)
    assert before_ns < found.expires_ns - LIFETIME_NS_MAX < time.time_ns()
    assert asked.read_text() == f"user {HERE} False\n", "asked in another thread than the loop's"


def test_it_may_end_a_sign_on_sooner_and_not_later(asked: Path) -> None:
    soon = answer(loaded(asked).verify("ends:60+pia", HERE)).expires_ns - time.time_ns()
    assert 50 * SECOND_NS < soon <= 60 * SECOND_NS
    late = answer(loaded(asked).verify("ends:999999+pia", HERE)).expires_ns - time.time_ns()
    assert late <= LIFETIME_NS_MAX


def test_its_names_stay_its_own(asked: Path) -> None:
    rules = {"authenticator_prefix": "ldap.", "authenticator_unregistered": True}
    found = answer(loaded(asked, **rules).verify("user:pia+auditors", HERE))
    assert found[:2] == ("ldap.pia", ["ldap.auditors"]) and not found.registered
    assert "not the name" in refused(asked, "user:", **rules), "a prefix alone is no name"


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        ("strange", "it knows no such secret"),
        ("no:pia", "authenticator logins: ... is locked out"),
        ("user:bootstrap-admin", "a reserved user"),
        ("user:", "not the name of a user"),
        ("user:a/b", "not the name of a user"),
        (f"user:{'x' * 129}", "not the name of a user"),
        ("odd:many", "more than 256 groups"),
        ("odd:past", "has expired"),
        ("", "malformed"),
        ("user:p\xeda", "malformed"),
        ("user:pia\x00", "malformed"),
    ],
)
def test_what_it_refuses_or_says_wrongly_is_refused(asked: Path, secret: str, words: str) -> None:
    assert words in refused(asked, secret)
    if words == "malformed":
        assert not asked.exists(), "it was asked about a text that is no secret"


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        ("fault:geheim", "ZeroDivisionError at house_logins.py:"),
        ("leave:geheim", "SystemExit at house_logins.py:"),
        ("down:geheim", "Unavailable at house_logins.py:"),
        ("garbage:list", "returned list instead of Authenticated or None"),
        ("garbage:text", "returned str"),
        ("garbage:true", "returned bool"),
        ("garbage:class", "returned type"),
        ("garbage:geheim", "KeyError at"),
        ("odd:principal", "its principal is list"),
        ("odd:number", "its principal is int"),
        ("odd:groups", "its groups are str"),
        ("odd:set", "its groups are set"),
        ("odd:float", "expires_ns is no time"),
        ("odd:true", "expires_ns is no time"),
        ("odd:negative", "expires_ns is no time"),
    ],
)
def test_its_faults_let_no_one_in_and_are_logged_without_secrets(
    asked: Path, caplog: pytest.LogCaptureFixture, secret: str, words: str
) -> None:
    faulty = loaded(asked)

    async def ask() -> None:
        for _ in range(3):
            with pytest.raises(Unavailable, match="try again"):
                await faulty.verify(secret, HERE)
        assert (await faulty.verify("user:pia", HERE)).principal == "pia"

    with caplog.at_level(logging.WARNING):
        asyncio.run(ask())
    assert caplog.text.count(words) == 1, "a fault is logged once in a while"
    assert "geheim" not in caplog.text


def test_those_that_hang_hold_up_no_loop_and_are_bounded(
    asked: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(authenticator, "THREADS_MAX", 3)
    slow = loaded(asked)

    def threads() -> int:
        return sum(thread.name == "authenticator" for thread in threading.enumerate())

    async def ask() -> None:
        questions = [asyncio.create_task(slow.verify("hang:pia", HERE)) for _ in range(5)]
        turns, began = 0, time.monotonic()
        while not all(question.done() for question in questions):
            await asyncio.sleep(0.005)
            turns += 1
        assert turns > 20, "the loop waited with them"
        assert time.monotonic() - began < 10, "they had more time than is given"
        for question in questions:
            with pytest.raises(Unavailable):
                await question
        assert threads() == 3
        with pytest.raises(Unavailable):  # no thread is free
            await slow.verify("user:pia", HERE)
        assert asked.read_text().count("hang") == 3  # noqa: ASYNC240
        Path(f"{asked}.go").touch()  # noqa: ASYNC240
        deadline = time.monotonic() + 20
        while threads():
            assert time.monotonic() < deadline, "threads that could end have not ended"
            await asyncio.sleep(0.01)
        found = await asyncio.gather(*(slow.verify("user:pia", HERE) for _ in range(20)))
        assert {each.principal for each in found} == {"pia"}

    with caplog.at_level(logging.WARNING):
        asyncio.run(ask())
    assert "has not answered within 0.5 s: 3 threads ask it" in caplog.text
    assert "Exception" not in caplog.text, "late answers are faults of the loop"


def test_one_address_has_not_all_threads(asked: Path) -> None:
    slow = loaded(asked)

    async def ask() -> None:
        count = THREADS_MAX
        questions = [asyncio.create_task(slow.verify("hang:pia", HERE)) for _ in range(count)]
        await asyncio.sleep(0)  # they have begun
        found = await slow.verify("user:pia", "192.0.2.8")
        assert found.principal == "pia" and not any(question.done() for question in questions)
        Path(f"{asked}.go").touch()  # noqa: ASYNC240
        await asyncio.gather(*questions, return_exceptions=True)

    asyncio.run(ask())


def test_threads_that_hang_are_replaced_up_to_a_number(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "REPLACED_MAX", 2 * THREADS_OF_ONE_MAX)
    clock = Moved()
    slow = load_authenticator(Settings(authenticator=f"logins:{asked}"), clock)
    assert slow is not None

    def later() -> None:
        clock.moved_ns += int(ANSWER_SECONDS * SECOND_NS)
        slow.do_work()

    async def until_asked(count: int) -> None:
        deadline = time.monotonic() + 20
        while not asked.exists() or asked.read_text().count("hang") < count:  # noqa: ASYNC240
            assert time.monotonic() < deadline, f"{count} questions were not asked"
            await asyncio.sleep(0.01)

    async def ask() -> None:
        questions = []
        most = THREADS_MAX + 2 * THREADS_OF_ONE_MAX
        for number in range(most // THREADS_OF_ONE_MAX):
            address = f"192.0.2.{number}"
            questions += [
                asyncio.create_task(slow.verify("hang:pia", address))
                for _ in range(THREADS_OF_ONE_MAX)
            ]
            await until_asked(len(questions))
            if len(questions) == THREADS_MAX:
                later()
                assert slow.threads_lost == THREADS_MAX
                with pytest.raises(Unavailable):
                    await slow.verify("user:pia", address)
                found = await slow.verify("user:pia", HERE)
                assert found.principal == "pia", "no thread has taken the place of a lost one"
        later()
        assert slow.threads_lost == most
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await slow.verify("user:pia", "192.0.2.0")
        assert time.monotonic() - began < 1, "it is not refused at once"
        beyond = asyncio.create_task(slow.verify("user:pia", HERE))
        await asyncio.sleep(0)
        Path(f"{asked}.go").touch()  # noqa: ASYNC240
        assert (await beyond).principal == "pia"
        await asyncio.gather(*questions, return_exceptions=True)
        deadline = time.monotonic() + 20
        while slow.threads_lost:
            assert time.monotonic() < deadline, "threads that have ended are lost still"
            await asyncio.sleep(0.01)

    asyncio.run(ask())


def test_a_coordinator_that_cannot_be_told_hides_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise Unavailable("the mailbox is full")

    def refused(booted: Any) -> None:
        raise InvalidArgument("the cause")

    booted = SimpleNamespace(mailbox=SimpleNamespace(notify=fail), exit_code_of=lambda run: run())
    monkeypatch.setattr(sign_on, "boot", lambda: booted)
    monkeypatch.setattr(sign_on, "SignOnProcess", refused)
    with pytest.raises(InvalidArgument, match="the cause"):
        sign_on.main()


def test_an_answer_behind_the_end_of_the_loop_is_dropped(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "ANSWER_SECONDS", 0.1)
    faults: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    with pytest.raises(Unavailable):
        answer(loaded(asked).verify("hang:pia", HERE))
    Path(f"{asked}.go").touch()

    def are_gone() -> bool:
        return all(thread.name != "authenticator" for thread in threading.enumerate())

    wait_until("the end of the thread", are_gone, 20)
    assert not faults


def test_each_text_has_one_judge(asked: Path) -> None:
    key = IssuerKey()
    issuer = Issuer(
        name="corp", issuer=ISSUER, audience=AUDIENCE, algorithms=["ES256"], jwks_file="/missing"
    )
    verifier = Verifier(Policy(), [issuer], SystemClock(), loaded(asked))

    def reason(text: str) -> str:
        with pytest.raises((PermissionDenied, Unavailable)) as caught:
            answer(verifier.verify(text, HERE))
        return str(caught.value)

    assert "API key" in reason("dfk_wrong")
    assert "issuer corp" in reason(key.token())
    assert "issuer corp" in reason(key.token(headers={"crit": ["x"]}))
    assert not asked.exists(), "it saw a secret that another one judges"
    assert "knows no such secret" in reason(key.token(iss="https://other.example.com/"))
    assert "knows no such secret" in reason("a.b.c")
    assert answer(verifier.verify("user:pia", HERE)).principal == "pia"
    alone = Verifier(Policy(), [], SystemClock(), loaded(asked))
    assert answer(alone.verify("user:pia", HERE)).principal == "pia"


def test_the_example_of_the_page(tmp_path: Path) -> None:
    section = PAGE.read_text().split("\n## Components of other packages\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    secrets = tmp_path / "badges"
    secrets.write_text("b-1 pia\nb-2 paul\n")
    badges = AskedAuthenticator(
        AuthenticatorRules("badges"), names["Badges"](str(secrets)), SystemClock()
    )
    assert answer(badges.verify("b-2", HERE))[:2] == ("paul", ["badges"])
    with pytest.raises(PermissionDenied, match="no such secret"):
        answer(badges.verify("b-3", HERE))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unknown", "no installed package has an authenticator 'unknown'; there are: .*logins"),
        ("broken:x", "cannot be loaded.*no directory"),
        (
            "broken:ldap://user:geheim@host",
            "cannot be loaded: OSError: no directory for ...@...; repair it",
        ),
        (
            "broken:ldap://user:geh%20eim@host",
            "cannot be loaded: OSError: no directory for ...@...; repair it",
        ),
        ("leaving:geheim", "cannot be loaded: SystemExit: ...; repair it"),
        ("gone", "cannot be loaded: ModuleNotFoundError"),
        ("hanging:geheim", "authenticator hanging .* not been made within 0.5 s; repair"),
        ("nothing:x", "gives no object with authenticate\\(secret, address\\)"),
    ],
)
def test_one_that_cannot_be_had(asked: Path, text: str, words: str) -> None:
    settings = Settings(authenticator=text, worker_start_timeout_ms=1000)
    with pytest.raises((InvalidArgument, Unavailable), match=words) as caught:
        load_authenticator(settings, SystemClock())
    assert "geheim" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_setting_is_checked_before_anything_begins(asked: Path) -> None:
    check_authenticator("logins:/any/file")
    with pytest.raises(InvalidArgument, match="no installed package"):
        check_authenticator("unknown")
    with pytest.raises(InvalidArgument, match="no record can hold"):
        check_authenticator("bad name")
    assert load_authenticator(Settings(), SystemClock()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sign_on": ""}, "authenticator .* means nothing without sign_on"),
        ({"authenticator": ""}, "authenticator_prefix .* means nothing without authenticator"),
        ({"authenticator_prefix": "a/b"}, "authenticator_prefix"),
        ({"authenticator_prefix": "a\n"}, "authenticator_prefix"),
    ],
)
def test_settings_that_could_not_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    good = {
        "auth": "required", "sign_on": "127.0.0.1:0", "tls_certificate": "c", "tls_key": "k",
        "authenticator": "logins", "authenticator_prefix": "ldap.",
    }  # fmt: skip
    load_settings(good)
    with pytest.raises(InvalidArgument, match=reason):
        load_settings({**good, **changes})
