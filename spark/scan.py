"""What an executor does for one task: read blocks of objects from the store, and make Arrow batches of their frames.

    table of blocks --which blocks--> ranged reads, the next one while this is decoded --> frames --> columns

Only the columns of the schema are made. A block whose crc is wrong is DataLoss that names object and offsets. Where
only offsets are wanted, blocks are not read that have a message at each of theirs, as their table tells.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from danube_fast.errors import DataLoss, FailedPrecondition, NotFound
from danube_fast.frame.table import FrameTable, tables
from danube_fast.history.layout import Blocks
from danube_fast.history.objects import read_block_frames, read_blocks
from danube_fast.history.stores.store import ObjectStore
from danube_fast.history.stores.url import parse_store_url
from danube_fast.spark.plan import Bounds, Split, Task, open_reading

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["read_task"]

READ_BYTES = 8 * 1024 * 1024
"""Of one request."""
READS_AHEAD = 2
"""Requests under way while the one before is decoded."""
ROWS_MAX = 64 * 1024
"""Of a batch without frames."""

Column = Callable[[Split, Any], Any]


class _Piece:
    """Blocks of a split that stand back to back."""

    __slots__ = ("is_known", "rows", "split")

    def __init__(self, split: Split, rows: Blocks, *, is_known: bool = False) -> None:
        """`is_known`: their table tells all that is wanted."""
        self.split, self.rows, self.is_known = split, rows, is_known


def read_task(
    task: Task, columns: Sequence[str], schema: pa.Schema, *, fails_on_loss: bool = True
) -> Iterator[pa.RecordBatch]:
    """Read the messages of a task, a batch of the wanted columns after the other.

    `schema`: of the batches, with a field for each of `columns`. Raises DataLoss for what is lost or damaged, unless
    `fails_on_loss` is false: it is passed over then; and what the store raises.
    """
    import pyarrow as pa

    makers = [_COLUMNS[name] for name in columns]
    store = _opened(task.store)
    without_frames = task.bounds.keys is None and _BY_OFFSET.issuperset(columns)
    pieces = _pieces(store, task, fails_on_loss, without_frames=without_frames)
    with concurrent.futures.ThreadPoolExecutor(READS_AHEAD) as pool:
        for piece, data in _read_ahead(store, pieces, pool):
            for table in _tables(store, piece, data, fails_on_loss):
                arrays = [make(piece.split, table) for make in makers]
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
                yield _with_keys(batch, table, task.bounds)


def _opened(url: str) -> ObjectStore:
    """Open the store of a task. Raises FailedPrecondition if that is a folder of another host."""
    parsed = parse_store_url(url)
    if parsed.scheme == "file" and not Path(parsed.prefix).is_dir():
        raise FailedPrecondition(
            f"the history is in {parsed.prefix}, and the executor on {socket.gethostname()} has no such folder: mount it there "
            "at the same place, name the mount with .option('store', 'file://...'), keep the history in a store that "
            "all executors reach (s3://, gs://, az://), or run Spark on the broker's host (--master 'local[*]')"
        )
    return open_reading(url)


class _Offsets:
    """A table of messages of which only the offsets are known."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.row_count = low, high - low

    def offsets(self) -> Any:
        """int64: offset of each message."""
        import pyarrow as pa

        return pa.array(np.arange(self.low, self.low + self.row_count, dtype=np.int64))


def _offset_tables(piece: _Piece) -> Iterator[_Offsets]:
    """Tables of the messages of blocks that have one at each offset."""
    low = max(piece.split.low, int(piece.rows["base_offset"][0]))
    high = min(piece.split.high, int(piece.rows["end_offset"][-1]))
    for at in range(low, high, ROWS_MAX):
        yield _Offsets(at, min(high, at + ROWS_MAX))


def _sound(
    store: ObjectStore,
    piece: _Piece,
    data: concurrent.futures.Future[bytes],
    fails_on_loss: bool,
) -> Iterator[bytes]:
    """The frames of a piece; without `fails_on_loss` those of its sound blocks, if one is not."""
    try:
        memory = data.result()
    except (DataLoss, NotFound) as error:
        if fails_on_loss:
            raise _lost_piece(store, piece, error) from None
    else:
        yield memory
        return
    for index in range(len(piece.rows)):
        with contextlib.suppress(DataLoss, NotFound):
            yield _read(store, _Piece(piece.split, piece.rows[index : index + 1]))


def _tables(
    store: ObjectStore,
    piece: _Piece,
    data: concurrent.futures.Future[bytes] | None,
    fails_on_loss: bool,
) -> Iterator[FrameTable | _Offsets]:
    """Make the tables of a piece; without `fails_on_loss` those before a frame that cannot be read."""
    if data is None:
        yield from _offset_tables(piece)
        return
    for memory in _sound(store, piece, data, fails_on_loss):
        try:
            yield from tables(memory, piece.split.low, piece.split.high)
        except DataLoss as error:
            if fails_on_loss:
                raise _lost_piece(store, piece, error) from None


