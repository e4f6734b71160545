"""The data source `danube`: what PySpark calls to plan and to read.

    spark.read.format("danube").option("topic", "/default/flights").load()

PySpark makes these objects in a Python process of its own for planning, and again in those of executors. Filters on
offset, partition, publish_time and key reach `pushFilters`; Spark applies them again to the rows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from danube_fast.clock import MICROSECOND_NS
from danube_fast.errors import InvalidArgument
from danube_fast.spark.options import COLUMNS, ReadOptions
from danube_fast.spark.plan import OFFSET_MAX, Bounds, Task, make_plan
from danube_fast.spark.scan import read_task
from danube_fast.spark.stream import DanubeStreamReader, TaskPartition

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DanubeReader", "DanubeSource", "FilteringReader", "row_schema"]

_TYPES: dict[str, DataType] = {
    "topic": StringType(),
    "offset": LongType(),
    "partition": IntegerType(),
    "key": BinaryType(),
    "payload": BinaryType(),
    "attributes": MapType(StringType(), StringType()),
    "publish_time": TimestampType(),
    "event_time": TimestampType(),
    "producer_name": StringType(),
    "sequence": LongType(),
}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def row_schema(columns: Iterable[str] = COLUMNS) -> StructType:
    """The schema of rows with these columns."""
    return StructType([StructField(name, _TYPES[name]) for name in columns])


class DanubeSource(DataSource):
    """Topics as a source of Spark."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        """What `format` gets."""
        return "danube"

    def schema(self) -> StructType:
        """The columns that the option `columns` names. Raises InvalidArgument."""
        return row_schema(ReadOptions.parse(self._given).columns)

    def reader(self, schema: StructType) -> DanubeReader:
        """Make a reader of these columns. Raises InvalidArgument for columns that there are not."""
        _check_schema(schema)
        options = ReadOptions.parse(self._given)
        return (FilteringReader if options.takes_filters else DanubeReader)(options, schema)

    def streamReader(self, schema: StructType) -> DanubeStreamReader:  # noqa: N802 - PySpark's name
        """Make a reader of a stream of these columns. Raises InvalidArgument for columns that there are not."""
        _check_schema(schema)
        options = ReadOptions.parse(self._given)
        if options.end != "latest":
            raise InvalidArgument(
                "a stream has no end; read what there is with trigger(availableNow=True)"
            )
        return DanubeStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer of rows with these columns. Raises InvalidArgument, and what the broker raises."""
        # imported here: who reads needs no producer
        from danube_fast.spark.write.writer import BatchWriter

        return BatchWriter.make(self._given, schema, overwrites=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - PySpark's name
        """Make a writer of a stream of rows with these columns. Raises InvalidArgument, and what the broker raises."""
        from danube_fast.spark.write.writer import StreamWriter

        return StreamWriter.make(self._given, schema, overwrites=overwrite)


class DanubeReader(DataSourceReader):
    """One read of some topics."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options._replace(columns=tuple(schema.fieldNames()))
        self._schema = schema
        self._bounds = Bounds()

    def partitions(self) -> list[InputPartition]:
        """Plan the read."""
        plan = make_plan(self._options, self._bounds)
        if not plan.tasks:
            return [TaskPartition(Task(plan.snapshot.store, (), self._bounds))]
        return [TaskPartition(task) for task in plan.tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one task, on an executor."""
        schema = to_arrow_schema(self._schema, timezone="UTC")
        names = self._schema.fieldNames()
        return read_task(partition.value, names, schema, fails_on_loss=self._options.fails_on_loss)


class FilteringReader(DanubeReader):
    """One that filters narrow. A class of its own: Spark refuses it where its setting for that is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - PySpark's name
        """Take what filters say of offsets, partitions, times and keys; all of them stay with Spark, too.

        Spark 4.3 keeps what comes of this with the data frame, and gives it to later queries of the same frame, and to
        other branches of this one, whose filters are others or none.
        """
        for each in filters:
            self._bounds = narrowed(self._bounds, each)
        return filters


def _check_schema(schema: StructType) -> None:
    for field in schema.fields:
        known = _TYPES.get(field.name)
        if known is None:
            raise InvalidArgument(
                f"there is no column {field.name}; there are {', '.join(COLUMNS)}"
            )
        if field.dataType != known:
            raise InvalidArgument(
                f"the column {field.name} is {known.simpleString()}, not {field.dataType.simpleString()}; cast it "
                "behind the read"
            )


def narrowed(bounds: Bounds, given: Filter) -> Bounds:
    """What holds when this filter does, too."""
    attribute: Any = getattr(given, "attribute", ())
    value: Any = getattr(given, "value", None)
    if len(attribute) != 1 or value is None:
        return bounds
    if isinstance(given, EqualTo | EqualNullSafe):
        values = [value]
    elif isinstance(given, In):
        values = [each for each in value if each is not None]
        if not values:
            return bounds
    else:
        values = []
    column = attribute[0]
    if column == "offset":
        low, high = _range(given, values)
        return bounds._replace(
            offset_low=max(bounds.offset_low, low), offset_high=min(bounds.offset_high, high + 1)
        )
    if column == "publish_time":
        return _narrowed_times(bounds, given, values)
    if column == "partition" and values:
        wanted = frozenset(values)
        return bounds._replace(
            partitions=wanted if bounds.partitions is None else bounds.partitions & wanted
        )
    if column == "key" and values:
        keys = frozenset(bytes(each) for each in values)
        return bounds._replace(keys=keys if bounds.keys is None else bounds.keys & keys)
    return bounds


def _range(given: Filter, values: list[Any]) -> tuple[int, int]:
    """Smallest and largest number that a filter lets pass, both included."""
    if values:
        return min(values), max(values)
    value: Any = getattr(given, "value", None)
    if isinstance(given, GreaterThan):
        return value + 1, OFFSET_MAX
    if isinstance(given, GreaterThanOrEqual):
        return value, OFFSET_MAX
    if isinstance(given, LessThan):
        return 0, value - 1
    if isinstance(given, LessThanOrEqual):
        return 0, value
    return 0, OFFSET_MAX


def _narrowed_times(bounds: Bounds, given: Filter, values: list[Any]) -> Bounds:
    """Rows have whole microseconds, and messages nanoseconds: one of the last microsecond passes, too."""
    low, high = bounds.publish_low_ns, bounds.publish_high_ns
    value = getattr(given, "value", None)
    if values:
        low = max(low, _ns(min(values)))
        high = min(high, _ns(max(values)) + MICROSECOND_NS - 1)
    elif isinstance(given, GreaterThan | GreaterThanOrEqual):
        low = max(low, _ns(value))
    elif isinstance(given, LessThan | LessThanOrEqual):
        high = min(high, _ns(value) + MICROSECOND_NS - 1)
    return bounds._replace(publish_low_ns=low, publish_high_ns=high)


def _ns(moment: Any) -> int:
    """Unix time of a moment, ns; one without a zone is UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    microseconds: int = (moment - _EPOCH) // dt.timedelta(microseconds=1)
    return microseconds * MICROSECOND_NS
