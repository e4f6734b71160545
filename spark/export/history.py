"""The topic as an export sees it: what is in history now, held while it is read, and what is new since."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from danube_fast.client.client import Client
from danube_fast.spark.export.plan import Next
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import (
    Bounds,
    PartitionRange,
    Snapshot,
    Task,
    divide,
    held_snapshot,
    limited_range,
    open_reading,
    snapshot_of_broker,
)

__all__ = ["Pending", "TopicHistory", "cut", "open_history", "tasks_of"]

FILE_BYTES = 128 * 1024 * 1024
"""What one file holds at most, about, uncompressed."""
FILE_BYTES_MIN = 4 * 1024 * 1024
"""Less than this is not divided between tasks."""
WHOLE_SPLIT = str(1 << 40)


class Pending(NamedTuple):
    """What is not exported yet."""

    messages: int
    byte_count: int
    """About."""


class TopicHistory:
    """One topic, asked of a broker or of a store alone."""

    def __init__(self, options: ReadOptions, client: Client | None) -> None:
        self._options, self._client = options, client
        self._topic = options.topics[0]

    @contextlib.contextmanager
    def snapshot(self, *, is_dry: bool = False) -> Iterator[Snapshot]:
        """Flush the topic, and hold its objects for a while. Raises as `make_plan`."""
        if is_dry and self._client is not None:
            yield snapshot_of_broker(self._client, self._options, 0)
            return
        with held_snapshot(self._options, self._client) as snapshot:
            yield snapshot

    def limited(self, snapshot: Snapshot) -> dict[int, PartitionRange]:
        """The partitions of a snapshot within `start` and `end`."""
        store = open_reading(snapshot.store)
        return {
            each.partition: limited_range(store, each, self._options) for each in snapshot.ranges
        }

    def pending(self, known: Mapping[str, Next]) -> Pending:
        """What came since. Raises what the broker raises."""
        if self._client is None:
            with self.snapshot(is_dry=True) as snapshot:
                counts = [
                    each.high - known[str(each.partition)].offset if str(each.partition) in known else each.high
                    for each in snapshot.ranges
                ]  # fmt: skip
            total = sum(counts)
            return Pending(total, total * _MESSAGE_BYTES)
        stats = self._client.admin.topic_stats(self._topic)
        total = 0
        for index, each in enumerate(stats["partition_stats"] or [stats]):
            at = known.get(str(index))
            total += max(
                0, each["end_offset"] - (each["first_offset"] if at is None else at.offset)
            )
        mean = stats["bytes_in"] / stats["messages_in"] if stats["messages_in"] else _MESSAGE_BYTES
        return Pending(total, int(total * mean))


_MESSAGE_BYTES = 100
"""Of a message whose size is not known."""


@contextlib.contextmanager
def open_history(options: ReadOptions) -> Iterator[TopicHistory]:
    """Connect to the broker, unless a store is named and none is. Raises what `connect` raises."""
    if options.url is None and options.store is not None:
        yield TopicHistory(options, None)
        return
    with options.connect() as client:
        client.admin.describe_topic(options.topics[0])  # NotFound, before anything is made
        yield TopicHistory(options, client)


def cut(of: PartitionRange, wanted: int) -> Iterator[tuple[int, int, int]]:
    """Divide a range in parts of about `wanted` bytes: low, high, bytes."""
    at, size = of.low, 0.0
    covered = of.low
    for section in of.manifest.sections:
        low, high = max(section.base_offset, covered), min(section.end_offset, of.high)
        if high <= low:
            continue
        covered = high
        share = section.byte_count * (high - low) / max(1, section.end_offset - section.base_offset)
        steps = max(1, round(share / wanted))
        for step in range(1, steps + 1):
            size += share / steps
            end = low + (high - low) * step // steps
            if size >= wanted * 3 / 4 and end > at:
                yield at, end, int(size)
                at, size = end, 0.0
    if at < of.high:
        yield at, of.high, int(size)


def tasks_of(snapshot: Snapshot, of: PartitionRange, topic: str) -> tuple[Task, ...]:
    """What a task reads for one range."""
    options = ReadOptions.parse({"topic": topic, "splitBytes": WHOLE_SPLIT})
    return tuple(divide(snapshot, [of], options, Bounds()).tasks)
