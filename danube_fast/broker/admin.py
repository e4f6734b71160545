"""Every administrative operation, once: a typed function, its permission, its documentation.

The command line, HTTP and the Python client are faces of this registry: they name an operation and
give arguments, `run` checks them, asks `authorize` and calls the function. Operations run in the
coordinator. Those that need a worker's word ask for it and answer later; nothing here waits.
"""

from __future__ import annotations

import fnmatch
import inspect
import typing
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from danube_fast.broker.policy import parse_policy
from danube_fast.broker.topic_records import PartitionRecord, TopicOptions, TopicRecord
from danube_fast.broker.topics import TopicDirectory
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument, NotFound, Unavailable
from danube_fast.types import Permission, parse_topic

__all__ = ["OPERATIONS", "AdminContext", "Answer", "Operation", "run"]

TOPICS_LISTED_MAX = 10_000
RESOURCE_CLUSTER = "cluster"


class Answer:
    """Where the outcome of one operation goes: exactly one call of `done` or `fail` counts."""

    def __init__(self, on_end: Callable[[Any, DanubeError | None], None]) -> None:
        self._on_end = on_end
        self._ended = False

    def done(self, value: Any = None) -> None:
        """It succeeded."""
        self._end(value, None)

    def fail(self, error: DanubeError) -> None:
        """It failed."""
        self._end(None, error)

    def _end(self, value: Any, error: DanubeError | None) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(value, error)


class AdminContext(Protocol):
    """What operations stand on; the coordinator provides it."""

    topics: TopicDirectory
    clock: Clock

    def ask(
        self,
        worker: int,
        operation: str,
        arguments: dict[str, Any],
        on_reply: Callable[[Any, DanubeError | None], None],
    ) -> None:
        """Call a worker (by process index) over its mailbox; `on_reply` comes once, later."""
        ...

    def worker_of(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""
        ...

    def place(self, record: TopicRecord, on_done: Callable[[DanubeError | None], None]) -> None:
        """Hand a topic's partitions to their workers; `on_done` when all have confirmed."""
        ...

    def forget(self, partitions: list[PartitionRecord]) -> None:
        """Partitions that are gone: hand them to nobody any more."""
        ...

    def status(self) -> dict[str, Any]:
        """Processes, logs, counters, data directory."""
        ...


class Operation(msgspec.Struct, frozen=True):
    """One entry of the registry."""

    name: str
    permission: Permission
    resource: str
    """Name of the argument that names the resource; empty: the cluster."""
    documentation: str
    arguments: type[msgspec.Struct]
    """Struct of the function's keyword arguments, with their types and defaults."""
    function: Callable[..., None]


OPERATIONS: dict[str, Operation] = {}
"""Name -> operation."""


def _operation(
    permission: Permission, resource: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function `f(context, answer, *, arguments...)` into the registry."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        types = typing.get_type_hints(function)
        fields: list[tuple[str, type] | tuple[str, type, Any]] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                kind = types[parameter.name]
                if parameter.default is parameter.empty:
                    fields.append((parameter.name, kind))
                else:
                    fields.append((parameter.name, kind, parameter.default))
        name = function.__name__
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        documentation = inspect.getdoc(function) or ""
        OPERATIONS[name] = Operation(name, permission, resource, documentation, arguments, function)
        return function

    return enter


def run(
    context: AdminContext,
    authorize: Callable[[str, Permission, str], None],
    principal: str,
    name: str,
    arguments: dict[str, Any],
    answer: Answer,
) -> None:
    """Run an operation by name. Every outcome, refusals included, goes to `answer`."""
    try:
        operation = OPERATIONS.get(name)
        if operation is None:
            raise NotFound(f"no operation {name!r}; there are: {', '.join(sorted(OPERATIONS))}")
        try:
            checked = msgspec.convert(arguments, operation.arguments)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"arguments of {name} are not right: {error}") from error
        values = msgspec.structs.asdict(checked)
        resource = str(values[operation.resource]) if operation.resource else RESOURCE_CLUSTER
        authorize(principal, operation.permission, resource)
        operation.function(context, answer, **values)
    except DanubeError as error:
        answer.fail(error)


# ---------------------------------------------------------------- helpers


def _topic_summary(record: TopicRecord) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "dispatch": record.dispatch,
        "durability": record.durability,
        "partitioned": record.partitioned,
        "partitions": len(record.partition_ids),
        "created_ns": record.created_ns,
    }


