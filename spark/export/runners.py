"""Where the pieces of a plan are run: in this process, or as tasks of Spark.

Rows pass through Spark only for a condition (`where`); else a task reads and writes by itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from danube_fast.errors import InvalidArgument
from danube_fast.spark.export.files import (
    Piece,
    Work,
    batch_schema,
    export_piece,
    read_piece,
    write_piece,
)
from danube_fast.spark.export.target import ExportSpec
from danube_fast.spark.options import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LocalRunner", "Runner", "SparkRunner"]

CONNECT_PARALLELISM = 8
"""Of a session of Spark Connect, which does not tell."""
PIECE = "_piece"
"""Column that tells a task that writes which piece the rows are of."""


class Runner(Protocol):
    """Runs tasks."""

    parallelism: int
    """Tasks at the same time."""

    def condition_columns(self, spec: ExportSpec) -> tuple[str, ...]:
        """Columns of messages that `where` needs. Raises InvalidArgument for a wrong condition."""
        ...

    def run(self, work: Work, pieces: Sequence[Piece]) -> None:
        """Stage the files of all pieces. Raises what a task raises."""
        ...

    def cancel(self) -> None:
        """End what runs, in another thread."""
        ...


class LocalRunner:
    """Runs pieces one after the other in this process; has no conditions."""

    parallelism = 1

    def __init__(self) -> None:
        self._is_cancelled = False

    def condition_columns(self, spec: ExportSpec) -> tuple[str, ...]:
        """None. Raises InvalidArgument for a condition."""
        if spec.where:
            raise InvalidArgument("a condition needs Spark")
        return ()

    def run(self, work: Work, pieces: Sequence[Piece]) -> None:
        """Stage the files of all pieces."""
        for piece in pieces:
            if not self._is_cancelled:
                export_piece(work, piece)

    def cancel(self) -> None:
        """Begin no other piece."""
        self._is_cancelled = True


class SparkRunner:
    """Runs a piece as a task of Spark each."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        # Spark Connect has no context
        context = getattr(spark, "_sc", None)
        self.parallelism = (
            CONNECT_PARALLELISM if context is None else int(context.defaultParallelism)
        )

    def condition_columns(self, spec: ExportSpec) -> tuple[str, ...]:
        """The columns that a condition mentions, once Spark has looked at it."""
        if not spec.where:
            return ()
        words = {word.lower() for word in re.findall(r"\w+", spec.where)}
        mentioned = tuple(name for name in COLUMNS if name in words)
        work = Work(spec, "", "", spec.needed(mentioned), fails_on_loss=True)
        try:
            rows = self._spark.createDataFrame([], _spark_schema(work))
            self._where(rows, spec).schema  # noqa: B018 - Spark Connect looks at it only now
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise InvalidArgument(f"--where {spec.where!r} cannot be used: {text}") from None
        return mentioned

    @staticmethod
    def _where(rows: Any, spec: ExportSpec) -> Any:
        return rows.where(spec.where)

    def run(self, work: Work, pieces: Sequence[Piece]) -> None:
        """Stage the files of all pieces."""
        numbers = self._spark.range(0, len(pieces), 1, len(pieces))
        if not work.spec.where:
            numbers.mapInArrow(_exporting(work, pieces), "id long").collect()
            return
        rows = numbers.mapInArrow(_reading(work, pieces), _spark_schema(work, with_piece=True))
        chosen = self._where(rows, work.spec)
        chosen.mapInArrow(_writing(work, pieces), "id long").collect()

    def cancel(self) -> None:
        """End all jobs of the session."""
        with contextlib.suppress(Exception):  # of a session that is ending
            context = getattr(self._spark, "_sc", None)
            if context is None:
                self._spark.interruptAll()
            else:
                context.cancelAllJobs()


def _spark_schema(work: Work, *, with_piece: bool = False) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import IntegerType

    schema = from_arrow_schema(batch_schema(work))
    return schema.add(PIECE, IntegerType()) if with_piece else schema


def _exporting(work: Work, pieces: Sequence[Piece]) -> Any:
    def export(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                export_piece(work, pieces[number])
            yield batch

    return export


def _reading(work: Work, pieces: Sequence[Piece]) -> Any:
    def read(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        schema = batch_schema(work).append(pa.field(PIECE, pa.int32()))
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in read_piece(work, pieces[number]):
                    mark = pa.repeat(pa.scalar(number, type=pa.int32()), rows.num_rows)
                    yield pa.RecordBatch.from_arrays([*rows.columns, mark], schema=schema)

    return read


def _writing(work: Work, pieces: Sequence[Piece]) -> Any:
    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import itertools

        import pyarrow as pa

        first = next(batches, None)
        if first is None:
            return
        (number,) = {*first.column(PIECE).to_pylist()}
        schema = batch_schema(work)
        rows = (
            pa.RecordBatch.from_arrays(batch.columns[:-1], names=schema.names).cast(schema)
            for batch in itertools.chain([first], batches)
        )
        write_piece(work, pieces[number], rows)
        yield pa.RecordBatch.from_arrays([pa.array([number], type=pa.int64())], names=["id"])

    return write
