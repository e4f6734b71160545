"""Administrative operations on policies: what is kept and allowed of a topic or of a namespace."""

from __future__ import annotations

from typing import Any

import msgspec

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.broker.topics.policy import TopicPolicy
from danube_fast.broker.topics.records import TopicRecord
from danube_fast.countdown import Countdown
from danube_fast.errors import DanubeError, InvalidArgument, Unavailable
from danube_fast.types import SYSTEM_NAMESPACE, Permission, parse_topic

__all__ = ["policy_summary"]


def policy_summary(policy: TopicPolicy) -> dict[str, Any]:
    """Every value that is in force, defaults too."""
    return {
        name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(policy).items()
    }


@operation(Permission.MANAGE_TOPIC, "topic")
def set_topic_policy(
    context: AdminContext, answer: Answer, *, topic: str, values: dict[str, Any]
) -> None:
    """Change values of a topic's policy, in force when this answers; null goes back to what the
    namespace says. Answers all values in force."""
    record = context.topics.set_policy(parse_topic(topic), values)
    _apply(context, answer, [record], policy_summary(context.topics.policy_of(record)))


@operation(Permission.MANAGE_NAMESPACE, "namespace")
def set_namespace_policy(
    context: AdminContext, answer: Answer, *, namespace: str, values: dict[str, Any]
) -> None:
    """Change values for all topics of a namespace that set none of their own, in force when this
    answers; null goes back to the default. Answers what the namespace sets."""
    _check_owner(namespace, values)
    namespaces, topics = context.topics.namespaces, context.topics.topics(namespace)
    namespaces.set_values(namespace, values, topics, context.clock.wall_ns())
    _apply(context, answer, topics, namespaces.values(namespace))


@operation(
    Permission.MANAGE_CLUSTER,
    "",
    lambda values: [(Permission.LOOKUP, f"namespace:{values['namespace']}")],
)
def set_namespace_quota(
    context: AdminContext, answer: Answer, *, namespace: str, values: dict[str, Any]
) -> None:
    """Change values of the quota that all topics of a namespace share, in force when this answers; null takes the limit
    away. Answers all values in force. Not for who manages the namespace: a quota bounds them."""
    _check_owner(namespace, values)
    namespaces, topics = context.topics.namespaces, context.topics.topics(namespace)
    quota = namespaces.set_quota(namespace, values, context.clock.wall_ns())
    _apply(context, answer, topics, msgspec.structs.asdict(quota))


@operation(Permission.LOOKUP, "namespace")
def describe_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """The policy that a namespace sets for its topics, and its quota: of each value the limit (0: none) and what is used
    of it (null: it is a rate, or not counted as there is no limit)."""
    namespaces = context.topics.namespaces
    namespaces.require(namespace)
    quota = msgspec.structs.asdict(namespaces.quota(namespace))
    storage_bytes, handles = context.namespace_usage(namespace)
    used: dict[str, int | None] = {"namespace_topics_max": namespaces.topic_count(namespace)}
    if quota["namespace_storage_bytes_max"]:
        used["namespace_storage_bytes_max"] = storage_bytes
    if quota["namespace_handles_max"]:
        used["namespace_handles_max"] = handles
    answer.done(
        {
            "namespace": namespace,
            "policy": namespaces.values(namespace),
            "quota": {
                name: {"limit": limit, "used": used.get(name)} for name, limit in quota.items()
            },
        }
    )


@operation(Permission.LOOKUP, "topic")
def topic_policy(
    context: AdminContext, answer: Answer, *, topic: str, with_sources: bool = False
) -> None:
    """The values in force for a topic; with `with_sources` {"values", "sources"}: the topic's own go before
    those of its namespace, those before the default."""
    name = parse_topic(topic)
    record = context.topics.require(name)
    values = policy_summary(context.topics.policy_of(record))
    if not with_sources:
        answer.done(values)
        return
    shared = context.topics.namespaces.values(name.namespace)
    sources = {
        each: "topic" if each in record.policy else "namespace" if each in shared else "default"
        for each in values
    }
    answer.done({"values": values, "sources": sources})


@operation(Permission.LOOKUP, "namespace")
def namespace_policy(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """The values that a namespace sets for its topics."""
    context.topics.namespaces.require(namespace)
    answer.done(context.topics.namespaces.values(namespace))


def _check_owner(namespace: str, values: dict[str, Any]) -> None:
    """Raise InvalidArgument for values that the broker's own topics would feel, as those of the audit log and of replies.
    What was set by a version that took them may be taken back."""
    if namespace == SYSTEM_NAMESPACE and any(
        value not in (None, "default", 0, "0") for value in values.values()
    ):
        raise InvalidArgument(
            f"the namespace {namespace} is the broker's own, and takes neither a quota nor a policy: they would hold up its "
            "audit log and replies; set them for a namespace of yours"
        )


def _apply(
    context: AdminContext, answer: Answer, topics: list[TopicRecord], value: dict[str, Any]
) -> None:
    """Tell the workers of all these topics, then answer."""

    def placed(error: DanubeError | None) -> None:
        if error is None:
            answer.done(value)
            return
        text = "recorded, and in force as soon as every worker is back; until then as before"
        answer.fail(Unavailable(f"{text} ({error})"))

    with Countdown(placed) as countdown:
        for record in topics:
            context.place(record, countdown.add())
