"""`danube-fast subscriptions`: list, describe, delete, skip, set-failure-policy, redrive."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import typer

from danube_fast.broker.subscription.policy import Backoff, Poison
from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.consume import position_of
from danube_fast.cli.options import (
    OutputForm,
    SubscriptionName,
    TopicArgument,
    TypeOption,
    YesOption,
    amount,
    group,
)
from danube_fast.cli.output import counted, refuse_without_yes
from danube_fast.errors import AlreadyExists, InvalidArgument

__all__ = ["app", "without_details"]

app = group(
    "subscriptions",
    "Look at subscriptions, and say what becomes of their messages.",
    "danube-fast subscriptions list /default/flights",
)


_DETAILS = {
    "topic", "cursors", "failure_policy", "dropped", "dead_letters", "skipped", "delayed", "gaps",
    "last_gap",
}  # fmt: skip


def without_details(subscription: dict[str, Any]) -> dict[str, Any]:
    """Return a subscription as one row of a table: how many consumers, no cursor per partition."""
    row = {n: v for n, v in subscription.items() if n not in _DETAILS}
    return {**row, "consumers": len(subscription["consumers"])}


@asking(app, "danube-fast subscriptions list /default/flights", name="list")
def list_subscriptions(ask: Ask, topic: TopicArgument) -> None:
    """List a topic's subscriptions with their lag."""
    rows = ask("list_subscriptions", topic=topic)
    if ask.form is OutputForm.TEXT:
        rows = [without_details(row) for row in rows]
    ask.table(rows, f"{topic} has no subscriptions")


@asking(app, "danube-fast subscriptions describe /default/flights billing")
def describe(ask: Ask, topic: TopicArgument, subscription: SubscriptionName) -> None:
    """Show a subscription's lag, what each consumer has unacked, and why nothing moves if nothing does."""
    found = ask("describe_subscription", topic=topic, subscription=subscription)
    ask.show(found)


@asking(
    app, "danube-fast subscriptions create /default/flights billing --type shared --from earliest"
)
def create(
    ask: Ask,
    topic: TopicArgument,
    subscription: SubscriptionName,
    type_name: TypeOption = "exclusive",
    start: Annotated[
        str,
        typer.Option("--from", metavar="latest|earliest|OFFSET|TIME|-10m", help="Where it begins."),
    ] = "latest",
) -> None:
    """Create a subscription: from then on messages are kept for it, though nothing consumes yet."""
    position = position_of(start)
    with ask.connect() as client:
        for known in client.admin.list_subscriptions(topic=topic):
            if known["subscription"] == subscription:
                raise AlreadyExists(f"{topic} has a subscription {subscription} already; use it")
        _attach(client, topic, subscription, type_name, initial_position=position)
        made = client.admin.describe_subscription(topic=topic, subscription=subscription)
    ask.show(made, f"created {subscription} of {topic}")


@asking(
    app,
    "danube-fast subscriptions seek /default/flights billing earliest --yes",
    "danube-fast subscriptions seek /default/flights billing 2026-01-31T12:00:00Z --yes",
    context_settings={"ignore_unknown_options": True},  # such as -10m
)
def seek(
    ask: Ask,
    topic: TopicArgument,
    subscription: SubscriptionName,
    position: Annotated[
        str, typer.Argument(metavar="latest|earliest|OFFSET|TIME|AGO", help="Where it goes on.")
    ],
    yes: YesOption = False,
) -> None:
    """Move a subscription in every partition; what lies behind the place comes, or comes again.

    AGO is such as -10min, -2h or 7d. An exclusive subscription must have no consumer just then.
    """
    from danube_fast.client.values.options import parse_time  # it brings NumPy

    is_ago = isinstance(parse_time(f"-{position}"), dt.timedelta)
    place = position_of(f"-{position}" if is_ago else position)
    refuse_without_yes(yes, f"moves {subscription} of {topic} to {position}, for all its consumers")
    with ask.connect() as client:
        known = client.admin.describe_subscription(topic=topic, subscription=subscription)
        _attach(client, topic, subscription, known["type"], seek_to=place)
        moved = client.admin.describe_subscription(topic=topic, subscription=subscription)
    ask.show(moved, f"moved {subscription} of {topic} to {position}")


def _attach(
    client: Any,
    topic: str,
    subscription: str,
    type_name: str,
    *,
    initial_position: str | int = "latest",
    seek_to: str | int | None = None,
) -> None:
    """Be a consumer of the subscription for a moment, which makes it, and may move it."""
    with client.consumer(
        topic,
        subscription=subscription,
        type=type_name,
        initial_position=initial_position,
        permits_messages=1,
    ) as consumer:
        if seek_to is not None:
            consumer.seek(seek_to)


