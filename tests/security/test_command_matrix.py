"""Who may run which command and which operation: every one, by each permission alone, at each scope.

A command or an operation that is new has to be entered in a table here, with the right that it needs.
"""

from __future__ import annotations

import contextlib
import typing
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import admin
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, NotOwner, PermissionDenied
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.security.records import Binding, Principal, Role
from danube_fast.types import Permission
from danube_fast.workers.coordinator.lookups import Lookups
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.commands import Commands
from danube_fast.workers.shard.commands import SessionCommands

TOPIC, SUBSCRIPTION, DEAD = "/shop/orders", "billing", "/shop/dead"
HERE, HIDDEN = 7, 8
ON_SUBSCRIPTION = f"{TOPIC}#{SUBSCRIPTION}"
SCOPES = (
    "cluster", "namespace:shop", "namespace:other", TOPIC, "/shop/other", "/other/orders", ON_SUBSCRIPTION,
    "/shop/other#billing", "subject:orders", "subject:*",
)  # fmt: skip
COVER: dict[str, set[str]] = {
    "cluster": {"cluster"},
    "namespace": {"cluster", "namespace:shop"},
    "topic": {"cluster", "namespace:shop", TOPIC},
    "subscription": {"cluster", "namespace:shop", TOPIC, ON_SUBSCRIPTION},
}
"""Scopes that cover a resource of a kind."""
WHO = "eve"
P = Permission

