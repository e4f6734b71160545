"""Reading topics as a stream: Spark asks for offsets, batch by batch, and keeps them in its checkpoint.

    {"/default/flights": {"0": [1700, 3], "1": [1650, 3]}}       by topic and partition: offset, incarnation

Each batch is a snapshot with a hold of its own, which is released when Spark has committed the batch. A partition that
a topic grows begins at its first message; one without messages has no incarnation yet, and 0 stands there. Offsets that
a topic does not have any more, because retention was faster or because it was made anew, are DataLoss that names them;
with `failOnDataLoss` false the stream goes on behind them.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from danube_fast.client.client import Client
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, DataLoss
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import (
    Bounds,
    PartitionRange,
    Snapshot,
    Task,
    divide,
    limited_range,
    open_reading,
    release_quietly,
    snapshot_of_broker,
)
from danube_fast.spark.scan import read_task

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DanubeStreamReader", "TaskPartition"]

RELEASE_SECONDS = 10.0
"""A broker that does not release a hold within this time is away."""
FLUSH_NS = SECOND_NS
"""A topic is flushed once in so long: Spark asks as soon as a batch is done."""

Offsets = dict[str, dict[str, list[int]]]
"""By topic and partition: the offset of the next message, and the topic's incarnation."""


class TaskPartition(InputPartition):
    """One task."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)


class DanubeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream. It lives with the query, in a process of its own beside the driver."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options._replace(columns=tuple(schema.fieldNames()))
        self._schema = schema
        self._clock = SystemClock()
        self._client: Client | None = None
        self._snapshot: Snapshot | None = None
        self._flushed_ns = 0
        self._holds: dict[str, str] = {}
        """Holds of batches, and their topics."""
        """Of snapshots that a batch is read from."""
        self._target: Offsets | None = None
        """Where a stream of what is there now ends."""

    # ------------------------------------------------------------ offsets

    def initialOffset(self) -> Offsets:  # noqa: N802 - PySpark's name
        """Where a new stream begins: the option `start`."""
        snapshot = self._flush()
        store = open_reading(snapshot.store)
        options = self._options._replace(end="latest")
        return _offsets((each, limited_range(store, each, options).low) for each in snapshot.ranges)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802
        """Where the next batch ends: at most `maxMessagesPerTrigger` behind `start`."""
        snapshot = self._fresh()
        ends = _offsets((each, each.high) for each in snapshot.ranges)
        if self._target is not None:
            ends = self._target
        ends = _forward(start, ends)
        if not isinstance(limit, ReadMaxRows):
            return ends
        firsts = _offsets((each, each.low) for each in snapshot.ranges)
        return _limited(start, ends, firsts, limit.max_rows)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxMessagesPerTrigger`."""
        rows = self._options.messages_max
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def reportLatestOffset(self) -> Offsets | None:  # noqa: N802
        """Where the topics ended when they were flushed last."""
        if self._snapshot is None:
            return None
        return _offsets((each, each.high) for each in self._snapshot.ranges)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End at what is there now."""
        self._target = _offsets((each, each.high) for each in self._flush().ranges)

    # ------------------------------------------------------------ batches

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        """Plan the batch between two offsets. Raises DataLoss if some of it is not there any more."""
        snapshot = self._flush(self._options.hold_seconds)
        self._holds.update(snapshot.topics)
        known = {(each.topic, str(each.partition)): each for each in snapshot.ranges}
        ranges = []
        for topic, partitions in end.items():
            for partition, (high, incarnation) in partitions.items():
                before = start.get(topic, {}).get(partition)
                of = known.get((topic, partition))
                found = self._range(of, topic, partition, before, high, incarnation)
                if found is not None:
                    ranges.append(found)
        plan = divide(snapshot, ranges, self._options, Bounds())
        return [TaskPartition(task) for task in plan.tasks]

    def _range(
        self, of: PartitionRange | None, topic: str, partition: str, before: list[int] | None,
        high: int, incarnation: int,
    ) -> PartitionRange | None:  # fmt: skip
        """Choose the offsets that a batch reads of one partition; None: none. Raises DataLoss."""
        low = before[0] if before is not None else 0
        if of is None or not _is_same(of.manifest.incarnation, incarnation):
            self._lose(topic, partition, low, high, "the topic was deleted")
            return None
        first = of.low
        if before is None:
            low = first  # the topic has grown
        elif not _is_same(before[1], incarnation):
            self._lose(topic, partition, low, low + 1, "the topic was deleted and made again")
            low = first
        elif low < first:
            lost = min(high, first)
            self._lose(topic, partition, low, lost, "retention or a purge was faster")
            low = lost
        if high > of.high:
            cause = "the topic ends before them: is its broker an older copy?"
            self._lose(topic, partition, max(low, of.high), high, cause)
            high = of.high
        return of._replace(low=low, high=max(low, high))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task, on an executor."""
        schema = to_arrow_schema(self._schema, timezone="UTC")
        names = self._schema.fieldNames()
        return read_task(partition.value, names, schema, fails_on_loss=self._options.fails_on_loss)

    def commit(self, end: Offsets) -> None:
        """Release the holds of batches that are done."""
        self._release()

    def stop(self) -> None:
        """Release all holds and leave the broker."""
        self._release()
        self._leave()

    def __getstate__(self) -> dict[str, Any]:
        """Executors get the options alone."""
        return {"_options": self._options, "_schema": self._schema}

    # ------------------------------------------------------------ the broker

    def _fresh(self) -> Snapshot:
        """Flush, unless it was done just now."""
        if self._snapshot is None or self._clock.monotonic_ns() - self._flushed_ns >= FLUSH_NS:
            return self._flush()
        return self._snapshot

    def _flush(self, hold_seconds: int = 0) -> Snapshot:
        if self._client is None:
            # Spark ends this process by a signal: `stop` runs then, too
            with contextlib.suppress(ValueError):  # it is not the main thread
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            self._client = self._options.connect()
        try:
            snapshot = snapshot_of_broker(self._client, self._options, hold_seconds)
        except DanubeError:
            self._leave()  # the next try begins anew
            raise
        self._snapshot, self._flushed_ns = snapshot, self._clock.monotonic_ns()
        return snapshot

    def _release(self) -> None:
        if self._client is not None:
            with _sigterm_deferred():
                holds, self._holds = self._holds, {}
                for hold, topic in holds.items():
                    release = functools.partial(
                        self._client.admin.release_history_hold,
                        topic=topic,
                        timeout=RELEASE_SECONDS,
                    )
                    if not release_quietly(release, hold):
                        break  # the broker is away: they end by themselves

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(DanubeError):
                client.close()

    def _lose(self, topic: str, partition: str, low: int, high: int, cause: str) -> None:
        if self._options.fails_on_loss and high > low:
            raise DataLoss(
                f"offsets {low} to {high} of {topic}, partition {partition}, are gone: {cause}; "
                ".option('failOnDataLoss', 'false') goes on behind them, a new checkpoint begins anew"
            )