@asking(app, "danube-fast subscriptions delete /default/flights billing --yes")
def delete(
    ask: Ask, topic: TopicArgument, subscription: SubscriptionName, yes: YesOption = False
) -> None:
    """Delete a subscription; its place in the topic is lost and its consumers are closed."""
    refuse_without_yes(yes, f"deletes the subscription {subscription} of {topic} with its cursor")
    gone = ask("delete_subscription", topic=topic, subscription=subscription)
    ask.show(gone, f"deleted {subscription} of {topic}")


@asking(
    app,
    "danube-fast subscriptions skip /default/flights billing 1 --yes",
    "danube-fast subscriptions skip /default/flights billing --all --yes",
)
def skip(
    ask: Ask,
    topic: TopicArgument,
    subscription: SubscriptionName,
    count: Annotated[
        int | None, typer.Argument(min=1, metavar="N", help="As many in each partition.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="In place of N: all that is there now.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Count the next messages of a subscription as acknowledged, delivered or not."""
    if (count is None) != everything:
        raise InvalidArgument("say how many messages to skip, or --all; not both")
    what = "all messages" if count is None else f"the next {count:,} messages of each partition"
    refuse_without_yes(yes, f"counts {what} of {subscription} on {topic} as acknowledged")
    arguments: dict[str, Any] = {} if count is None else {"count": count}
    gone = ask("skip_messages", topic=topic, subscription=subscription, **arguments)
    text = f"skipped {gone.get('skipped', 0):,} messages of {subscription} on {topic}"
    ask.show(gone, text)


@asking(
    app,
    "danube-fast subscriptions set-failure-policy /default/flights billing "
    "--poison-policy dead_letter --dead-letter-topic /default/billing-dead",
    name="set-failure-policy",
)
def set_failure_policy(
    ask: Ask,
    topic: TopicArgument,
    subscription: SubscriptionName,
    max_redelivery_count: Annotated[
        int | None, typer.Option(min=0, help="Redeliveries before a message counts as poison.")
    ] = None,
    ack_timeout_ms: Annotated[
        str | None,
        typer.Option(metavar="MS|30s", help="An ack that takes longer is a failure; 0: never."),
    ] = None,
    base_redelivery_delay_ms: Annotated[
        str | None, typer.Option(metavar="MS|1s", help="Pause before the first redelivery.")
    ] = None,
    max_redelivery_delay_ms: Annotated[
        str | None, typer.Option(metavar="MS|1min", help="Longest pause.")
    ] = None,
    backoff_strategy: Annotated[
        Backoff | None, typer.Option(help="Whether pauses double from failure to failure.")
    ] = None,
    poison_policy: Annotated[
        Poison | None, typer.Option(help="What becomes of a message that failed too often.")
    ] = None,
    dead_letter_topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Where dead letters go.")
    ] = None,
) -> None:
    """Change what happens with messages that fail; options that are left out stay as they are."""
    given = {
        "max_redelivery_count": max_redelivery_count,
        "ack_timeout_ms": amount("ack_timeout_ms", ack_timeout_ms),
        "base_redelivery_delay_ms": amount("base_redelivery_delay_ms", base_redelivery_delay_ms),
        "max_redelivery_delay_ms": amount("max_redelivery_delay_ms", max_redelivery_delay_ms),
        "backoff_strategy": backoff_strategy and backoff_strategy.value,
        "poison_policy": poison_policy and poison_policy.value,
        "dead_letter_topic": dead_letter_topic,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        raise InvalidArgument("nothing to change; name an option, see --help")
    policy = ask("set_failure_policy", topic=topic, subscription=subscription, values=values)
    ask.show(policy)


@asking(app, "danube-fast subscriptions redrive /default/flights billing --yes", name="redrive")
def redrive_letters(
    ask: Ask,
    topic: TopicArgument,
    subscription: SubscriptionName,
    dead_letter_topic: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Where its dead letters are; else as its policy says."),
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", help="At most so many.")
    ] = None,
    yes: YesOption = False,
) -> None:
    """Publish a subscription's dead letters to its topic again, once each."""
    refuse_without_yes(
        yes, f"publishes the dead letters of {subscription} to {topic}, for all its subscriptions"
    )
    with ask.connect() as client:
        count = client.admin.redrive(
            topic, subscription, dead_letter_topic=dead_letter_topic, max_messages=max_messages
        )
    text = f"{counted(count, 'dead letter')} published to {topic}"
    ask.show({"topic": topic, "redriven": count}, text)
