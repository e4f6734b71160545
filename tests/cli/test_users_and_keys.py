"""`security users add` and `keys add` against a broker: what is not given stays, and what is refused changes nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.errors import FailedPrecondition
from danube_fast.security.curve import new_key_pair
from tests.cli.test_security_recipes import Shell, secured
from tests.delivery.test_security import SecuredServer
from tests.workers.broker import wait_until

KEY = f"curve:{new_key_pair().public}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("users")
    with SecuredServer(folder / "data", folder) as made:
        yield made


@pytest.fixture(scope="module")
def shell(server: SecuredServer) -> Shell:
    return secured(server)


@pytest.fixture
def admin(server: SecuredServer, shell: Shell) -> Iterator[Any]:
    with server.come_in("ann") as ann:
        yield ann.admin


def said(shell: Shell, line: str) -> tuple[int, str]:
    """The exit code of a command, and all that it says."""
    options: dict[str, Any] = {"stderr": subprocess.STDOUT}
    with shell.started(f"danube-fast security {line}", **options) as process:
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, output


def of(admin: Any, kind: str, user: str) -> list[dict[str, Any]]:
    """The records of a kind that are a user's."""
    field = {"principal": "name", "binding": "subject"}.get(kind, "principal")
    name = f"user:{user}" if kind == "binding" else user
    return [row for row in admin.list_security(kind) if row[field] == name]


def test_a_key_that_is_named_again_keeps_its_end_and_its_label(
    admin: Any, shell: Shell, server: SecuredServer
) -> None:
    public = server.new_key("billing")
    named = "billing --public-key-of billing.key"
    admin.set_principal("billing")
    admin.set_credential(f"curve:{public}", "billing", 86_400, "desk")
    (before,) = of(admin, "credential", "billing")
    assert before["expires_ns"]
    for line in (f"users add {named}", f"keys add {named}"):
        code, text = said(shell, line)
        assert code == 0, text
        assert of(admin, "credential", "billing") == [before], line
    assert "until 20" in text, "the end of the key is not told"
    code, text = said(shell, f"keys add {named} --expires-seconds 0 --label till")
    assert code == 0 and "until" not in text, text
    (after,) = of(admin, "credential", "billing")
    assert (after["expires_ns"], after["label"]) == (0, "till")


def test_a_key_that_has_ended_is_not_said_to_be_registered(admin: Any) -> None:
    admin.set_principal("late")
    admin.set_credential(KEY, "late", 1)
    (row,) = of(admin, "credential", "late")
    wait_until("the end of the key", lambda: time.time_ns() > row["expires_ns"])
    for change in (
        lambda: admin.set_credential(KEY, "late"),
        lambda: admin.set_principal("late", credentials=[KEY]),
    ):
        with pytest.raises(FailedPrecondition, match=r"has ended.*--expires-seconds"):
            change()
    admin.set_credential(KEY, "late", 0)
    assert of(admin, "credential", "late") == [{**row, "expires_ns": 0}]


@pytest.mark.parametrize("more", ["--uid 65534", "--uid -4", "--role nosuch", "--public-key-of ann.key"])  # fmt: skip
def test_a_user_that_is_refused_is_not_made(admin: Any, shell: Shell, more: str) -> None:
    code, text = said(shell, f"users add new {more} --group ops")
    assert code != 0, text
    assert of(admin, "principal", "new") == []


@pytest.mark.parametrize("more", ["--uid -4", "--role viewer --public-key-of ann.key"])
def test_a_change_that_is_refused_changes_nothing(admin: Any, shell: Shell, more: str) -> None:
    admin.set_principal("off", ["ops"], disabled=True)
    before = of(admin, "principal", "off"), of(admin, "binding", "off")
    code, text = said(shell, f"users add off --enabled --group dev {more}")
    assert code != 0, text
    assert (of(admin, "principal", "off"), of(admin, "binding", "off")) == before


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("check ann produce shop/orders", 2, "scope"), ("check ann produce ''", 2, "scope"),
        ("check user:ann produce /shop/orders", 2, "not the name of a"),
        ("check nosuch produce /shop/orders", 1, "there is no user of that name"),
        ("check ann produce /shop/orders", 0, "ann may produce"),
    ],
)  # fmt: skip
def test_a_check_of_what_makes_no_sense_is_no_refusal(
    shell: Shell, line: str, code: int, told: str
) -> None:
    found, text = said(shell, line)
    assert (found, told in text) == (code, True), text


@pytest.mark.parametrize(
    "change",
    [
        lambda admin: admin.set_credential(KEY, "bootstrap-admin"),
        lambda admin: admin.set_credential("uid:4711", "bootstrap-admin"),
        lambda admin: admin.set_credential("mtls:CN=x", "bootstrap-admin"),
        lambda admin: admin.set_principal("bootstrap-admin", disabled=True),
        lambda admin: admin.set_principal("bootstrap-admin", ["ops"]),
    ],
    ids=["curve", "uid", "mtls", "disabled", "groups"],
)
def test_the_first_administrator_takes_nothing_else(admin: Any, change: Any) -> None:
    with pytest.raises(FailedPrecondition, match="its key file only; make a user of your own"):
        change(admin)
    assert of(admin, "credential", "bootstrap-admin") == []
