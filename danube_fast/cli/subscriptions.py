"""`danube-fast subscriptions`: list, describe, delete."""

from __future__ import annotations

from typing import Any

import typer

from danube_fast.cli.broker import operation
from danube_fast.cli.options import (
    DEFAULT_URL,
    OutputForm,
    OutputOption,
    SubscriptionName,
    TopicArgument,
    UrlOption,
    YesOption,
    example,
)
from danube_fast.cli.output import print_result, print_table, refuse_without_yes

__all__ = ["app", "without_details"]

app = typer.Typer(
    name="subscriptions",
    help="Look at subscriptions.",
    no_args_is_help=True,
    epilog=example("danube-fast subscriptions list /default/flights"),
)


def without_details(subscription: dict[str, Any]) -> dict[str, Any]:
    """A subscription as one row of a table: how many consumers, no cursor per partition."""
    row = {n: v for n, v in subscription.items() if n not in ("topic", "cursors")}
    return {**row, "consumers": len(subscription["consumers"])}


@app.command("list", epilog=example("danube-fast subscriptions list /default/flights"))
def list_subscriptions(
    topic: TopicArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT
) -> None:
    """List a topic's subscriptions with their lag."""
    rows = operation(url, "list_subscriptions", topic=topic)
    if output is OutputForm.TEXT:
        rows = [without_details(row) for row in rows]
    print_table(output, rows, f"{topic} has no subscriptions")


@app.command(epilog=example("danube-fast subscriptions describe /default/flights billing"))
def describe(
    topic: TopicArgument,
    subscription: SubscriptionName,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Show a subscription's lag, who holds what, and why nothing moves if nothing does."""
    found = operation(url, "describe_subscription", topic=topic, subscription=subscription)
    print_result(output, found)


@app.command(epilog=example("danube-fast subscriptions delete /default/flights billing --yes"))
def delete(
    topic: TopicArgument,
    subscription: SubscriptionName,
    yes: YesOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Delete a subscription; its place in the topic is lost and its consumers are closed."""
    refuse_without_yes(yes, f"deletes the subscription {subscription} of {topic} with its cursor")
    gone = operation(url, "delete_subscription", topic=topic, subscription=subscription)
    print_result(output, gone, f"deleted {subscription} of {topic}")