def _with_keys(batch: Any, table: Any, bounds: Bounds) -> Any:
    """Keep the rows with wanted keys, if some are wanted."""
    if bounds.keys is None:
        return batch
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.array(sorted(bounds.keys), type=pa.binary())
    return batch.filter(pc.is_in(table.keys(), value_set=wanted))


def _pieces(
    store: ObjectStore, task: Task, fails_on_loss: bool, *, without_frames: bool
) -> Iterator[_Piece]:
    """List what is read, request by request; `without_frames`: offsets are all that is wanted."""
    for split in task.splits:
        try:
            rows = _wanted(read_blocks(store, split.section), split, task.bounds)
        except (DataLoss, NotFound) as error:
            if not fails_on_loss:
                continue
            section = split.section
            raise _lost(store, split, section.base_offset, section.end_offset, error) from None
        is_dense = rows["message_count"] == rows["end_offset"] - rows["base_offset"]
        if without_frames:
            for some in _runs(rows, is_dense):
                yield _Piece(split, some, is_known=True)
            rows = rows[~is_dense]
        for first, last in _requests(rows):
            yield _Piece(split, rows[first:last])


def _wanted(rows: Blocks, split: Split, bounds: Bounds) -> Blocks:
    """Choose the blocks of a split that may have wanted messages."""
    count = len(rows)
    rows = rows[count * split.part // split.parts : count * (split.part + 1) // split.parts]
    is_wanted = (
        (rows["end_offset"] > split.low)
        & (rows["base_offset"] < split.high)
        & (rows["publish_max_ns"] >= bounds.publish_low_ns)
        & (rows["publish_min_ns"] <= bounds.publish_high_ns)
    )
    return rows[is_wanted]


def _runs(rows: Blocks, is_dense: Any) -> Iterator[Blocks]:
    """Divide the dense ones of some blocks into runs without a gap between their offsets."""
    some = rows[is_dense]
    breaks = np.flatnonzero(some["base_offset"][1:] != some["end_offset"][:-1]) + 1
    for run in np.split(some, breaks):
        if len(run):
            yield run


def _requests(rows: Blocks) -> Iterator[tuple[int, int]]:
    """Divide blocks into runs of READ_BYTES or so that stand back to back."""
    first = 0
    while first < len(rows):
        last, size = first + 1, int(rows["byte_count"][first])
        while last < len(rows) and size < READ_BYTES:
            end = int(rows["position"][last - 1]) + int(rows["byte_count"][last - 1])
            if int(rows["position"][last]) != end:
                break
            size += int(rows["byte_count"][last])
            last += 1
        yield first, last
        first = last


def _read_ahead(
    store: ObjectStore, pieces: Iterator[_Piece], pool: concurrent.futures.ThreadPoolExecutor
) -> Iterator[tuple[_Piece, concurrent.futures.Future[bytes] | None]]:
    """Read pieces in their order, READS_AHEAD of them before they are asked for; None for what is known."""
    waiting: list[tuple[_Piece, concurrent.futures.Future[bytes] | None]] = []
    for piece in pieces:
        waiting.append((piece, None if piece.is_known else pool.submit(_read, store, piece)))
        if len(waiting) > READS_AHEAD:
            yield waiting.pop(0)
    while waiting:
        yield waiting.pop(0)


def _read(store: ObjectStore, piece: _Piece) -> bytes:
    return read_block_frames(store, piece.split.section.key, piece.rows)


def _lost(
    store: ObjectStore, split: Split, base_offset: int, end_offset: int, error: Exception
) -> DataLoss:
    why = "are lost"
    if isinstance(error, NotFound):  # retention may have removed the object
        why = "are lost, or the hold on them has ended (holdSeconds; load the frame again)"
    return DataLoss(
        f"offsets {base_offset} to {end_offset} of {split.topic}, partition {split.partition}, {why}: {error}; "
        f".option('failOnDataLoss', 'false') goes on behind them, and `danube-fast history verify --store {store.url}` "
        "tells what else is damaged"
    )


def _lost_piece(store: ObjectStore, piece: _Piece, error: Exception) -> DataLoss:
    rows = piece.rows
    base_offset, end_offset = int(rows["base_offset"][0]), int(rows["end_offset"][-1])
    return _lost(store, piece.split, base_offset, end_offset, error)


def _constant(value: Any, kind: str, count: int) -> Any:
    import pyarrow as pa

    return pa.repeat(pa.scalar(value, type=getattr(pa, kind)()), count)


_BY_OFFSET = frozenset(("topic", "partition", "offset"))
"""Columns that need no frame."""
_COLUMNS: dict[str, Column] = {
    "topic": lambda split, table: _constant(split.topic, "string", table.row_count),
    "offset": lambda split, table: table.offsets(),
    "partition": lambda split, table: _constant(split.partition, "int32", table.row_count),
    "key": lambda split, table: table.keys(),
    "payload": lambda split, table: table.payloads(),
    "attributes": lambda split, table: table.attributes(),
    "publish_time": lambda split, table: table.publish_times(),
    "event_time": lambda split, table: table.event_times(),
    "producer_name": lambda split, table: table.producer_names(split.producers),
    "sequence": lambda split, table: table.sequences(),
}