def _ask_owners(
    context: AdminContext,
    record: TopicRecord,
    partitions: list[PartitionRecord],
    operation: str,
    arguments: dict[str, Any],
    on_all: Callable[[list[Any], list[DanubeError]], None],
) -> None:
    """Ask every worker that owns some of `partitions`; `on_all(values, errors)` once, at the end."""
    by_worker: dict[int, list[int]] = {}
    for partition in partitions:
        worker = context.worker_of(partition.log_id)
        by_worker.setdefault(worker, []).append(partition.partition_id)
    values: list[Any] = []
    errors: list[DanubeError] = []

    def on_reply(value: Any, error: DanubeError | None) -> None:
        if error is None:
            values.append(value)
        else:
            errors.append(error)
        if len(values) + len(errors) == len(by_worker):
            on_all(values, errors)

    for worker, ids in by_worker.items():
        context.ask(worker, operation, {**arguments, "partition_ids": ids}, on_reply)


# ---------------------------------------------------------------- topics


@_operation(Permission.MANAGE_TOPIC, "topic")
def create_topic(
    context: AdminContext,
    answer: Answer,
    *,
    topic: str,
    dispatch: str = "reliable",
    durability: str = "fsync",
    partitions: int = 0,
) -> None:
    """Create a topic. `partitions` 0: not partitioned. Answers its description.

    AlreadyExists if there is one of that name.
    """
    options = TopicOptions.parse(
        {"dispatch": dispatch, "durability": durability, "partitions": partitions}
    )
    record = context.topics.create(topic, options, context.clock.wall_ns())

    def placed(error: DanubeError | None) -> None:
        if error is None or isinstance(error, Unavailable):
            # The topic exists; a worker that is down just now takes it up when it is back.
            answer.done(_topic_summary(record))
        else:
            answer.fail(error)

    context.place(record, placed)