OF_TOPIC: dict[str, Any] = {"topic": TOPIC}
OF_NAMESPACE: dict[str, Any] = {"namespace": "shop"}
OF_SUBSCRIPTION: dict[str, Any] = {"topic": TOPIC, "subscription": SUBSCRIPTION}
NAMED = {"topic": TOPIC, "namespace": "shop"}
FILTERED = "answers what may be looked up"
MORE: dict[str, list[tuple[Permission, str]]] = {
    "move_topic": [(P.LOOKUP, TOPIC)], "set_namespace_quota": [(P.LOOKUP, "namespace:shop")],
}  # fmt: skip
"""Rights that an operation needs beside."""
OPERATIONS: dict[str, tuple[Permission, str, dict[str, Any]]] = {
    "check_permission": (
        P.MANAGE_CLUSTER, "cluster", {"principal": WHO, "permission": "lookup", "resource": TOPIC},
    ),
    "cluster_status": (P.MANAGE_BROKER, "cluster", {}),
    "create_namespace": (P.MANAGE_NAMESPACE, "namespace", OF_NAMESPACE),
    "create_topic": (P.MANAGE_TOPIC, "topic", OF_TOPIC),
    "delete_namespace": (P.MANAGE_NAMESPACE, "namespace", OF_NAMESPACE),
    "delete_security": (P.MANAGE_CLUSTER, "cluster", {"record_kind": "principal", "name": WHO}),
    "delete_subscription": (P.MANAGE_TOPIC, "topic", OF_SUBSCRIPTION),
    "delete_topic": (P.MANAGE_TOPIC, "topic", OF_TOPIC),
    "describe_namespace": (P.LOOKUP, "namespace", OF_NAMESPACE),
    "describe_server_key": (P.MANAGE_BROKER, "cluster", {}),
    "describe_subscription": (P.LOOKUP, "topic", OF_SUBSCRIPTION),
    "describe_topic": (P.LOOKUP, "topic", OF_TOPIC),
    "flush_history": (P.CONSUME, "topic", OF_TOPIC),
    "list_audit": (P.MANAGE_CLUSTER, "cluster", {}),
    "list_clients": (P.MANAGE_BROKER, "cluster", {}),
    "list_namespaces": (P.LOOKUP, FILTERED, {}),
    "end_sign_ons": (P.MANAGE_CLUSTER, "cluster", {"principal": WHO}),
    "list_security": (P.MANAGE_CLUSTER, "cluster", {"record_kind": "principal"}),
    "list_sign_ons": (P.MANAGE_CLUSTER, "cluster", {}),
    "list_subscriptions": (P.LOOKUP, "topic", OF_TOPIC),
    "list_topics": (P.LOOKUP, FILTERED, OF_NAMESPACE),
    "move_topic": (P.MANAGE_BROKER, "cluster", {"topic": TOPIC, "worker": 1}),
    "namespace_policy": (P.LOOKUP, "namespace", OF_NAMESPACE),
    "purge_topic": (P.MANAGE_TOPIC, "topic", OF_TOPIC),
    "release_history_hold": (P.CONSUME, "topic", {**OF_TOPIC, "hold": "h"}),
    "renew_history_hold": (P.CONSUME, "topic", {**OF_TOPIC, "hold": "h", "hold_seconds": 1}),
    "rotate_server_key": (P.MANAGE_CLUSTER, "cluster", {"step": "prepare"}),
    "set_binding": (
        P.MANAGE_CLUSTER, "cluster",
        {"binding": "b", "subject": f"user:{WHO}", "role": "admin", "scope": "cluster"},
    ),
    "add_api_key": (
        P.MANAGE_CLUSTER, "cluster",
        {"principal": WHO, "key_id": "k" * 16, "salt": "0" * 32, "digest": "0" * 64},
    ),
    "set_credential": (P.MANAGE_CLUSTER, "cluster", {"credential": "uid:1", "principal": WHO}),
    "set_failure_policy": (P.MANAGE_TOPIC, "topic", {**OF_SUBSCRIPTION, "values": {}}),
    "set_namespace_policy": (P.MANAGE_NAMESPACE, "namespace", {**OF_NAMESPACE, "values": {}}),
    "set_namespace_quota": (P.MANAGE_CLUSTER, "cluster", {**OF_NAMESPACE, "values": {}}),
    "set_principal": (P.MANAGE_CLUSTER, "cluster", {"name": WHO}),
    "set_role": (P.MANAGE_CLUSTER, "cluster", {"name": "r", "permissions": ["lookup"]}),
    "set_topic": (P.MANAGE_TOPIC, "topic", {**OF_TOPIC, "partitions": 2}),
    "set_topic_policy": (P.MANAGE_TOPIC, "topic", {**OF_TOPIC, "values": {}}),
    "skip_messages": (P.MANAGE_TOPIC, "topic", OF_SUBSCRIPTION),
    "topic_policy": (P.LOOKUP, "topic", OF_TOPIC),
    "topic_stats": (P.LOOKUP, "topic", OF_TOPIC),
}  # fmt: skip
"""Operation -> the permission that it needs, on a resource of which kind, arguments that name that resource."""

FREE = "no right: the session itself"
OPENED = "no right: what the session has opened"
COORDINATOR = "asked by the coordinator"
COMMANDS: dict[type, tuple[str, list[tuple[Any, Permission, str]]]] = {
    p.Hello: (FREE, []),
    p.Ping: (FREE, [(p.Ping(1), P.LOOKUP, "")]),
    p.Bye: (FREE, [(p.Bye(1), P.LOOKUP, "")]),
    p.Lookup: (COORDINATOR, []),
    p.Admin: (COORDINATOR, []),
    p.Watch: (COORDINATOR, []),
    p.OpenProducer: ("", [(p.OpenProducer(1, HERE, "p"), P.PRODUCE, "topic")]),
    p.Subscribe: ("", [
        (p.Subscribe(1, 1, 1, HERE, SUBSCRIPTION, "shared"), P.CONSUME, "subscription"),
        (p.Subscribe(1, 1, 1, HERE, "other", "exclusive"), P.CONSUME, "topic"),
        (p.Subscribe(1, 1, 1, HERE, "", "reader"), P.CONSUME, "topic"),
        (p.Subscribe(1, 1, 1, HERE, SUBSCRIPTION, "reader"), P.CONSUME, "topic"),
        (p.Subscribe(1, 1, 1, HERE, f"{SUBSCRIPTION}#x", "shared"), P.CONSUME, "topic"),
        (p.Subscribe(1, 1, 1, HERE, f"{SUBSCRIPTION}\nx", "shared"), P.CONSUME, "topic"),
    ]),
    p.Publish: (OPENED, [(p.Publish(1), P.PRODUCE, "")]),
    p.CloseProducer: (OPENED, [(p.CloseProducer(1, HERE, 1), P.PRODUCE, "")]),
    p.Flow: (OPENED, [(p.Flow(1, 1, 1), P.CONSUME, "")]),
    p.Ack: (OPENED, [(p.Ack(1, []), P.CONSUME, "")]),
    p.Nack: (OPENED, [(p.Nack([]), P.CONSUME, "")]),
    p.Seek: (OPENED, [(p.Seek(1, 1, 0), P.CONSUME, "")]),
    p.CloseConsumer: (OPENED, [(p.CloseConsumer(1, 1), P.CONSUME, "")]),
    p.Extend: (OPENED, [(p.Extend([]), P.CONSUME, "")]),
}  # fmt: skip
"""Client command -> why it needs no right here, or examples with the right of each."""