@contextlib.contextmanager
def _sigterm_deferred() -> Iterator[None]:
    """Defer SIGTERM, by which Spark ends this process, to the end of the block: it may come while `stop` runs."""
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    except ValueError:  # it is not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
        for number in came[:1]:
            signal.raise_signal(number)


def _offsets(of: Any) -> Offsets:
    """Offsets of pairs of a range and an offset in it."""
    found: Offsets = {}
    for each, offset in of:
        place: PartitionRange = each
        found.setdefault(place.topic, {})[str(place.partition)] = [
            offset,
            place.manifest.incarnation,
        ]
    return found


def _forward(start: Offsets, ends: Offsets) -> Offsets:
    """`ends`, but nowhere before `start`: topics that are gone stay where they were."""
    found: Offsets = {topic: dict(partitions) for topic, partitions in ends.items()}
    for topic, partitions in start.items():
        for partition, (offset, incarnation) in partitions.items():
            end = found.setdefault(topic, {}).get(partition)
            if end is None or (_is_same(end[1], incarnation) and end[0] < offset):
                found[topic][partition] = [offset, incarnation]
    return found


def _limited(start: Offsets, ends: Offsets, firsts: Offsets, rows: int) -> Offsets:
    """Ends at most `rows` messages behind `start` in all: each partition gets a share by what waits there."""
    waiting: dict[tuple[str, str], int] = {}
    begins: dict[tuple[str, str], int] = {}
    for topic, partitions in ends.items():
        for partition, (end, incarnation) in partitions.items():
            begin = max(_at(each, topic, partition, incarnation) for each in (start, firsts))
            begins[topic, partition] = begin
            waiting[topic, partition] = max(0, end - begin)
    total = sum(waiting.values())
    if total <= rows:
        return ends
    found: Offsets = {topic: dict(partitions) for topic, partitions in ends.items()}
    left = rows
    for (topic, partition), count in sorted(waiting.items(), key=lambda item: -item[1]):
        share = min(left, count, -(-rows * count // total))
        left -= share
        incarnation = ends[topic][partition][1]
        found[topic][partition] = [begins[topic, partition] + share, incarnation]
    return found


def _at(
    offsets: Mapping[str, Mapping[str, list[int]]], topic: str, partition: str, incarnation: int
) -> int:
    """Find the offset of a partition in this life of its topic; 0: there is none."""
    found = offsets.get(topic, {}).get(partition)
    return found[0] if found is not None and _is_same(found[1], incarnation) else 0


def _is_same(one: int, other: int) -> bool:
    """Whether two incarnations are those of one topic: a partition without messages has none yet."""
    return one == other or 0 in (one, other)
