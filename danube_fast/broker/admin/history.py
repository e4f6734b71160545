"""The administrative operation on history: upload a topic now, and hold its objects."""

from __future__ import annotations

from typing import Any

import msgspec

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.broker.messages import FlushHistory
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument
from danube_fast.types import Permission

__all__ = ["flush_history"]

HOLD_SECONDS_MAX = 30 * 24 * 3600
FLUSH_MS_MAX = 3600 * 1000


@operation(Permission.CONSUME, "topic")
def flush_history(
    context: AdminContext,
    answer: Answer,
    *,
    topic: str,
    hold_seconds: int = 0,
    timeout_ms: int = 60_000,
) -> None:
    """Upload all messages of a topic up to now; answers the store, each partition's offsets, and the hold.

    With `hold_seconds` its objects are not deleted for so long: for readers that have the store alone. NotFound for
    an unknown topic; FailedPrecondition for one without history; DeadlineExceeded after `timeout_ms`, and it goes on;
    Unavailable while the store or a worker is away.
    """
    record = context.topics.require(topic)
    if not 0 <= hold_seconds <= HOLD_SECONDS_MAX:
        raise InvalidArgument(
            f"hold_seconds is {hold_seconds}; give 0 to {HOLD_SECONDS_MAX}, and renew the hold if it takes longer"
        )
    if not 1 <= timeout_ms <= FLUSH_MS_MAX:
        raise InvalidArgument(f"timeout_ms is {timeout_ms}; give 1 to {FLUSH_MS_MAX}")
    uploader = context.processes.uploader
    if uploader is None:
        raise FailedPrecondition("the broker has no store for history; start it with --store URL")
    partitions = context.topics.partitions(record)
    ids = [partition.partition_id for partition in partitions]

    def flushed(value: Any, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
        else:
            answer.done({"topic": topic, **msgspec.to_builtins(value)})

    message = FlushHistory(ids, hold_seconds, timeout_ms)
    context.ask(uploader, message, flushed, timeout_ms=timeout_ms + 5000)
