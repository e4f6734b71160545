"""ADMIN with an audit log: what counts as a change, and what happens between its record and the change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube_fast.broker import admin
from danube_fast.errors import (
    DanubeError,
    Internal,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.security.audit import AuditRecord, fingerprint
from danube_fast.security.curve import new_key_pair
from danube_fast.types import REPLY_TOPICS
from danube_fast.workers.coordinator.administration import (
    DENIED_ARGUMENTS_BYTES_MAX,
    READS,
    SHOWN_ARGUMENTS,
    Administration,
)

CHANGES = {
    "add_api_key", "create_namespace", "create_topic", "delete_namespace", "delete_security", "delete_subscription", "delete_topic",
    "end_sign_ons",
    "move_topic", "purge_topic", "rotate_server_key", "set_binding", "set_credential", "set_failure_policy", "set_namespace_policy",
    "set_namespace_quota",
    "set_principal", "set_role", "set_topic", "set_topic_policy", "skip_messages",
}  # fmt: skip
NOT_SHOWN = {"label", "salt", "digest"}
"""Arguments of changes that are free text, or of use to an attacker."""


class Rig:
    """A client, its administration, and a log whose disk is this test."""

    def __init__(self) -> None:
        self.may = True
        self.begun: list[tuple[AuditRecord, Any]] = []
        self.ends: list[DanubeError | None] = []
        self.denials: list[Any] = []
        self.replies: list[Any] = []
        self.made: list[str] = []
        audit: Any = SimpleNamespace(
            begin=lambda record, go_on: self.begun.append((record, go_on)),
            end=lambda record, error: self.ends.append(error),
            denials=SimpleNamespace(note=self.denials.append),
        )
        namespaces = SimpleNamespace(create=lambda name, now_ns: self.made.append(name))
        topics = SimpleNamespace(namespaces=namespaces)
        context: Any = SimpleNamespace(
            topics=topics, clock=SimpleNamespace(wall_ns=lambda: 1, monotonic_ns=lambda: 0)
        )
        self.session = Session(3, b"token", b"\0one", "raw", "ann")
        self.charged: list[AuditRecord] = []
        self.is_over = False
        rates: Any = SimpleNamespace(charge=self.charge)
        self.administration = Administration(
            context, self, audit, lambda number, reply: self.replies.append(reply), rates
        )

    def authorize(self, principal: str, permission: Any, resource: str) -> None:
        if not self.may:
            raise PermissionDenied(f"{principal} may not {permission} {resource}")

    def charge(self, principal: str, record: AuditRecord, **whence: str) -> None:
        self.charged.append(record)
        if self.is_over:
            raise ResourceExhausted("too many")

    def ask(self, operation: str, **arguments: Any) -> None:
        self.administration.handle(self.session, p.Admin(9, operation, arguments))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_every_operation_is_a_read_or_a_change() -> None:
    known = set(admin.OPERATIONS)
    assert known >= READS
    assert known - READS == CHANGES, "is the new one a change? enter it"
    arguments = {
        name for change in CHANGES for name in admin.OPERATIONS[change].arguments.__struct_fields__
    }
    assert arguments - SHOWN_ARGUMENTS == NOT_SHOWN, (
        "may the value of the new argument be recorded?"
    )


def test_a_change_waits_for_its_record(rig: Rig) -> None:
    rig.ask("create_namespace", namespace="shop")
    ((record, go_on),) = rig.begun
    assert (record.action, record.resource, record.request) == (
        "create_namespace",
        "namespace:shop",
        "3.9",
    )
    assert not rig.made and not rig.replies
    go_on(None)
    assert rig.made == ["shop"] and rig.ends == [None]
    assert isinstance(rig.replies[0], p.Result)


def test_a_change_without_a_record_is_not_made(rig: Rig) -> None:
    rig.ask("create_namespace", namespace="shop")
    rig.begun[0][1](Unavailable("the disk"))
    assert not rig.made and rig.replies[0].code == Unavailable.code


def test_one_change_too_many_is_not_begun(rig: Rig) -> None:
    rig.is_over = True
    rig.ask("create_namespace", namespace="shop")
    rig.may = False
    rig.ask("create_namespace", namespace="denied")
    (record,) = rig.charged
    assert record.arguments == {"namespace": "shop"}, "charged for its line as it is written"
    assert not rig.begun and not rig.made
    assert [reply.code for reply in rig.replies] == [ResourceExhausted.code, PermissionDenied.code]


def test_a_right_that_is_taken_meanwhile_counts(rig: Rig) -> None:
    rig.ask("create_namespace", namespace="shop")
    rig.may = False
    rig.begun[0][1](None)
    assert not rig.made and rig.replies[0].code == PermissionDenied.code
    assert [type(error) for error in rig.ends] == [PermissionDenied]


def test_a_session_that_ends_meanwhile_changes_nothing(rig: Rig) -> None:
    rig.ask("create_namespace", namespace="shop")
    rig.session.closed = True
    rig.begun[0][1](None)
    assert not rig.made and [type(error) for error in rig.ends] == [Unavailable]


def test_a_bad_operation_ends_no_loop(rig: Rig) -> None:
    rig.ask("delete_namespace", namespace="shop")
    rig.begun[0][1](None)
    assert [type(error) for error in rig.ends] == [Internal]
    assert rig.replies[0].code == Internal.code


def test_a_denial_is_noted_and_answered_at_once(rig: Rig) -> None:
    rig.may = False
    rig.ask("create_namespace", namespace="shop")
    rig.ask("cluster_status")
    assert [(each.action, each.resource) for each in rig.denials] == [
        ("create_namespace", "namespace:shop"), ("cluster_status", "cluster"),
    ]  # fmt: skip
    assert [reply.code for reply in rig.replies] == [PermissionDenied.code] * 2
    assert not rig.begun and not rig.ends


def shown_of_denied(rig: Rig, operation: str, **arguments: Any) -> dict[str, Any]:
    rig.may = False
    rig.ask(operation, **arguments)
    shown = dict(rig.denials.pop().arguments)
    assert len(msgspec.json.encode(shown)) <= DENIED_ARGUMENTS_BYTES_MAX
    return shown


def test_a_long_argument_of_a_denied_change_hides_no_other(rig: Rig) -> None:
    bind = {"binding": "b", "subject": "user:pia", "role": "admin"}
    assert shown_of_denied(rig, "set_binding", **bind, scope="x" * 199) == {
        **bind,
        "scope": "x" * 199,
    }
    long = shown_of_denied(
        rig, "set_binding", **bind | {"binding": "b" * 900, "subject": "s" * 900}, scope="x" * 900
    )
    assert long == {
        **bind,
        **{
            name: f"{sign * 57}..."
            for name, sign in [("binding", "b"), ("subject", "s"), ("scope", "x")]
        },
    }


@pytest.mark.parametrize("sign", ["g", "\U0001f511", "\0"])
def test_the_longest_arguments_of_a_denied_change_stay_in_bounds(rig: Rig, sign: str) -> None:
    many = [sign * 900] * 100
    shown = shown_of_denied(
        rig,
        "set_principal",
        name="pia",
        groups=many,
        credentials=many,
        roles=["admin", *many],
        scope=many[0],
    )
    assert shown["name"] == "pia" and shown["roles"][0] == "admin"
    keys = [f"curve:{new_key_pair().public}"] * 30
    shown = shown_of_denied(rig, "set_principal", name="pia", credentials=keys, roles=["admin"])
    assert shown["credentials"][0] == fingerprint(keys[0]) and shown["roles"] == ["admin"]
    names = {f"{number}{sign * 900}": 1 for number in range(100)}
    assert list(shown_of_denied(rig, "set_namespace_quota", namespace="shop", values=names)) == [
        "namespace",
        "values",
    ]


@pytest.mark.parametrize("operation", ["create_topic", "delete_topic"])
def test_reply_topics_are_not_recorded(rig: Rig, operation: str) -> None:
    rig.may = False
    rig.ask(operation, topic=f"{REPLY_TOPICS}0123")
    assert not rig.denials and not rig.begun and len(rig.replies) == 1


@pytest.mark.parametrize("owner", ["ann", "pia"])
def test_changes_of_a_reply_topic_are_recorded_but_those_of_its_owner(rig: Rig, owner: str) -> None:
    """A client without any right could fill the log with them."""
    topics = rig.administration._context.topics
    topics.topic = lambda name: SimpleNamespace(topic=name, owner=owner)  # type: ignore[method-assign, assignment, return-value]
    topics.require_stable = rig_refuses  # type: ignore[method-assign]
    rig.ask("set_topic", topic=f"{REPLY_TOPICS}0123", partitions=3)
    assert len(rig.begun) == (owner != "ann")


def rig_refuses(name: str) -> Any:
    raise Unavailable(name)


def test_what_is_no_operation_is_not_recorded(rig: Rig) -> None:
    rig.ask("x" * 1000)
    rig.ask("create_namespace", namespace=7)
    assert not rig.denials and not rig.begun and len(rig.replies) == 2
