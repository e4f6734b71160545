"""Administrative operations on topics."""

from __future__ import annotations

import fnmatch
from typing import Any

import msgspec

from danube_fast.broker.admin_registry import AdminContext, Answer, ask_owners, operation
from danube_fast.broker.topic_records import TopicOptions, TopicRecord
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.types import Permission

__all__ = ["topic_stats", "topic_summary"]

TOPICS_LISTED_MAX = 10_000
_ADDED_UP = ["lag_messages", "unacked", "waiting_redelivery", "delayed", "blocked", "redelivered"]
_ADDED_UP += ["dropped", "dead_letters", "skipped", "lost"]


def topic_summary(record: TopicRecord) -> dict[str, Any]:
    """A topic in a list."""
    return {
        "topic": record.topic,
        "dispatch": record.dispatch,
        "durability": record.durability,
        "partitioned": record.partitioned,
        "partitions": len(record.partition_ids),
        "created_ns": record.created_ns,
    }


@operation(Permission.MANAGE_TOPIC, "topic")
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
            answer.done(topic_summary(record))
        else:
            answer.fail(error)

    context.place(record, placed)


@operation(Permission.MANAGE_TOPIC, "topic")
def delete_topic(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """Delete a topic with its messages and subscriptions; its clients get TopicDeleted.

    The same name later is a new topic. Answers the description of what was deleted.
    """
    record, partitions = context.topics.delete(topic)
    context.forget(partitions)

    def told(values: list[Any], errors: list[DanubeError]) -> None:
        # A worker that could not be told drops them when it asks what is assigned to it.
        answer.done(topic_summary(record))

    ask_owners(context, record, partitions, "unassign", {"reason": "deleted"}, told)


@operation(Permission.LOOKUP)
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
    answer.done([topic_summary(record) for record in found[:count]])


@operation(Permission.LOOKUP, "topic")
def describe_topic(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """A topic's settings and where each of its partitions lives."""
    record = context.topics.require(topic)
    answer.done(
        {
            **topic_summary(record),
            "incarnation": record.incarnation,
            "epoch": record.epoch,
            "placement": [
                {
                    "partition_id": partition.partition_id,
                    "partition": record.partition_topic(partition.index),
                    "log_id": partition.log_id,
                    "worker": context.worker_of(partition.log_id) - 1,
                    "moving_to": context.moving_to(partition.partition_id),
                    "extents": [list(msgspec.structs.astuple(e)) for e in partition.extents],
                }
                for partition in context.topics.partitions(record)
            ],
        }
    )


@operation(Permission.LOOKUP, "topic")
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
                **topic_summary(record),
                **totals,
                "subscriptions": _merge(partitions, record),
                "partition_stats": partitions,
            }
        )

    ask_owners(context, record, context.topics.partitions(record), "partition_stats", {}, gathered)


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


@operation(Permission.MANAGE_TOPIC, "topic")
def set_topic(context: AdminContext, answer: Answer, *, topic: str, durability: str) -> None:
    """Change a topic's durability, in force when this answers: its description."""
    record = context.topics.set_durability(topic, durability)

    def placed(error: DanubeError | None) -> None:
        if error is None:
            answer.done(topic_summary(record))
            return
        answer.fail(
            Unavailable(
                f"{topic} will be {durability} as soon as its worker is back; until then as before "
                f"({error})"
            )
        )

    context.place(record, placed)
