"""Authorizers of other packages: they take rights away, and their faults deny."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from danube_fast.security.authorizers import SLOW_NS, check_authorizer, load_authorizer
from danube_fast.security.records import BOOTSTRAP, Binding, Principal
from danube_fast.types import Permission
from danube_fast.workers.process.access import Access
from tests.security.rules import install

P = Permission
TOPIC = "/shop/orders"


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of rules; the package is on the module path."""
    install(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    path = tmp_path / "rules"
    path.write_text("pia produce /shop/\n")
    return path


def access_with(text: str) -> Access:
    """What a process knows where pia and ann may do everything by their roles."""
    access = Access(SystemClock(), load_authorizer(text, SystemClock()))
    access.is_loaded = True
    access.confirm()
    for user in ("pia", "ann", BOOTSTRAP):
        access.policy.put(Principal(user))
        access.policy.put(Binding(user, f"user:{user}", "admin", "cluster"))
    access.policy.put(Principal("nick"))
    return access


def test_it_takes_away_and_gives_nothing(rules: Path) -> None:
    access = access_with(f"rules:{rules}")
    with pytest.raises(PermissionDenied, match="a rule of the house"):
        access.authorize("pia", P.PRODUCE, TOPIC)
    assert not access.permits("pia", P.PRODUCE, TOPIC)
    for principal, permission, resource in (
        ("pia", P.CONSUME, TOPIC), ("pia", P.PRODUCE, "/other/orders"), ("ann", P.PRODUCE, TOPIC),
    ):  # fmt: skip
        access.authorize(principal, permission, resource)
        assert access.permits(principal, permission, resource)
    assert not access.permits("nick", P.CONSUME, TOPIC), "the rules do not mention nick"
    asked = Path(f"{rules}.asked").read_text()
    assert "nick" not in asked, "it is not asked for what roles do not give"


def test_its_faults_deny_and_are_logged(rules: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = access_with("bad")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(PermissionDenied, match="could not decide"):
                access.authorize("ann", P.CONSUME, TOPIC)
    assert not access.permits("ann", P.MANAGE_CLUSTER, "cluster")
    assert caplog.text.count("cannot decide") == 1, "a fault fills no log"
    assert access.version[2] == 0
    access.authorize(BOOTSTRAP, P.MANAGE_CLUSTER, "cluster")


def test_its_slow_answers_are_named(rules: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0]

    class Late:
        def authorize(self, principal: str, permission: Permission, resource: str) -> None:
            now[0] += 2 * SLOW_NS

    class Ticking(SystemClock):
        def monotonic_ns(self) -> int:
            return now[0]

    from danube_fast.security.authorizers import GuardedAuthorizer

    slow = GuardedAuthorizer("late", Late(), Ticking())
    with caplog.at_level(logging.WARNING):
        assert slow.permits("pia", P.CONSUME, TOPIC) and slow.permits("pia", P.CONSUME, TOPIC)
    assert caplog.text.count("it has to answer from memory") == 1


def test_new_rules_are_another_version(rules: Path) -> None:
    access = access_with(f"live:{rules}")
    before = access.version
    assert access.version == before and not access.permits("pia", P.PRODUCE, TOPIC)
    rules.write_text("pia consume /shop/orders\n")
    assert access.version != before and access.permits("pia", P.PRODUCE, TOPIC)


def test_reply_topics_are_no_matter_of_other_rules(rules: Path) -> None:
    rules.write_text("pia produce /\npia consume /\n")
    access = access_with(f"rules:{rules}")
    access.owner_of = lambda topic: "pia"
    access.authorize("pia", P.PRODUCE, "/system/reply-1")
    access.authorize("pia", P.CONSUME, "/system/reply-1")
    assert not access.permits("ann", P.CONSUME, "/system/reply-1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unknown", "no installed package has an authorizer 'unknown'; there are: .*rules"),
        ("broken:x", "cannot be loaded.*no rules"),
        ("gone", "cannot be loaded"),
        ("nothing:x", "gives no object with authorize"),
    ],
)
def test_one_that_cannot_be_had(rules: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        load_authorizer(text, SystemClock())


def test_the_setting_is_checked_before_anything_begins(rules: Path) -> None:
    check_authorizer("rules:/any/file", "required")
    with pytest.raises(InvalidArgument):
        check_authorizer("unknown", "required")
    with pytest.raises(FailedPrecondition, match="--auth required"):
        check_authorizer("rules", "none")
    nothing: Any = load_authorizer("", SystemClock())
    assert nothing is None
