"""Administrative operations on topics."""

from __future__ import annotations

import fnmatch
from typing import Any

import msgspec

from danube_fast.broker.admin.registry import AdminContext, Answer, Steps, ask_owners, operation
from danube_fast.broker.admin.visibility import Visibility, answer_in_slices
from danube_fast.broker.answers import (
    PartitionPlace,
    TopicDescription,
    TopicStats,
    TopicSummary,
)
from danube_fast.broker.messages import PartitionStats, PurgePartitions, Unassign
from danube_fast.broker.topics.records import TopicOptions, TopicRecord
from danube_fast.broker.topics.reply_topics import owner_of_new
from danube_fast.errors import DanubeError, InvalidArgument, Unavailable
from danube_fast.types import (
    REPLY_TOPICS,
    Permission,
    glob_front,
    namespace_front,
    parse_topic,
)
from danube_fast.visible import common

__all__ = ["topic_stats"]

TOPICS_LISTED_MAX = 10_000


def _creation_permission(values: dict[str, Any]) -> Permission:
    """Permission that making a topic needs: reply topics are free, each belongs to its maker."""
    is_reply = values["topic"].startswith(REPLY_TOPICS)
    return Permission.PRODUCE if is_reply else Permission.MANAGE_TOPIC


@operation(Permission.MANAGE_TOPIC, "topic", permission_of=_creation_permission)
def create_topic(
    context: AdminContext,
    answer: Answer,
    *,
    topic: str,
    dispatch: str = "reliable",
    durability: str | None = None,
    partitions: int = 0,
) -> None:
    """Create a topic. `partitions` 0: not partitioned. Answers its description.

    AlreadyExists if there is one of that name.
    """
    options = TopicOptions.parse(
        {"dispatch": dispatch, "durability": durability, "partitions": partitions}
    )
    owner, topics = "", context.topics
    if context.security.is_enforced:
        owner = owner_of_new(topics, topic, options, answer.asker.principal)
    record = topics.create(topic, options, context.clock.wall_ns(), owner)

    def placed(error: DanubeError | None) -> None:
        if error is None or isinstance(error, Unavailable):
            # The topic exists; a worker that is down just now takes it up when it is back.
            answer.done(TopicSummary.of(record))
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
        answer.done(TopicSummary.of(record))

    ask_owners(context, record, partitions, Unassign, told)


@operation(Permission.LOOKUP, is_filtered=True)
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

    At most `limit` of them, those behind the name `after`; fewer only at the end. Answers a list of descriptions, of
    topics that the caller may look up; of reply topics, of its own.
    """
    visibility = Visibility(context, answer.asker)
    count = min(max(limit, 0), TOPICS_LISTED_MAX)

    asked_for = common([namespace_front(namespace)], [glob_front(pattern)])

    def is_listed(topic: str) -> bool:
        # in this order a hidden name costs what it costs, whether it matches or not
        return visibility.shows_topic(topic) and (
            not pattern or fnmatch.fnmatchcase(topic, pattern)
        )

    def steps() -> Steps:
        found: list[TopicRecord] = []
        records = context.topics.by_name.behind(after, common(asked_for, visibility.fronts))
        while len(found) < count and (record := next(records, None)) is not None:
            if is_listed(record.topic):
                found.append(record)
            yield None
        answer.done([TopicSummary.of(record) for record in found])

    answer_in_slices(context, answer, steps)


@operation(Permission.LOOKUP, "topic")
def describe_topic(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """Describe a topic: its settings and where each of its partitions lives."""
    record = context.topics.require(topic)
    placement = [
        PartitionPlace(
            partition_id=partition.partition_id,
            partition=record.partition_topic(partition.index),
            log_id=partition.log_id,
            worker=context.owner_of(partition.log_id).worker,
            moving_to=context.moving_to(partition.partition_id),
            extents=[list(msgspec.structs.astuple(extent)) for extent in partition.extents],
        )
        for partition in context.topics.partitions(record)
    ]
    answer.done(
        TopicDescription.of(
            record, incarnation=record.incarnation, epoch=record.epoch, placement=placement
        )
    )


@operation(Permission.LOOKUP, "topic")
def topic_stats(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """Offsets, rates' raw counts and subscriptions of a topic: totals, and per partition. Of subscriptions, those that the
    caller may look up.

    Unavailable if a worker that owns some of it is down.
    """
    record = context.topics.require(topic)
    visibility = Visibility(context, answer.asker)

    def gathered(values: list[Any], errors: list[DanubeError]) -> None:
        if errors:
            answer.fail(errors[0])
            return
        entries = [entry for value in values for entry in value]
        stats = {entry.partition_id: entry for entry in entries}
        for entry in entries:
            entry.subscriptions = [
                each
                for each in entry.subscriptions
                if visibility.shows_subscription(topic, each.subscription)
            ]
        partitions = [
            msgspec.structs.replace(stats[number], partition=record.partition_topic(index))
            for index, number in enumerate(record.partition_ids)
            if number in stats
        ]
        answer.done(TopicStats.add_up(record, partitions))

    ask_owners(context, record, context.topics.partitions(record), PartitionStats, gathered)


@operation(Permission.MANAGE_TOPIC, "topic")
def set_topic(
    context: AdminContext,
    answer: Answer,
    *,
    topic: str,
    durability: str | None = None,
    partitions: int | None = None,
) -> None:
    """Change a topic's durability, or give it more partitions, in force when this answers: its
    description.

    The number of partitions never shrinks. All subscriptions have the new ones from their first
    message on; messages of a key may go to another partition than before.
    """
    record = context.topics.require_stable(parse_topic(topic))
    if durability is None and partitions is None:
        raise InvalidArgument("nothing to change; name a durability, or a number of partitions")

    def grown(changed: TopicRecord | None, error: DanubeError | None) -> None:
        if changed is not None:
            answer.done(TopicSummary.of(changed))
        else:
            answer.fail(error or Unavailable(f"{topic} did not grow; try again"))

    if durability is None:
        context.grow(record, partitions or 0, grown)
        return
    record = context.topics.set_durability(topic, durability)

    def placed(error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(
                Unavailable(
                    f"{topic} will be {durability} as soon as its worker is back; until then as "
                    f"before ({error})"
                )
            )
        elif partitions is None:
            answer.done(TopicSummary.of(record))
        else:
            try:
                context.grow(context.topics.require_stable(topic), partitions, grown)
            except DanubeError as failure:
                answer.fail(failure)

    context.place(record, placed)


@operation(Permission.MANAGE_TOPIC, "topic")
def purge_topic(context: AdminContext, answer: Answer, *, topic: str) -> None:
    """Drop everything published so far, for all subscriptions: they go on behind it, and its space comes
    back. Answers how many messages that were, and where each partition begins now."""
    record = context.topics.require_stable(parse_topic(topic))
    partitions = context.topics.partitions(record)
    names = {part.partition_id: record.partition_topic(part.index) for part in partitions}

    def told(values: list[Any], errors: list[DanubeError]) -> None:
        if errors:
            answer.fail(errors[0])
            return
        rows = [row for value in values for row in value]
        answer.done(
            {
                "topic": topic,
                "purged": sum(count for _, count, _ in rows),
                "first_offsets": {names[number]: until for number, _, until in rows},
            }
        )

    ask_owners(context, record, partitions, PurgePartitions, told)