@_operation(Permission.MANAGE_TOPIC, "topic")
def delete_topic(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """Delete a topic with its messages and subscriptions; its clients get TopicDeleted.

    The same name later is a new topic. Answers the description of what was deleted.
    """
    record, partitions = context.topics.delete(topic)
    context.forget(partitions)

    def told(values: list[Any], errors: list[DanubeError]) -> None:
        # A worker that could not be told drops them when it asks what is assigned to it.
        answer.done(_topic_summary(record))

    _ask_owners(context, record, partitions, "unassign", {"reason": "deleted"}, told)


@_operation(Permission.LOOKUP)
def list_topics(
    context: AdminContext,
    answer: Answer,
    *,
    namespace: str = "",
    pattern: str = "",
    after: str = "",
    limit: int = TOPICS_LISTED_MAX,
) -> None:
    """Topics by name: of one namespace, or matching a glob such as `/iot/dev-*`.

    At most `limit` of them, those behind the name `after`. Answers a list of descriptions.
    """
    found = [
        record
        for record in context.topics.topics(namespace)
        if record.topic > after and (not pattern or fnmatch.fnmatchcase(record.topic, pattern))
    ]
    count = min(max(limit, 0), TOPICS_LISTED_MAX)
    answer.done([_topic_summary(record) for record in found[:count]])


@_operation(Permission.LOOKUP, "topic")
def describe_topic(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """A topic's settings and where each of its partitions lives."""
    record = context.topics.require(topic)
    answer.done(
        {
            **_topic_summary(record),
            "incarnation": record.incarnation,
            "epoch": record.epoch,
            "placement": [
                {
                    "partition_id": partition.partition_id,
                    "partition": record.partition_topic(partition.index),
                    "log_id": partition.log_id,
                    "worker": context.worker_of(partition.log_id) - 1,
                    "extents": [list(msgspec.structs.astuple(e)) for e in partition.extents],
                }
                for partition in context.topics.partitions(record)
            ],
        }
    )


@_operation(Permission.LOOKUP, "topic")
def topic_stats(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """Offsets, rates' raw counts and subscriptions of a topic: totals, and per partition.

    Unavailable if a worker that owns some of it is down.
    """
    record = context.topics.require(topic)

    def gathered(values: list[Any], errors: list[DanubeError]) -> None:
        if errors:
            answer.fail(errors[0])
            return
        stats = {entry["partition_id"]: entry for value in values for entry in value["partitions"]}
        partitions = [
            {**stats[partition_id], "partition": record.partition_topic(index)}
            for index, partition_id in enumerate(record.partition_ids)
            if partition_id in stats
        ]
        totals = {
            name: sum(entry.get(name, 0) for entry in partitions)
            for name in ("messages_in", "bytes_in", "producers", "readers")
        }
        answer.done(
            {
                **_topic_summary(record),
                **totals,
                "subscriptions": _merge(partitions, record),
                "partition_stats": partitions,
            }
        )

    _ask_owners(context, record, context.topics.partitions(record), "partition_stats", {}, gathered)


@_operation(Permission.MANAGE_TOPIC, "topic")
def set_topic(context: AdminContext, answer: Answer, *, topic: str, durability: str) -> None:
    """Change a topic's durability, in force when this answers: its description."""
    record = context.topics.set_durability(topic, durability)

    def placed(error: DanubeError | None) -> None:
        if error is None:
            answer.done(_topic_summary(record))
            return
        answer.fail(
            Unavailable(
                f"{topic} will be {durability} as soon as its worker is back; until then as before "
                f"({error})"
            )
        )

    context.place(record, placed)


# ---------------------------------------------------------------- subscriptions


_ADDED_UP = ["lag_messages", "unacked", "waiting_redelivery", "delayed", "blocked", "redelivered"]
_ADDED_UP += ["dropped", "dead_letters", "skipped", "lost"]


def _merge(partitions: list[dict[str, Any]], record: TopicRecord) -> list[dict[str, Any]]:
    """One entry per subscription of a topic: what its partitions say of it, added up."""
    merged: dict[str, dict[str, Any]] = {}
    for partition in partitions:
        for sub in partition["subscriptions"]:
            entry = merged.setdefault(
                sub["subscription"],
                {"subscription": sub["subscription"], "topic": record.topic, "type": sub["type"],
                 "consumers": [], "cursors": {}},
            )  # fmt: skip
            for name in _ADDED_UP:
                entry[name] = entry.get(name, 0) + sub.get(name, 0)
            entry["failure_policy"] = sub.get("failure_policy", {})
            name = partition["partition"]
            entry["cursors"][name] = sub["cursor"]
            entry["consumers"].extend({**held, "partition": name} for held in sub["consumers"])
    return [merged[name] for name in sorted(merged)]


def _with_subscriptions(
    context: AdminContext,
    answer: Answer,
    topic: str,
    then: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Gather the subscriptions of a topic and go on with them, or fail."""

    def got(value: Any, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
            return
        try:
            then(value["subscriptions"])
        except DanubeError as failure:
            answer.fail(failure)

    topic_stats(context, Answer(got), topic=topic)


@_operation(Permission.LOOKUP, "topic")
def list_subscriptions(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """The subscriptions of a topic: type, lag, what is unacked, who consumes."""
    _with_subscriptions(context, answer, topic, answer.done)


@_operation(Permission.LOOKUP, "topic")
def describe_subscription(
    context: AdminContext, answer: Answer, *, topic: str, subscription: str
) -> None:
    """One subscription: lag, unacked messages and who holds them, and why nothing moves."""

    def found(subs: list[dict[str, Any]]) -> None:
        for sub in subs:
            if sub["subscription"] == subscription:
                answer.done({**sub, "state": _state(sub)})
                return
        raise NotFound(f"topic {topic} has no subscription {subscription!r}")

    _with_subscriptions(context, answer, topic, found)


def _state(sub: dict[str, Any]) -> str:
    """Why a subscription stands where it does, in words."""
    if not sub["lag_messages"]:
        return "caught up"
    if not sub["consumers"]:
        return "stalled: no consumer is connected"
    if all(consumer["byte_credit"] <= 0 for consumer in sub["consumers"]):
        return "stalled: its consumers have not taken what they were sent"
    if sub["blocked"] and sub["blocked"] + sub["unacked"] >= sub["lag_messages"]:
        return (
            f"blocked: {sub['blocked']} messages failed too often; change the failure policy "
            "(danube-fast subscriptions set-failure-policy), seek, or delete the subscription"
        )
    if sub["unacked"] >= sub["lag_messages"]:
        return "waiting: everything was delivered and is not acked yet"
    return "moving"


@_operation(Permission.MANAGE_TOPIC, "topic")
def delete_subscription(
    context: AdminContext, answer: Answer, *, topic: str, subscription: str
) -> None:
    """Delete a subscription on all partitions of a topic; its consumers are closed."""
    record = context.topics.require(parse_topic(topic))

    def told(values: list[Any], errors: list[DanubeError]) -> None:
        if errors:
            answer.fail(errors[0])
        elif not any(value["deleted"] for value in values):
            answer.fail(NotFound(f"topic {topic} has no subscription {subscription!r}"))
        else:
            answer.done({"topic": topic, "subscription": subscription})

    partitions = context.topics.partitions(record)
    arguments = {"subscription": subscription}
    _ask_owners(context, record, partitions, "delete_subscription", arguments, told)


@_operation(Permission.MANAGE_TOPIC, "topic")
def set_failure_policy(
    context: AdminContext, answer: Answer, *, topic: str, subscription: str, values: dict[str, Any]
) -> None:
    """Change fields of a subscription's failure policy, from now on; answers the policy."""
    record = context.topics.require(parse_topic(topic))
    parse_policy(values)

    def told(replies: list[Any], errors: list[DanubeError]) -> None:
        policies = [policy for reply in replies for policy in reply["failure_policies"]]
        if errors:
            answer.fail(errors[0])
        elif not policies:
            answer.fail(NotFound(f"topic {topic} has no subscription {subscription!r}"))
        else:
            answer.done(policies[0])

    partitions = context.topics.partitions(record)
    arguments = {"subscription": subscription, "values": values}
    _ask_owners(context, record, partitions, "set_failure_policy", arguments, told)


# ---------------------------------------------------------------- namespaces and cluster


@_operation(Permission.MANAGE_NAMESPACE, "namespace")
def create_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """Create a namespace. AlreadyExists if there is one of that name."""
    context.topics.create_namespace(namespace, context.clock.wall_ns())
    answer.done({"namespace": namespace})


@_operation(Permission.MANAGE_NAMESPACE, "namespace")
def delete_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """Delete a namespace; it must be empty."""
    context.topics.delete_namespace(namespace)
    answer.done({"namespace": namespace})


@_operation(Permission.LOOKUP)
def list_namespaces(context: AdminContext, answer: Answer) -> None:
    """All namespaces and how many topics each has."""
    answer.done(
        [
            {"namespace": name, "topics": len(context.topics.topics(name))}
            for name in context.topics.namespaces()
        ]
    )


@_operation(Permission.MANAGE_BROKER)
def cluster_status(context: AdminContext, answer: Answer) -> None:
    """Processes with pid, state, epoch and restarts; logs, counters, data directory."""
    answer.done(context.status())