class Reached(Exception):
    """No refusal came."""


class Marker:
    """A context of operations that tells that one was let through."""

    def __getattr__(self, name: str) -> Any:
        raise Reached(name)


def granted(*grants: tuple[Permission, str]) -> Access:
    """What a process knows where `eve` has these permissions, each alone in a role of its own, at these scopes."""
    access = Access(SystemClock())
    access.is_loaded = True
    access.confirm()
    access.policy.put(Principal(WHO))
    for number, (permission, scope) in enumerate(grants):
        access.policy.put(Role(f"r{number}", [permission]))
        access.policy.put(Binding(f"b{number}", f"user:{WHO}", f"r{number}", scope))
    return access


EACH = [(permission, scope) for permission in Permission for scope in SCOPES]


def outcome(access: Access, name: str, arguments: dict[str, Any]) -> DanubeError | None:
    """The refusal of an operation; None if it was reached."""
    ends: list[DanubeError | None] = []
    answer = admin.Answer(lambda value, error: ends.append(error))
    context: Any = Marker()
    try:
        admin.run(context, access, WHO, name, arguments, answer)
    except Reached:
        return None
    (error,) = ends
    assert error is not None, f"{name} has answered without a look at anything"
    return error


# ---------------------------------------------------------------- operations


def test_every_operation_is_in_the_table() -> None:
    assert set(OPERATIONS) == set(admin.OPERATIONS), "enter it with the right that it needs"


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_is_refused_exactly_without_its_right(name: str) -> None:
    needed, kind, arguments = OPERATIONS[name]
    more = MORE.get(name, [])
    for permission, scope in EACH:
        error = outcome(granted((permission, scope), *more), name, arguments)
        # who may look at a subscription may look its topic up
        seen = permission is P.LOOKUP and scope == ON_SUBSCRIPTION and kind == "topic"
        allowed = kind == FILTERED or (permission is needed and (scope in COVER[kind] or seen))
        if allowed:
            assert error is None, f"{name} with {permission} at {scope}: {error}"
        else:
            assert isinstance(error, PermissionDenied), f"{name}, {permission} at {scope}: {error}"
            assert WHO in str(error) and needed in str(error)
    if kind == FILTERED:
        assert admin.OPERATIONS[name].is_filtered
        return
    for grants in ([], more, [(needed, "cluster")] if more else []):
        assert isinstance(outcome(granted(*grants), name, arguments), PermissionDenied)
    stranger = granted(*[(permission, "cluster") for permission in Permission])
    stranger.policy.remove(f"principal/{WHO}")
    assert isinstance(outcome(stranger, name, arguments), PermissionDenied)


