"""The administrative operation that moves topics between workers."""

from __future__ import annotations

from typing import Any

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.errors import DanubeError, FailedPrecondition, NotFound
from danube_fast.types import Permission

__all__ = ["move_topic"]

ALL = -1


@operation(Permission.MANAGE_BROKER, "", lambda values: [(Permission.LOOKUP, values["topic"])])
def move_topic(
    context: AdminContext, answer: Answer, *, topic: str, worker: int, partition: int = ALL
) -> None:
    """Move a topic, or one of its partitions, to another worker: one partition after the other, those
    that are there already left alone. Publishing and consuming go on; answers what moved.

    NotFound for an unknown worker or partition; FailedPrecondition if it is there already or on its
    way; Unavailable if a worker is down, and then that partition stays where it was.
    """
    record = context.topics.require(topic)
    partitions = context.topics.partitions(record)
    if partition != ALL:
        if not 0 <= partition < len(partitions):
            raise NotFound(
                f"{topic} has no partition {partition}; it has {len(partitions)}, counted from 0"
            )
        partitions = [partitions[partition]]
    there = [part for part in partitions if context.owner_of(part.log_id).worker == worker]
    left = [part for part in partitions if part not in there]
    if there and not left:
        what = topic if partition == ALL else f"partition {partition} of {topic}"
        raise FailedPrecondition(f"{what} is on worker {worker} already")
    moved: list[dict[str, Any]] = []

    def done(value: dict[str, Any] | None, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
            return
        if value is not None:
            moved.append(value)
        go_on()

    def go_on() -> None:
        if not left:
            answer.done({"topic": topic, "worker": worker, "moved": moved})
            return
        part = left.pop(0)
        try:
            context.move(part, worker, done)
        except DanubeError as error:
            answer.fail(error)

    go_on()
