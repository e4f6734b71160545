"""A seek of a consumer: tried on all its partitions first, so that one that is refused moves nothing.

    SEEK with dry_run to all -> all would do it -> SEEK to all -> ACK: durable

A worker that ends in between may leave some moved and others not: the error says which.
"""

from __future__ import annotations

from typing import Any

from danube_fast.client.consume.acks import AckQueue
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.flushes import answered_steps
from danube_fast.client.consume.partitions import Partitions
from danube_fast.client.link.calls import Call
from danube_fast.client.link.steps import Steps, Wait, deadline_after
from danube_fast.client.values.options import checked_position
from danube_fast.errors import DanubeError, DeadlineExceeded, InvalidArgument, NotFound

__all__ = ["seek_steps"]

_NAMES_MAX = 20


def seek_steps(
    partitions: Partitions, acks: AckQueue, position: Any, timeout: float
) -> Steps[None]:
    """Move the subscription in every partition. Raises InvalidArgument for an offset beyond the end of
    all of them, Unavailable and DeadlineExceeded with the partitions that were moved."""
    pump = partitions.pump
    place = checked_position(position)
    deadline_ns = deadline_after(pump.clock, timeout)
    yield from _try_steps(partitions, place, timeout, deadline_ns)
    moved: list[Attachment] = []
    while left := (yield from _move_steps(partitions, acks, place, moved, deadline_ns)):
        if not all(_has_left(call) for call in left.values()):
            raise _incomplete(moved, left, timeout)
        if pump.clock.monotonic_ns() >= deadline_ns:
            raise _incomplete(moved, left, timeout)
    with pump.lock:
        calls = acks.send(durable=True)
    yield from answered_steps(pump, calls, timeout, "seek; it happened, and may not be durable")


def _try_steps(partitions: Partitions, place: Any, timeout: float, deadline_ns: int) -> Steps[None]:
    """Raise what speaks against the seek in any partition."""
    pump = partitions.pump
    while True:
        yield from partitions.attached_steps(deadline_ns)
        with pump.lock:
            calls = [each.seek(place, dry_run=True) for each in partitions.attachments]
        try:
            yield from answered_steps(pump, calls, timeout, "seek; nothing was moved")
            break
        except NotFound:  # a consumer had to leave meanwhile: it comes back
            if pump.clock.monotonic_ns() >= deadline_ns:
                raise
    end = max((call.value["end_offset"] for call in calls), default=None)
    if isinstance(place, int) and end is not None and place > end:
        raise InvalidArgument(
            f"offset {place} lies beyond the end of {', '.join(partitions.topics)}, which is at {end}; "
            "nothing was moved: use 'latest' to wait for new messages"
        )


def _move_steps(
    partitions: Partitions,
    acks: AckQueue,
    place: Any,
    moved: list[Attachment],
    deadline_ns: int,
) -> Steps[dict[Attachment, Call]]:
    """Move all partitions but those that are `moved`, which grows; the calls that did not succeed."""
    yield from partitions.attached_steps(deadline_ns)
    with partitions.pump.lock:
        acks.send()
        calls = {
            each: each.seek(place, dry_run=False)
            for each in partitions.attachments
            if each not in moved
        }
    yield Wait(lambda: all(call.done for call in calls.values()), deadline_ns)
    moved += [each for each, call in calls.items() if call.done and call.error is None]
    return {each: call for each, call in calls.items() if each not in moved}


def _has_left(call: Call) -> bool:
    """Whether a consumer had to leave before the seek, because its partition moves or another consumer
    sought: it comes back."""
    return call.done and isinstance(call.error, NotFound)


def _incomplete(
    moved: list[Attachment], left: dict[Attachment, Call], timeout: float
) -> DanubeError:
    """The error of a seek that came to an end in the middle."""
    errors = [call.error for call in left.values() if call.error is not None]
    error = errors[0] if errors else DeadlineExceeded(f"no answer within {timeout:g} s")
    return type(error)(
        f"{error}; the seek moved {_names(moved)}, and perhaps not {_names(list(left))}: seek again"
    )


def _names(attachments: list[Attachment]) -> str:
    names = [each.topic for each in attachments[:_NAMES_MAX]]
    more = len(attachments) - len(names)
    return (", ".join(names) or "no partition") + (f" and {more} others" if more else "")
