"""`danube-fast topics`: create, list, describe, set, policies, move, delete, stats."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import (
    OutputForm,
    PolicyArgument,
    TopicArgument,
    YesOption,
    group,
    policy_values,
)
from danube_fast.cli.output import print_policy, refuse_without_yes
from danube_fast.cli.subscriptions import without_details
from danube_fast.client.values.arguments import DurabilityLevel
from danube_fast.errors import InvalidArgument
from danube_fast.types import Dispatch

__all__ = ["app"]

app = group(
    "topics", "Make, change, move and delete topics, and look into them.", "danube-fast topics list"
)

_PARTITION_TOTALS = ("messages_in", "bytes_in", "producers", "readers")


@asking(
    app,
    "danube-fast topics create /default/flights --partitions 4",
    "danube-fast topics create /default/ticks --dispatch non_reliable",
)
def create(
    ask: Ask,
    topic: TopicArgument,
    dispatch: Annotated[
        Dispatch, typer.Option(help="How messages are treated; never changes.")
    ] = Dispatch.RELIABLE,
    durability: Annotated[
        DurabilityLevel | None,
        typer.Option(help="When a publish is acknowledged (default fsync, if reliable)."),
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=0, help="How many partitions; 0: not partitioned.")
    ] = 0,
) -> None:
    """Create a topic."""
    made = ask(
        "create_topic",
        topic=topic,
        dispatch=dispatch.value,
        durability=durability,
        partitions=partitions,
    )
    ask.show(made, f"created {topic}")


@asking(app, "danube-fast topics list --pattern '/iot/dev-*'", name="list")
def list_topics(
    ask: Ask,
    namespace: Annotated[str, typer.Option(help="Only those of this namespace.")] = "",
    pattern: Annotated[str, typer.Option(help="Only names that match this glob.")] = "",
) -> None:
    """List topics by name."""
    rows = ask("list_topics", namespace=namespace, pattern=pattern)
    ask.table(rows, "no topics")


@asking(app, "danube-fast topics describe /default/flights")
def describe(ask: Ask, topic: TopicArgument) -> None:
    """Show a topic's settings and where each partition lives."""
    found = ask("describe_topic", topic=topic)
    if ask.form is OutputForm.TEXT:  # where a partition was in former times is for programs
        hidden = ("extents",)
        placement = [
            {name: value for name, value in entry.items() if name not in hidden}
            for entry in found.get("placement", [])
        ]
        found = {**found, "placement": placement} if "placement" in found else found
    ask.show(found)


@asking(app, "danube-fast topics stats /default/flights --output json")
def stats(ask: Ask, topic: TopicArgument) -> None:
    """Show a topic's offsets, counts and subscriptions."""
    found = ask("topic_stats", topic=topic)
    ask.show(found if ask.form is OutputForm.JSON else _for_people(found))


def _for_people(stats: dict[str, Any]) -> dict[str, Any]:
    """Stats without what their tables would say again in every row."""
    hidden = {*stats, "partition_id", "subscriptions"} - set(_PARTITION_TOTALS)
    return {
        **stats,
        "subscriptions": [without_details(entry) for entry in stats.get("subscriptions", [])],
        "partition_stats": [
            {"partition": entry.get("partition")}
            | {name: value for name, value in entry.items() if name not in hidden}
            for entry in stats.get("partition_stats", [])
        ],
    }


@asking(
    app,
    "danube-fast topics set /default/flights --durability os",
    "danube-fast topics set /default/flights --partitions 8",
    name="set",
)
def set_topic(
    ask: Ask,
    topic: TopicArgument,
    durability: Annotated[
        DurabilityLevel | None, typer.Option(help="When a publish is acknowledged.")
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="More partitions; there are never fewer again.")
    ] = None,
) -> None:
    """Change a topic's durability, or give it more partitions, from now on."""
    values: dict[str, Any] = {}
    words = []
    if durability is not None:
        values["durability"] = durability
        words.append(f"acknowledges at {durability}")
    if partitions is not None:
        values["partitions"] = partitions
        words.append(f"has {partitions} partitions")
    if not values:
        raise InvalidArgument("nothing to change; name an option, see --help")
    changed = ask("set_topic", topic=topic, **values)
    ask.show(changed, f"{topic} now {' and '.join(words)}")


@asking(app, "danube-fast topics policy /default/flights")
def policy(ask: Ask, topic: TopicArgument) -> None:
    """Show what is kept and allowed of a topic, by the names that `set-policy` takes."""
    if ask.form is OutputForm.JSON:
        ask.show(ask("topic_policy", topic=topic))
        return
    found = ask("topic_policy", topic=topic, with_sources=True)
    print_policy(ask.form, found["values"], found["sources"])


@asking(
    app,
    "danube-fast topics set-policy /default/flights message_ttl_ms=60000 producers_max=8",
    "danube-fast topics set-policy /default/flights message_ttl_ms=default",
    name="set-policy",
)
def set_policy(ask: Ask, topic: TopicArgument, values: PolicyArgument) -> None:
    """Change what is kept and allowed of a topic: retention, TTL, quotas, limits, rates."""
    changed = ask("set_topic_policy", topic=topic, values=policy_values(values))
    ask.show(changed, f"{topic}: {' '.join(values)}")


@asking(
    app,
    "danube-fast topics move /default/flights --worker 1",
    "danube-fast topics move /default/flights --partition 2 --worker 0",
)
def move(
    ask: Ask,
    topic: TopicArgument,
    worker: Annotated[int, typer.Option(min=0, help="The worker that gets it, from 0.")],
    partition: Annotated[
        int | None, typer.Option(min=0, help="Only this partition, from 0; default: all.")
    ] = None,
) -> None:
    """Move a topic to another worker while it is used."""
    moved = ask("move_topic", topic=topic, worker=worker, partition=partition)
    count = len(moved.get("moved", []))
    ask.show(moved, f"moved {topic} to worker {worker} ({count} partitions)")


@asking(app, "danube-fast topics delete /default/flights --yes")
def delete(ask: Ask, topic: TopicArgument, yes: YesOption = False) -> None:
    """Delete a topic with its messages and subscriptions."""
    refuse_without_yes(yes, f"deletes {topic} with all its messages and subscriptions")
    ask.show(ask("delete_topic", topic=topic), f"deleted {topic}")
