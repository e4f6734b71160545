"""Administrative operations on subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from danube_fast.broker import messages as m
from danube_fast.broker.admin.registry import AdminContext, Answer, Asker, ask_owners, operation
from danube_fast.broker.admin.topics import topic_stats
from danube_fast.broker.answers import SubscriptionTotals
from danube_fast.broker.subscription.policy import parse_policy
from danube_fast.broker.topics.creation import check_dead_letter_topic
from danube_fast.errors import DanubeError, InvalidArgument, NotFound
from danube_fast.types import Permission, parse_topic

__all__: list[str] = []


def _with_subscriptions(
    context: AdminContext,
    answer: Answer,
    topic: str,
    then: Callable[[list[SubscriptionTotals]], None],
    asker: Asker | None = None,
) -> None:
    """Gather the subscriptions of a topic that `asker` may look up and go on with them, or fail; None: all."""

    def got(value: Any, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
            return
        try:
            then(value.subscriptions)
        except DanubeError as failure:
            answer.fail(failure)

    gathered = Answer(got)
    if asker is not None:
        gathered.asker = asker
    topic_stats(context, gathered, topic=topic)


@operation(Permission.LOOKUP, "topic")
def list_subscriptions(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """List the subscriptions of a topic that the caller may look up: type, lag, what is unacked, who consumes."""
    _with_subscriptions(context, answer, topic, answer.done, answer.asker)


def _subscription_rights(values: dict[str, Any]) -> list[tuple[Permission, str]]:
    """Right to look up a subscription, beside that to look its topic up."""
    return [(Permission.LOOKUP, f"{values['topic']}#{values['subscription']}")]


@operation(Permission.LOOKUP, "topic", _subscription_rights)
def describe_subscription(
    context: AdminContext, answer: Answer, *, topic: str, subscription: str
) -> None:
    """Describe one subscription: lag, unacked messages and who holds them, and why nothing moves."""

    def found(subs: list[SubscriptionTotals]) -> None:
        for sub in subs:
            if sub.subscription == subscription:
                answer.done({**msgspec.structs.asdict(sub), "state": sub.state})
                return
        raise NotFound(f"topic {topic} has no subscription {subscription!r}")

    _with_subscriptions(context, answer, topic, found)


@operation(Permission.MANAGE_TOPIC, "topic")
def delete_subscription(
    context: AdminContext, answer: Answer, *, topic: str, subscription: str
) -> None:
    """Delete a subscription on all partitions of a topic; its consumers are closed."""
    record = context.topics.require_stable(parse_topic(topic))

    def told(values: list[Any], errors: list[DanubeError]) -> None:
        if errors:
            answer.fail(errors[0])
        elif not any(value.deleted for value in values):
            answer.fail(NotFound(f"topic {topic} has no subscription {subscription!r}"))
        else:
            answer.done({"topic": topic, "subscription": subscription})

    partitions = context.topics.partitions(record)
    ask_owners(
        context, record, partitions, lambda ids: m.DeleteSubscription(ids, subscription), told
    )


def _dead_letter_rights(values: dict[str, Any]) -> list[tuple[Permission, str]]:
    """Rights on the topic that a failure policy names for dead letters."""
    topic = values["values"].get("dead_letter_topic")
    return [(Permission.PRODUCE, topic)] if isinstance(topic, str) and topic else []


@operation(Permission.MANAGE_TOPIC, "topic", _dead_letter_rights)
def set_failure_policy(
    context: AdminContext, answer: Answer, *, topic: str, subscription: str, values: dict[str, Any]
) -> None:
    """Change fields of a subscription's failure policy, from now on; answers the policy."""
    record = context.topics.require_stable(parse_topic(topic))
    policy = parse_policy(values)
    setter = answer.asker.principal if context.security.is_enforced else ""
    if policy.dead_letter_topic:
        check_dead_letter_topic(context.topics, policy.dead_letter_topic, answer.asker.may)

    def told(replies: list[Any], errors: list[DanubeError]) -> None:
        policies = [policy for reply in replies for policy in reply]
        if errors:
            answer.fail(errors[0])
        elif not policies:
            answer.fail(NotFound(f"topic {topic} has no subscription {subscription!r}"))
        else:
            answer.done(policies[0])

    partitions = context.topics.partitions(record)
    ask_owners(
        context,
        record,
        partitions,
        lambda ids: m.SetFailurePolicy(ids, subscription, values, setter),
        told,
    )


@operation(Permission.MANAGE_TOPIC, "topic")
def skip_messages(
    context: AdminContext,
    answer: Answer,
    *,
    topic: str,
    subscription: str,
    count: int | None = None,
) -> None:
    """Count the next `count` messages of each partition, from the cursor on, as acked, even those that a consumer holds
    them; without a count all that are there. Answers how many that were, and the cursors."""
    if count is not None and count < 1:
        raise InvalidArgument(f"{count} messages cannot be skipped; skip 1 or more")
    record = context.topics.require_stable(parse_topic(topic))
    partitions = context.topics.partitions(record)
    names = {part.partition_id: record.partition_topic(part.index) for part in partitions}

    def told(values: list[Any], errors: list[DanubeError]) -> None:
        rows = [row for value in values for row in value]
        if errors:
            answer.fail(errors[0])
        elif not rows:
            answer.fail(NotFound(f"topic {topic} has no subscription {subscription!r}"))
        else:
            answer.done(
                {
                    "topic": topic,
                    "subscription": subscription,
                    "skipped": sum(number for _, number, _ in rows),
                    "skipped_by_partition": {names[key]: number for key, number, _ in rows},
                    "cursors": {names[key]: cursor for key, _, cursor in rows},
                }
            )

    ask_owners(
        context, record, partitions, lambda ids: m.SkipMessages(ids, subscription, count), told
    )
