"""`danube-fast topics`: create, list, describe, set, policies, move, delete, stats."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from danube_fast.cli.broker import operation
from danube_fast.cli.options import (
    DEFAULT_URL,
    DurabilityName,
    OutputForm,
    OutputOption,
    PolicyArgument,
    TopicArgument,
    UrlOption,
    YesOption,
    example,
    policy_values,
)
from danube_fast.cli.output import print_policy, print_result, print_table, refuse_without_yes
from danube_fast.cli.subscriptions import without_details
from danube_fast.errors import InvalidArgument
from danube_fast.types import Dispatch

__all__ = ["app"]

app = typer.Typer(
    name="topics",
    help="Make, change, move and delete topics, and look into them.",
    no_args_is_help=True,
    epilog=example("danube-fast topics list"),
)

_PARTITION_TOTALS = ("messages_in", "bytes_in", "producers", "readers")


@app.command(
    epilog=example(
        "danube-fast topics create /default/flights --partitions 4",
        "danube-fast topics create /default/ticks --dispatch non_reliable",
    )
)
def create(
    topic: TopicArgument,
    dispatch: Annotated[
        Dispatch, typer.Option(help="How messages are treated; never changes.")
    ] = Dispatch.RELIABLE,
    durability: Annotated[
        DurabilityName | None,
        typer.Option(help="When a publish is acknowledged (default fsync, if reliable)."),
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=0, help="How many partitions; 0: not partitioned.")
    ] = 0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Create a topic."""
    made = operation(
        url,
        "create_topic",
        topic=topic,
        dispatch=dispatch.value,
        durability=durability and durability.value,
        partitions=partitions,
    )
    print_result(output, made, f"created {topic}")


@app.command("list", epilog=example("danube-fast topics list --pattern '/iot/dev-*'"))
def list_topics(
    namespace: Annotated[str, typer.Option(help="Only those of this namespace.")] = "",
    pattern: Annotated[str, typer.Option(help="Only names that match this glob.")] = "",
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """List topics by name."""
    rows = operation(url, "list_topics", namespace=namespace, pattern=pattern)
    print_table(output, rows, "no topics")


@app.command(epilog=example("danube-fast topics describe /default/flights"))
def describe(
    topic: TopicArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT
) -> None:
    """Show a topic's settings and where each partition lives."""
    found = operation(url, "describe_topic", topic=topic)
    if output is OutputForm.TEXT:  # where a partition was in former times is for programs
        hidden = ("extents",)
        placement = [
            {name: value for name, value in entry.items() if name not in hidden}
            for entry in found.get("placement", [])
        ]
        found = {**found, "placement": placement} if "placement" in found else found
    print_result(output, found)


@app.command(epilog=example("danube-fast topics stats /default/flights --output json"))
def stats(
    topic: TopicArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT
) -> None:
    """Show a topic's offsets, counts and subscriptions."""
    found = operation(url, "topic_stats", topic=topic)
    print_result(output, found if output is OutputForm.JSON else _for_people(found))


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


@app.command(
    "set",
    epilog=example(
        "danube-fast topics set /default/flights --durability os",
        "danube-fast topics set /default/flights --partitions 8",
    ),
)
def set_topic(
    topic: TopicArgument,
    durability: Annotated[
        DurabilityName | None, typer.Option(help="When a publish is acknowledged.")
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="More partitions; there are never fewer again.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Change a topic's durability, or give it more partitions, from now on."""
    values: dict[str, Any] = {}
    words = []
    if durability is not None:
        values["durability"] = durability.value
        words.append(f"acknowledges at {durability.value}")
    if partitions is not None:
        values["partitions"] = partitions
        words.append(f"has {partitions} partitions")
    if not values:
        raise InvalidArgument("nothing to change; name an option, see --help")
    changed = operation(url, "set_topic", topic=topic, **values)
    print_result(output, changed, f"{topic} now {' and '.join(words)}")


@app.command(epilog=example("danube-fast topics policy /default/flights"))
def policy(
    topic: TopicArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT
) -> None:
    """Show what is kept and allowed of a topic, by the names that `set-policy` takes."""
    if output is OutputForm.JSON:
        print_result(output, operation(url, "topic_policy", topic=topic))
        return
    found = operation(url, "topic_policy", topic=topic, with_sources=True)
    print_policy(output, found["values"], found["sources"])


@app.command(
    "set-policy",
    epilog=example(
        "danube-fast topics set-policy /default/flights message_ttl_ms=60000 producers_max=8",
        "danube-fast topics set-policy /default/flights message_ttl_ms=default",
    ),
)
def set_policy(
    topic: TopicArgument,
    values: PolicyArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Change what is kept and allowed of a topic: retention, TTL, quotas, limits, rates."""
    changed = operation(url, "set_topic_policy", topic=topic, values=policy_values(values))
    print_result(output, changed, f"{topic}: {' '.join(values)}")


@app.command(
    epilog=example(
        "danube-fast topics move /default/flights --worker 1",
        "danube-fast topics move /default/flights --partition 2 --worker 0",
    )
)
def move(
    topic: TopicArgument,
    worker: Annotated[int, typer.Option(min=0, help="The worker that gets it, from 0.")],
    partition: Annotated[
        int | None, typer.Option(min=0, help="Only this partition, from 0; default: all.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Move a topic to another worker while it is used."""
    moved = operation(url, "move_topic", topic=topic, worker=worker, partition=partition)
    count = len(moved.get("moved", []))
    print_result(output, moved, f"moved {topic} to worker {worker} ({count} partitions)")


@app.command(epilog=example("danube-fast topics delete /default/flights --yes"))
def delete(
    topic: TopicArgument,
    yes: YesOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Delete a topic with its messages and subscriptions."""
    refuse_without_yes(yes, f"deletes {topic} with all its messages and subscriptions")
    print_result(output, operation(url, "delete_topic", topic=topic), f"deleted {topic}")
