"""Sizes of what only history has: where its bytes lie the uploader tells, how many there are the worker knows.

    | history: an extent for each section | log, counted from its index |
    first offset                          the log's first message

Before the answer, and while the uploader or its store is away, the bytes are taken as spread evenly over the offsets.
Then nothing of history is given up for its size (`Sizes.coarse_until`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from danube_fast.broker import messages as m
from danube_fast.broker.partition import Partition
from danube_fast.broker.sizes import Sizes
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.shard.state import ShardState

__all__ = ["Found", "HistorySizes", "size_before"]

FIND_MS = 30_000
RETRY_NS = SECOND_NS

Found = Callable[[list[m.Extent], int], None]
"""Called with extents, and the offset below which there are no others."""


class HistorySizes:
    """Find where the bytes of history lie, for the partitions of one worker."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._ask_at_ns: dict[int, int] = {}
        """By partition id: when it may be asked again."""
        state.removal_listeners.append(self._forget)

    def find(self, partition: Partition, found: Found) -> None:
        """Ask, unless a question is under way or the last one has just failed."""
        number, now_ns = partition.partition_id, self._state.now_ns
        uploader = self._state.boot.config.processes.uploader
        if uploader is None or now_ns < self._ask_at_ns.get(number, 0):
            return
        self._ask_at_ns[number] = now_ns + FIND_MS * MILLISECOND_NS
        until = partition.uploaded.until

        def answered(reply: Reply) -> None:
            if self._state.partition(number) is not partition:
                return
            self._ask_at_ns[number] = self._state.now_ns + RETRY_NS
            if reply.error is None:
                found(reply.value, until)

        message = m.ListExtents(number, partition.uploaded.manifest)
        mailbox = self._state.boot.mailbox
        mailbox.call(uploader, message, on_reply=answered, timeout_ms=FIND_MS)

    def _forget(self, partition: Partition) -> None:
        self._ask_at_ns.pop(partition.partition_id, None)


def size_before(
    partition: Partition, start: int, in_log: Sizes, extents: Sequence[m.Extent], known_until: int
) -> tuple[Sizes, bool]:
    """Size what history has before `start`, where the log begins, and tell whether that is a guess.

    `in_log` has what the log has. `extents` count if there are no others below `known_until`.
    """
    first, until = partition.first_offset, partition.uploaded.until
    start = min(start, until)
    is_guess = known_until < start
    if is_guess:
        left = max(0, partition.uploaded.byte_count - in_log.between(start, until))
        extents = [m.Extent(first, start, left)]
    found, total = Sizes(first), 0
    for each in extents:
        base, end = max(each.base_offset, first), min(each.end_offset, start)
        if base < end:
            found.note(base, total)
            total += each.byte_count * (end - base) // (each.end_offset - each.base_offset)
            found.note(end, total)
    found.note(start, total)
    return found, is_guess
