"""What PySpark calls to write: tasks stage rows, the driver commits and publishes them.

    frame.write.format("danube").option("topic", "/default/flights").mode("append").save()

PySpark makes a writer for planning, hands it to the tasks, and calls `commit` or `abort` of it, for a stream of another
one: so the messages of the tasks tell what the driver has to know.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from danube_fast.errors import FailedPrecondition, Internal, InvalidArgument
from danube_fast.spark.failures import WriteWarning
from danube_fast.spark.write.options import ONCE_PREFIX, STREAM_PREFIX, WriteOptions
from danube_fast.spark.write.publishing import BrokerLink, Proposal, publish_proposal
from danube_fast.spark.write.record import (
    StagedObject,
    delete_batches,
    find_batch,
    list_batches,
    staged_prefix,
)
from danube_fast.spark.write.rows import check_columns, stage_rows
from danube_fast.spark.write.staging import Stager, StagingTarget, open_staging

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchWriter", "StagedRows", "StreamWriter"]

_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""What Spark tells the tasks of a stream."""


@dataclass(frozen=True)
class StagedRows(WriterCommitMessage):
    """What one task has staged."""

    write_id: str
    query: str
    run: str
    store: str
    partition_ids: tuple[int, ...]
    objects: list[StagedObject]


class _Writer:
    """What both kinds of writers share: everything but the name of the batch."""

    def __init__(self, options: WriteOptions, target: StagingTarget) -> None:
        self._options, self._target = options, target
        self._run = secrets.token_hex(8)
        """Tells the objects of this run of a batch from those of others."""

    @classmethod
    def make(cls, given: Mapping[str, str], schema: StructType, *, overwrites: bool) -> Self:
        """Check options and columns, and look the topic up. Raises InvalidArgument, and as `BrokerLink.target`."""
        if overwrites:
            raise InvalidArgument(
                "a topic is not overwritten; use mode('append'), of a stream outputMode('append') or 'update'"
            )
        options = WriteOptions.parse(given)
        check_columns(schema)
        with BrokerLink(options.url, options.timeout_seconds, options.access) as link:
            target = link.target(options.topic, options.staging)
        open_staging(target.store).close()  # a folder is made here, not by tasks on other hosts
        return cls(options, target)

    def _stage(
        self, batches: Iterator[pa.RecordBatch], write_id: str, batch: int, query: str
    ) -> StagedRows:
        """Stage the rows of this task."""
        context = TaskContext.get()
        if context is None:
            raise Internal("rows are staged by tasks of Spark")
        target = self._target
        # an attempt of its own even where Spark numbers two alike
        attempt = f"{context.partitionId():06d}-{context.taskAttemptId()}-{secrets.token_hex(4)}-"
        store = open_staging(target.store, must_exist=True)
        try:
            stager = Stager(store, target, staged_prefix(write_id, batch, self._run) + attempt)
            stage_rows(batches, stager, len(target.partition_ids), context.partitionId())
            objects = stager.finish()
        finally:
            store.close()
        return StagedRows(write_id, query, self._run, target.store, target.partition_ids, objects)

    def _publish(
        self, staged: Sequence[StagedRows], batch: int, *, must_exist: bool = False
    ) -> None:
        """Commit and publish what tasks have staged. `must_exist`: that is nothing, as it is committed already."""
        first, given = staged[0], self._options
        if any(each.partition_ids != first.partition_ids for each in staged):
            raise FailedPrecondition(
                f"{self._options.topic} was made again while tasks staged rows for it; run the job again"
            )
        objects = [each for message in staged for each in message.objects]
        proposal = Proposal(
            first.write_id, batch, first.query, self._options.topic, first.partition_ids, objects,
            must_exist,
        )  # fmt: skip
        store = open_staging(first.store)
        try:
            with BrokerLink(given.url, given.timeout_seconds, given.access) as link:
                publish_proposal(link, store, proposal)
        finally:
            store.close()

    def _sweep_run(self, staged: Sequence[StagedRows], batch: int) -> None:
        """Delete what a run has staged, unless its batch is committed: then its objects may be those that count."""
        store = open_staging(staged[0].store)
        try:
            found = find_batch(list_batches(store, staged[0].write_id), batch)
            if found is not None and not found.is_committed:
                prefix = staged_prefix(staged[0].write_id, batch, staged[0].run)
                store.delete([key for key in found.staged if key.startswith(prefix)])
        finally:
            store.close()


def _given(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    return [each for each in messages if isinstance(each, StagedRows)]


class BatchWriter(_Writer, DataSourceArrowWriter):
    """One write of a data frame."""

    def __init__(self, options: WriteOptions, target: StagingTarget) -> None:
        super().__init__(options, target)
        self._write_id = options.write_id
        self._is_settled = False
        if not self._write_id:
            self._write_id = f"{ONCE_PREFIX}{self._run}"
            warnings.warn(
                "a write without write_id is published at least once: a job that is run again after a failure repeats "
                "its rows; .option('write_id', ...) makes it once",
                WriteWarning,
                stacklevel=2,
            )
            return
        store = open_staging(target.store)
        try:
            found = find_batch(list_batches(store, self._write_id), 0)
        finally:
            store.close()
        self._is_settled = found is not None and (found.is_committed or found.is_done)
        if found is not None and self._is_settled:
            state = (
                "published already: nothing is published now"
                if found.is_done
                else "committed already: the rows committed then are published, and none of this run"
            )
            warnings.warn(
                f"write_id {self._write_id} is {state}; other rows need another write_id",
                WriteWarning,
                stacklevel=2,
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a task; none if the rows of this write are committed already."""
        batches = iter(()) if self._is_settled else iterator
        return self._stage(batches, self._write_id, 0, "")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what tasks have staged. Raises as `publish_proposal`."""
        staged = _given(messages)
        if staged and (self._options.write_id or any(each.objects for each in staged)):
            self._publish(staged, 0, must_exist=self._is_settled)
        if staged and not self._options.write_id:
            self._forget(staged[0])

    def _forget(self, staged: StagedRows) -> None:
        """Delete what is known of a write that cannot be repeated."""
        store = open_staging(staged.store)
        try:
            delete_batches(store, list_batches(store, self._write_id))
        finally:
            store.close()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete what tasks have staged, unless it is committed: then it is published by the next run of the job, or by
        `danube-fast spark writes resume`."""
        nothing = StagedRows(self._write_id, "", self._run, self._target.store, (), [])
        self._sweep_run([nothing], 0)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The writes of a stream, one for each of its batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage the rows of a task."""
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context else None
        batch = context.getLocalProperty(_BATCH) if context else None
        if not query or batch is None:
            raise Internal(
                "this Spark does not tell tasks the query of their stream; use 4.2 or newer"
            )
        write_id = self._options.write_id or f"{STREAM_PREFIX}{query}"
        return self._stage(iterator, write_id, int(batch), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - PySpark's name
        """Publish what tasks have staged for a batch. Raises as `publish_proposal`."""
        if staged := _given(messages):
            self._publish(staged, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - PySpark's name
        """Delete what tasks have staged for a batch, unless it is committed: then the query publishes it when it is
        started again."""
        if staged := _given(messages):
            self._sweep_run(staged, batchId)