@pytest.mark.parametrize("name", ["release_history_hold", "renew_history_hold"])
def test_a_hold_without_its_topic_is_for_who_may_consume_all(name: str) -> None:
    arguments = {"hold": "h", **({"hold_seconds": 1} if name.startswith("renew") else {})}
    for permission, scope in EACH:
        error = outcome(granted((permission, scope)), name, arguments)
        allowed = (permission, scope) == (P.CONSUME, "cluster")
        assert (error is None) == allowed, f"{permission} at {scope}: {error}"


def test_every_topic_and_namespace_in_an_argument_is_asked_for() -> None:
    for name, operation in admin.OPERATIONS.items():
        values = {
            field: NAMED.get(field, value)
            for field, value in OPERATIONS[name][2].items()
        }  # fmt: skip
        asked: list[str] = []
        context: Any = Marker()

        def note(principal: str, permission: Permission, resource: str) -> None:
            asked.append(resource)  # noqa: B023

        rights: Any = SimpleNamespace(authorize=note, visible_to=lambda principal: None)
        with contextlib.suppress(Reached):
            admin.run(context, rights, WHO, name, values, admin.Answer(lambda *_: None))
        for field in operation.arguments.__struct_fields__:
            if field in NAMED and not operation.is_filtered:
                wanted = f"namespace:{NAMED[field]}" if field == "namespace" else NAMED[field]
                assert any(each.split("#")[0] == wanted for each in asked), f"{name}: {field}"


def test_who_names_a_topic_for_dead_letters_must_be_allowed_to_publish_there() -> None:
    arguments = {**OF_SUBSCRIPTION, "values": {"dead_letter_topic": DEAD}}
    mine = (P.MANAGE_TOPIC, TOPIC)
    for permission in Permission:
        error = outcome(granted(mine, (permission, DEAD)), "set_failure_policy", arguments)
        assert (error is None) == (permission is P.PRODUCE), f"{permission}: {error}"
        assert error is None or isinstance(error, PermissionDenied)
    assert outcome(granted(mine, (P.PRODUCE, TOPIC)), "set_failure_policy", arguments) is not None


def test_a_copy_that_is_not_fresh_lets_nothing_through() -> None:
    access = granted(*[(permission, "cluster") for permission in Permission])
    access.is_loaded = False
    for name, (_, kind, arguments) in OPERATIONS.items():
        assert kind == FILTERED or outcome(access, name, arguments) is not None, name


# ---------------------------------------------------------------- commands of a worker


class WorkerCommands:
    """The commands of a worker in front of its handlers: each handler tells that it was reached."""

    def __init__(self, access: Access) -> None:
        self.replies: list[Any] = []
        self.reached = False
        session = Session(1, b"token", b"\0one", "raw", WHO)
        known: Any = SimpleNamespace(by_identity=lambda identity: session)
        places = {
            HERE: SimpleNamespace(topic=TOPIC, partition_id=HERE),
            HIDDEN: SimpleNamespace(topic="/secret/plans", partition_id=HIDDEN),
        }
        state: Any = SimpleNamespace(partition=places.get)
        unused: Any = None
        self.commands = Commands(
            known, unused, access, lambda identity, reply: self.replies.append(reply), unknown="elsewhere",
        )  # fmt: skip
        SessionCommands(state, self.commands, unused, unused, access)
        self.commands.handlers = dict.fromkeys(COMMANDS, self._reach)

    def _reach(self, session: Session, command: Any) -> None:
        self.reached = True

    def error_of(self, command: Any) -> p.Error | None:
        """The refusal of a command; None if its handler was reached."""
        self.reached = False
        self.commands.handle(b"\0one", command, 1)
        if self.reached:
            assert not self.replies
            return None
        error = self.replies.pop()
        assert isinstance(error, p.Error), error
        return error


def test_every_command_is_in_the_table() -> None:
    assert set(COMMANDS) == set(typing.get_args(p.ClientCommand)), "enter it with what it needs"


