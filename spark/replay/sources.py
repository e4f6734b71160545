"""Where the rows of a replay come from: history of a topic, or a folder of Parquet files.

    /default/flights       flushed and held; offsets are fixed when the replay begins, and stay so when it goes on
    parquet:DIR            rows by partition and offset if the files have these columns, else in the order of the files

A table may hold a message twice, as an export does that was cut short: the second one is passed over.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from danube_fast.client.client import Client
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from danube_fast.frame.arrow import import_pyarrow
from danube_fast.history.holds import renew_hold
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import (
    Bounds,
    PartitionRange,
    Snapshot,
    divide,
    limited_range,
    open_reading,
    release_holds,
    snapshot_of_broker,
    snapshot_of_store,
)
from danube_fast.spark.replay.rows import Block
from danube_fast.spark.scan import read_task

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TABLE_MARK", "Extent", "Source", "TableSource", "TopicSource"]

TABLE_MARK = "parquet:"
COLUMNS = ("offset", "payload", "key", "attributes", "publish_time", "event_time")
ROWS_MAX = 64 * 1024


class Extent(NamedTuple):
    """Rows of one partition of a source."""

    partition: int
    """By its index."""
    name: str
    """What has them: it is another one if they are others."""
    low: int
    high: int
    """Positions are below."""


class Source(Protocol):
    """What a replay reads."""

    extents: list[Extent]
    """One for each partition."""

    def blocks(self, extent: Extent, by: str, low: int, time_us: int) -> Iterator[Block]:
        """Read the rows of an extent from the position `low` on, whose row before has the time `time_us`."""
        ...

    def keep(self) -> None:
        """Keep what is read from being deleted, for a while longer."""
        ...


class TopicSource:
    """History of a topic."""

    def __init__(self, options: ReadOptions, snapshot: Snapshot, client: Client | None) -> None:
        """`client`: of the broker that holds the objects; None: the store was asked."""
        self._options, self._snapshot, self._client = options, snapshot, client
        self._store = open_reading(snapshot.store)
        self._holds, self._topics = list(snapshot.holds), dict(snapshot.topics)
        self._clock = SystemClock()
        self._held_ns = self._clock.monotonic_ns()
        self._by_name: dict[str, PartitionRange] = {}
        self.extents: list[Extent] = []
        for each in snapshot.ranges:
            of = limited_range(self._store, each, options)
            name = f"{snapshot.store} {snapshot.ranges[0].topic} {each.partition_id} {each.manifest.incarnation}"
            self._by_name[name] = each
            self.extents.append(Extent(each.partition, name, of.low, max(of.low, of.high)))

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, options: ReadOptions, connect: Callable[[str | None], Client]
    ) -> Iterator[TopicSource]:
        """Flush and hold a topic until the end of the block. Raises as `make_plan`."""
        with contextlib.ExitStack() as at_end:
            client: Client | None = None
            if options.url is None and options.store is not None:
                source = cls(options, snapshot_of_store(options), None)
            else:
                client = at_end.enter_context(connect(options.url))
                snapshot = snapshot_of_broker(client, options, options.hold_seconds)
                source = cls(options, snapshot, client)
            at_end.callback(source._release)
            yield source

    def blocks(self, extent: Extent, by: str, low: int, time_us: int) -> Iterator[Block]:
        """Read messages. Raises DataLoss for those that are lost, damaged or gone."""
        of = self._by_name[extent.name]
        if low < min(of.low, extent.high):
            raise DataLoss(
                f"offsets {low} to {min(of.low, extent.high)} of {of.topic}, partition {of.partition}, are gone: "
                "retention or a purge was faster; choose another --id to replay what is left"
            )
        arrow = import_pyarrow()
        schema = arrow.schema([(name, _types()[name]) for name in COLUMNS])
        wanted = of._replace(low=low, high=extent.high)
        for task in divide(self._snapshot, [wanted], self._options, Bounds()).tasks:
            for batch in read_task(task, COLUMNS, schema):
                block = Block.of(batch, batch.column("offset").to_numpy(), by, time_us)
                time_us = int(block.times[-1]) if len(block.times) else time_us
                yield block

    def keep(self) -> None:
        """Renew the holds on the objects when half of their time is over."""
        seconds = self._options.hold_seconds
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._held_ns < seconds * SECOND_NS // 2:
            return
        self._held_ns = now_ns
        renewed: list[str] = []
        for hold in self._holds:
            if self._client is not None:
                admin = self._client.admin
                topic = self._topics.pop(hold, None)
                answer = admin.renew_history_hold(hold, hold_seconds=seconds, topic=topic)
                renewed.append(answer["hold"])
                if topic is not None:
                    self._topics[renewed[-1]] = topic
            else:
                renewed.append(renew_hold(self._store, hold, seconds, self._clock).key)
        self._holds = renewed

    def _release(self) -> None:
        release_holds(self._holds, self._snapshot.store, self._client, self._topics)


@functools.cache
def _types() -> dict[str, pa.DataType]:
    arrow = import_pyarrow()
    time = arrow.timestamp("us", tz="UTC")
    return {
        "offset": arrow.int64(), "payload": arrow.binary(), "key": arrow.binary(),
        "attributes": arrow.map_(arrow.string(), arrow.string()), "publish_time": time,
        "event_time": time,
    }  # fmt: skip


class _Group(NamedTuple):
    """A row group of a file."""

    path: Path
    number: int
    partitions: tuple[int, int]
    """The smallest and the largest."""
    offsets: tuple[int, int]
    row_count: int


class TableSource:
    """Parquet files below a folder, or one file."""

    def __init__(self, path: Path) -> None:
        """Raises NotFound if there is none, InvalidArgument if they are not rows of one topic."""
        import_pyarrow()
        files = [path] if path.is_file() else sorted(_files(path))
        if not files:
            raise NotFound(f"{path} has no Parquet files; give the folder of a table")
        self._groups: list[_Group] = []
        columns: set[str] | None = None
        topics: set[str] = set()
        digest = hashlib.sha256()
        for file in files:
            footer, groups = _read_footer(file, file.relative_to(path).parts[:-1])
            digest.update(f"{file.relative_to(path)} {footer.num_rows} ".encode())
            schema = footer.schema.to_arrow_schema()
            _check_types(file, schema)
            names = set(schema.names)
            columns = names if columns is None else columns & names
            self._groups += groups
            topics.update(_topics(footer))
        self._columns = [name for name in (*COLUMNS, "partition") if name in (columns or ())]
        if "payload" not in self._columns:
            raise InvalidArgument(
                f"{path} has no column payload in all of its files; name the columns as docs/spark.md does"
            )
        if len(topics) > 1:
            raise InvalidArgument(
                f"{path} has messages of {len(topics)} topics; replay a table of one"
            )
        self._is_ordered = "offset" in self._columns and all(
            min(group.partitions[0], group.offsets[0]) >= 0 for group in self._groups
        )
        self._name = digest.hexdigest()[:16]
        self.extents = list(self._list_extents())

    def _list_extents(self) -> Iterator[Extent]:
        if not self._is_ordered:
            yield Extent(0, self._name, 0, sum(group.row_count for group in self._groups))
            return
        last = max((group.partitions[1] for group in self._groups), default=0)
        for partition in range(last + 1):
            of = [group.offsets for group in self._groups_of(partition)]
            low = min((first for first, _ in of), default=0)
            high = max((last + 1 for _, last in of), default=0)
            yield Extent(partition, f"{self._name} {partition}", low, high)

    def _groups_of(self, partition: int) -> list[_Group]:
        some = [g for g in self._groups if g.partitions[0] <= partition <= g.partitions[1]]
        return sorted(some, key=lambda group: (group.offsets, str(group.path), group.number))

    def blocks(self, extent: Extent, by: str, low: int, time_us: int) -> Iterator[Block]:
        """Read rows. Raises InvalidArgument if they have no times to go by."""
        batches = self._ordered(extent.partition, low) if self._is_ordered else self._rows(low)
        for positions, batch in batches:
            block = Block.of(batch, positions, by, time_us)
            time_us = int(block.times[-1]) if len(block.times) else time_us
            yield block

    def has(self, column: str) -> bool:
        """Whether all files have a column."""
        return column in self._columns

    def keep(self) -> None:
        """Files stay."""

    def _rows(self, low: int) -> Iterator[tuple[Any, pa.RecordBatch]]:
        """Rows in the order of the files; their numbers are their positions."""
        at = 0
        for group in self._groups:
            if at + group.row_count > low:
                skipped = max(0, low - at)
                table = _read_group(group, self._columns).slice(skipped)
                yield from _batches(table, np.arange(at + skipped, at + group.row_count))
            at += group.row_count

    def _ordered(self, partition: int, low: int) -> Iterator[tuple[Any, pa.RecordBatch]]:
        """Rows of a partition by offset: row groups whose offsets overlap are sorted together."""
        arrow = import_pyarrow()
        waiting = [g for g in self._groups_of(partition) if g.offsets[1] >= low]
        while waiting:
            some, end = [waiting.pop(0)], 0
            end = some[0].offsets[1]
            while waiting and waiting[0].offsets[0] <= end:
                some.append(waiting.pop(0))
                end = max(end, some[-1].offsets[1])
            table = arrow.concat_tables([_read_group(each, self._columns) for each in some])
            offsets = table["offset"].to_numpy()
            is_mine = offsets >= low
            if "partition" in table.schema.names:
                is_mine &= table["partition"].to_numpy() == partition
            places = np.flatnonzero(is_mine)
            found, first = np.unique(offsets[places], return_index=True)
            yield from _batches(table.take(arrow.array(places[first])), found)
            low = end + 1


def _batches(table: Any, positions: Any) -> Iterator[tuple[Any, pa.RecordBatch]]:
    at = 0
    for batch in table.combine_chunks().to_batches(max_chunksize=ROWS_MAX):
        yield positions[at : at + batch.num_rows], batch
        at += batch.num_rows


def _files(folder: Path) -> Iterator[Path]:
    """Files of a table below a folder; names that begin with _ or . are those of its tools."""
    for file in folder.rglob("*.parquet"):
        if not any(part[0] in "_." for part in file.relative_to(folder).parts):
            yield file


def _opened(path: Path) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (OSError, import_pyarrow().ArrowException) as error:
        raise FailedPrecondition(
            f"{path} cannot be read: {error}; mend it, or move it away"
        ) from None


def _read_footer(path: Path, folders: Sequence[str]) -> tuple[Any, list[_Group]]:
    """The metadata of a file, and its row groups. Partitions are -1 where there is no such column. `folders`: below
    that of the table. Raises InvalidArgument where these have columns of messages that the file has not."""
    with _opened(path) as file:
        footer = file.metadata
    groups = []
    in_path = [part for part in folders if part.startswith("partition=")]
    names = set(footer.schema.to_arrow_schema().names)
    for column in {part.partition("=")[0] for part in folders} & {*COLUMNS} - names:
        raise InvalidArgument(
            f"{path} has {column} in the names of its folders alone; export without --partition-by {column} to replay it"
        )
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        offsets = _range(group, "offset")
        if in_path:
            text = in_path[-1].partition("=")[2]
            if not text.isdecimal():
                raise InvalidArgument(f"{path}: {in_path[-1]} names no partition")
            number = int(text)
            partitions = number, number
        else:
            partitions = _range(group, "partition")
        if group.num_rows:
            groups.append(_Group(path, index, partitions, offsets, group.num_rows))
    return footer, groups


def _check_types(path: Path, schema: pa.Schema) -> None:
    kinds = import_pyarrow().types
    text_or_bytes = (kinds.is_binary, kinds.is_large_binary, kinds.is_string, kinds.is_large_string)
    expected = {
        "payload": text_or_bytes, "key": text_or_bytes, "attributes": (kinds.is_map,),
        "publish_time": (kinds.is_timestamp,), "event_time": (kinds.is_timestamp,),
        "offset": (kinds.is_integer,), "partition": (kinds.is_integer,),
    }  # fmt: skip
    for name, checks in expected.items():
        if name in schema.names and not any(check(schema.field(name).type) for check in checks):
            raise InvalidArgument(
                f"{path}: the column {name} is {schema.field(name).type}; give it the type that docs/spark.md names"
            )


def _range(group: Any, name: str) -> tuple[int, int]:
    """The smallest and the largest value of a column; -1 and -1 if that is not known."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == name and column.statistics is not None:
            statistics = column.statistics
            if statistics.has_min_max and not statistics.null_count:
                return int(statistics.min), int(statistics.max)
    return -1, -1


def _topics(footer: Any) -> set[str]:
    """Names of topics that a file is known to have."""
    found: set[str] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            statistics = column.statistics if column.path_in_schema == "topic" else None
            if statistics is not None and statistics.has_min_max:
                found |= {statistics.min, statistics.max}
    return found


def _read_group(group: _Group, columns: Sequence[str]) -> Any:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(group.path) as file:
            names = [name for name in columns if name in file.schema_arrow.names]
            return file.read_row_group(group.number, columns=names)
    except (OSError, import_pyarrow().ArrowException) as error:
        raise DataLoss(f"{group.path} cannot be read: {error}; restore it from a copy") from None
