"""The administrative operations on history: upload a topic now, and hold its objects for as long as they are read."""

from __future__ import annotations

from typing import Any

import msgspec

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.broker.messages import FlushHistory, ReleaseHold, RenewedHold, RenewHold
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument
from danube_fast.types import Dispatch, Durability, Permission

__all__ = ["flush_history", "release_history_hold", "renew_history_hold"]

HOLD_SECONDS_MAX = 30 * 24 * 3600
FLUSH_MS_MAX = 3600 * 1000
STORE_MS = 60_000
"""A store that is busy is tried again for half a minute, for each of a few requests."""


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

    With `hold_seconds` its objects are not deleted for so long: for readers that have the store alone. A topic without
    history is copied for as long as it is held. NotFound for an unknown topic; FailedPrecondition for one that is in no
    log, or has no history and is not held; DeadlineExceeded after `timeout_ms`, and an upload goes on, a copy does not;
    Unavailable while the store or a worker is away.
    """
    record = context.topics.require(topic)
    if not 0 <= hold_seconds <= HOLD_SECONDS_MAX:
        raise InvalidArgument(
            f"hold_seconds is {hold_seconds}; give 0 to {HOLD_SECONDS_MAX}, and renew the hold if it takes longer"
        )
    if not 1 <= timeout_ms <= FLUSH_MS_MAX:
        raise InvalidArgument(f"timeout_ms is {timeout_ms}; give 1 to {FLUSH_MS_MAX}")
    if record.dispatch != Dispatch.RELIABLE or record.durability == Durability.MEMORY:
        raise FailedPrecondition(
            f"messages of {topic} are not in a log, as it is non_reliable or its durability is memory: nothing can be "
            "uploaded; use a topic whose durability is os or fsync"
        )
    uploader = _uploader(context)
    partitions = context.topics.partitions(record)
    ids = [partition.partition_id for partition in partitions]

    def flushed(value: Any, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
        else:
            answer.done({"topic": topic, **msgspec.to_builtins(value)})

    message = FlushHistory(ids, hold_seconds, timeout_ms)
    context.ask(uploader, message, flushed, timeout_ms=timeout_ms + 5000)


@operation(Permission.CONSUME, "topic")
def renew_history_hold(
    context: AdminContext, answer: Answer, *, hold: str, hold_seconds: int, topic: str = ""
) -> None:
    """Keep the objects of a hold for so many seconds from now on; answers the new hold, and when it expires.

    With the `topic` that was flushed, the right to consume it is enough; without, it is needed on the cluster. `hold` is what a flush or the last renewal has answered. NotFound if it was released or has expired: flush the
    topic again; InvalidArgument if it is no hold; Unavailable while the store is away.
    """
    if not 1 <= hold_seconds <= HOLD_SECONDS_MAX:
        raise InvalidArgument(
            f"hold_seconds is {hold_seconds}; give 1 to {HOLD_SECONDS_MAX}, and renew the hold again if it takes "
            "longer; release_history_hold ends it"
        )

    def renewed(value: RenewedHold | None, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
        elif value is not None:
            answer.done(value._asdict())

    message = RenewHold(hold, hold_seconds, topic)
    context.ask(_uploader(context), message, renewed, timeout_ms=STORE_MS)


@operation(Permission.CONSUME, "topic")
def release_history_hold(
    context: AdminContext, answer: Answer, *, hold: str, topic: str = ""
) -> None:
    """Give the objects of a hold back: they may be deleted. A hold that is gone already is no error.

    `topic`: as for a renewal; a hold of another topic stays. InvalidArgument if it is no hold; Unavailable while the store is away.
    """

    def released(_: Any, error: DanubeError | None) -> None:
        if error is not None:
            answer.fail(error)
        else:
            answer.done()

    context.ask(_uploader(context), ReleaseHold(hold, topic), released, timeout_ms=STORE_MS)


def _uploader(context: AdminContext) -> int:
    """Process index of the uploader. Raises FailedPrecondition without a store."""
    uploader = context.processes.uploader
    if uploader is None:
        raise FailedPrecondition("the broker has no store for history; start it with --store URL")
    return uploader