EXAMPLES = [(reason, *example) for reason, examples in COMMANDS.values() for example in examples]


@pytest.mark.parametrize(("reason", "command", "needed", "kind"), EXAMPLES, ids=repr)
def test_a_command_is_refused_exactly_without_its_right(
    reason: str, command: Any, needed: Permission, kind: str
) -> None:
    for permission, scope in EACH:
        error = WorkerCommands(granted((permission, scope))).error_of(command)
        what = f"{command} with {permission} at {scope}: {error}"
        if reason or (permission is needed and scope in COVER[kind]):
            assert error is None, what
            continue
        assert error is not None, what
        is_seen = permission is P.LOOKUP and scope in COVER["subscription"]
        assert error.code == (PermissionDenied.code if is_seen else NotOwner.code), what


def test_a_hidden_partition_is_refused_as_one_that_is_not_here() -> None:
    """In front of the handler: those of partitions that are not here refuse in the same words."""
    worker = WorkerCommands(granted((P.PRODUCE, TOPIC), (P.CONSUME, TOPIC)))
    dead = {"failure_policy": {"dead_letter_topic": "/secret/dead", "poison_policy": "dead_letter"}}
    for make in (
        lambda number: p.OpenProducer(1, number, "p"),
        lambda number: p.Subscribe(1, 1, 1, number, "s", "shared"),
        lambda number: p.Subscribe(1, 1, 1, number, "s", "shared", options=dead),
    ):
        error = worker.error_of(make(HIDDEN))
        assert error is not None and error.code == NotOwner.code
        assert error.text == f"partition {HIDDEN} is not here; look the topic up again"
        assert worker.error_of(make(99)) is None  # its handler says so


# ---------------------------------------------------------------- LOOKUP


def lookup(access: Access, command: p.Lookup) -> DanubeError | None:
    """The refusal of a LOOKUP for a topic that is missing; None if it was let through."""
    made: list[str] = []

    def create(topic: str, *_: Any) -> None:
        made.append(topic)
        raise Reached

    handlers: dict[type, Any] = {}
    connections: Any = SimpleNamespace(commands=SimpleNamespace(handlers=handlers))
    booted: Any = SimpleNamespace(
        mailbox=SimpleNamespace(serve=lambda *_: None), clock=SystemClock(),
        settings=SimpleNamespace(auto_create_topics=True),
    )  # fmt: skip
    topics: Any = SimpleNamespace(
        topic=lambda name: None, partition_of=lambda name: None, create=create, require=create
    )
    Lookups(booted, connections, topics, SimpleNamespace(), access, None, SimpleNamespace())  # type: ignore[arg-type]
    session = Session(1, b"token", b"\0one", "raw", WHO)
    try:
        handlers[p.Lookup](session, command)
    except Reached:
        assert made == [command.topic]
        return None
    except DanubeError as error:
        return error
    raise AssertionError("a LOOKUP was neither refused nor let through")


def test_a_lookup_is_refused_exactly_without_its_right() -> None:
    for permission, scope in EACH:
        error = lookup(granted((permission, scope)), p.Lookup(1, TOPIC))
        allowed = permission is P.LOOKUP and scope in COVER["subscription"]
        assert (error is None) == allowed, f"{permission} at {scope}: {error}"
        assert error is None or isinstance(error, PermissionDenied)


def test_a_lookup_that_makes_a_topic_needs_more() -> None:
    command = p.Lookup(1, TOPIC, create={})
    for permission, scope in EACH:
        error = lookup(granted((P.LOOKUP, TOPIC), (permission, scope)), command)
        allowed = (permission is P.MANAGE_TOPIC and scope in COVER["topic"]) or (
            permission is P.PRODUCE and scope in COVER["namespace"]
        )
        assert (error is None) == allowed, f"{permission} at {scope}: {error}"
        alone = lookup(granted((permission, scope)), command)
        assert isinstance(alone, PermissionDenied), f"{permission} at {scope}: {alone}"
