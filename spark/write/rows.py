"""Rows as messages: which columns a write takes, and which partition a row goes to.

| column | type | |
|---|---|---|
| `payload` | binary or string | null: a tombstone; Kafka's name `value` is taken as well |
| `key` | binary or string | null: none |
| `attributes` | map of string to string | null: none |
| `event_time` | timestamp | null: none |
| `partition` | int | null: as a producer chooses; only `payload` has to be there |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from danube_fast.client.produce.outgoing import Outgoing, by_key, outgoing_list
from danube_fast.clock import MICROSECOND_NS
from danube_fast.errors import InvalidArgument
from danube_fast.spark.options import hint
from danube_fast.spark.write.staging import Stager

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WRITE_COLUMNS", "check_columns", "stage_rows"]

_TEXT = (BinaryType(), StringType())
_TYPES: dict[str, tuple[DataType, ...]] = {
    "payload": _TEXT,
    "key": _TEXT,
    "attributes": (MapType(StringType(), StringType()),),
    "event_time": (TimestampType(),),
    "partition": (IntegerType(),),
}
WRITE_COLUMNS = (*_TYPES,)
_KAFKA_PAYLOAD = "value"
CHUNK_BYTES = 8 * 1024 * 1024
"""Rows are gathered before they are divided by partition, so that frames are large."""
_BINARY = pa.large_binary()


def check_columns(schema: StructType) -> None:
    """Raise InvalidArgument unless all columns are of a write, with a type that it takes, payload among them."""
    names = schema.fieldNames()
    known = [*WRITE_COLUMNS, *([] if "payload" in names else [_KAFKA_PAYLOAD])]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgument(
            f"a write takes the columns {', '.join(WRITE_COLUMNS)}, not {', '.join(unknown)}; choose and name them: "
            ".select(...), .withColumnRenamed(...); the topic is an option"
        )
    if _KAFKA_PAYLOAD in names:
        hint(_KAFKA_PAYLOAD, "payload")
    elif "payload" not in names:
        raise InvalidArgument(
            "a write needs the column payload: .selectExpr('to_json(struct(*)) payload')"
        )
    if len(names) != len(set(names)):
        raise InvalidArgument("a column is there twice; drop one of them")
    for field in schema.fields:
        allowed = _TYPES["payload" if field.name == _KAFKA_PAYLOAD else field.name]
        if not any(_is_same(field.dataType, each) for each in allowed):
            told = " or ".join(each.simpleString() for each in allowed)
            raise InvalidArgument(
                f"the column {field.name} is {field.dataType.simpleString()}, and a write takes {told}; cast it"
            )


def _is_same(given: DataType, wanted: DataType) -> bool:
    """Whether two types are the same but for nulls."""
    same: bool = given.simpleString() == wanted.simpleString()
    return same


def stage_rows(
    batches: Iterable[pa.RecordBatch], stager: Stager, partition_count: int, turn: int
) -> None:
    """Stage rows for their partitions: that of the column `partition`, else that of the key's hash, and those without
    a key frame by frame in turn, from partition `turn` on, as a producer does.

    Raises InvalidArgument for a row that is no message, and what the store raises.
    """
    for table in _chunks(batches):
        outgoing = _outgoing(table)
        wanted = _column(table, "partition")
        for index, part in _divided(outgoing, wanted, partition_count, turn % partition_count):
            if index is not None:
                stager.add(part, [index])
                continue
            order = [(turn + place) % partition_count for place in range(partition_count)]
            turn += stager.add(part, order)
        turn += 1


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    some: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            some.append(batch)
            size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield pa.Table.from_batches(some)
            some, size = [], 0
    if some:
        yield pa.Table.from_batches(some)


def _column(table: pa.Table, name: str) -> list[Any] | None:
    """The values of a column; None if it is not there, or all are null."""
    if name not in table.column_names:
        return None
    column = table.column(name)
    if column.null_count == len(column):
        return None
    if name == "event_time":
        column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    elif name not in ("attributes", "partition"):
        column = column.cast(_BINARY)
    values: list[Any] = column.to_pylist()
    return values


def _outgoing(table: pa.Table) -> Outgoing:
    """Rows as the messages of a producer. Raises InvalidArgument."""
    payload_name = "payload" if "payload" in table.column_names else _KAFKA_PAYLOAD
    payloads = _column(table, payload_name)
    times = _column(table, "event_time")
    pairs = _column(table, "attributes")
    return outgoing_list(
        [None] * table.num_rows if payloads is None else payloads,
        _column(table, "key"),
        None if pairs is None else [each and dict(each) for each in pairs],
        times and [None if time is None else time * MICROSECOND_NS for time in times],
        None,
        None,
    )


def _divided(
    outgoing: Outgoing, wanted: list[int | None] | None, count: int, keyless: int
) -> Iterator[tuple[int | None, Outgoing]]:
    """Divide messages by partition, by index; None: in turn."""
    if wanted is not None:
        rows = _rows_by_partition(wanted, count)
        for index, numbers in rows.items():
            if index is not None:
                yield index, _taken(outgoing, numbers)
        if None not in rows:
            return
        outgoing = _taken(outgoing, rows[None])
    if count == 1:
        yield 0, outgoing
    elif outgoing.keys is None:
        yield None, outgoing
    else:
        yield from by_key(outgoing, count, keyless)


def _rows_by_partition(wanted: Sequence[int | None], count: int) -> dict[int | None, list[int]]:
    rows: dict[int | None, list[int]] = {}
    for number, index in enumerate(wanted):
        if index is not None and not 0 <= index < count:
            raise InvalidArgument(
                f"the column partition has {index}, and the topic has partitions 0 to {count - 1}; correct it, or "
                "leave the column out"
            )
        rows.setdefault(index, []).append(number)
    return rows


def _taken(outgoing: Outgoing, numbers: Sequence[int]) -> Outgoing:
    """Some of the messages, on their own."""

    def take(column: list[Any] | None) -> list[Any] | None:
        return None if column is None else [column[number] for number in numbers]

    part = Outgoing([outgoing.payloads[number] for number in numbers])
    part.keys, part.attributes = take(outgoing.keys), take(outgoing.attributes)
    part.event_times = take(outgoing.event_times)
    part.plain = outgoing.plain
    return part
