"""Rows on their way from a source to a topic, and the order in which they go.

    stream     rows of one partition of the source in the order of their positions, block by block
    merged     pieces of the blocks of all streams by time; of the same time, the stream that comes first

The time of a row never lies before that of a row before it in its stream: so each stream keeps its order. The order is
one of the rows alone, whatever blocks they come in, so a replay that is begun again finds it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from danube_fast.clock import MICROSECOND_NS
from danube_fast.errors import Internal
from danube_fast.frame.hash import key_hash

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NO_TIME", "Block", "Piece", "Stream", "merged", "targets_by_key"]

NO_TIME = -(1 << 63)
"""Of rows before the first one that has a time."""


class Block(NamedTuple):
    """Some rows of a stream; columns that none of them has are None."""

    positions: Any
    """int64, rising."""
    times: Any
    """int64, microseconds, never falling."""
    payloads: list[bytes | None]
    keys: list[bytes | None] | None
    attributes: list[dict[str, str] | None] | None
    event_times: list[int | None] | None
    """Nanoseconds."""

    @classmethod
    def of(cls, batch: pa.RecordBatch, positions: Any, by: str, before: int) -> Block:
        """Make one of a batch with the columns of docs/spark.md, as far as it has them. `by`: the column with the times;
        `before`: the time of the row before."""
        import pyarrow as pa

        def column(name: str) -> Any:
            found = batch.column(name) if name in batch.schema.names else None
            return None if found is None or found.null_count == len(found) else found

        times = np.full(batch.num_rows, NO_TIME, dtype=np.int64)
        given = column(by)
        if given is not None:
            times = _microseconds(given).fill_null(NO_TIME).to_numpy(zero_copy_only=False)
        keys, pairs, events = column("key"), column("attributes"), column("event_time")
        if events is not None:
            events = [
                None if time is None else time * MICROSECOND_NS
                for time in _microseconds(events).to_pylist()
            ]
        payload = batch.column("payload")
        if not pa.types.is_binary(payload.type):
            payload = payload.cast(pa.binary())
        return cls(
            positions, np.maximum.accumulate(np.concatenate([[before], times]))[1:],
            payload.to_pylist(), None if keys is None else keys.cast(pa.binary()).to_pylist(),
            None if pairs is None else _mappings(pairs), events,
        )  # fmt: skip


def _microseconds(column: Any) -> Any:
    import pyarrow as pa

    return column.cast(pa.timestamp("us", tz=column.type.tz), safe=False).cast(pa.int64())


def _mappings(column: Any) -> list[dict[str, str] | None] | None:
    """The attributes of rows; None if none of them has any."""
    if not len(column.items):
        return None
    return [dict(pairs) if pairs else None for pairs in column.to_pylist()]


class Stream:
    """The rows of one partition of a source, and how far they are gone through."""

    def __init__(self, partition: int, blocks: Iterator[Block], low: int, time_us: int) -> None:
        """`low`: position of the first row, at least; `time_us`: of the row before, NO_TIME if there is none."""
        self.partition = partition
        self.next_position, self.time_us = low, time_us
        self._blocks = blocks
        self._block: Block | None = None
        self._at = 0

    def head(self) -> int | None:
        """The time of the next row; None: there is none."""
        while self._block is None or self._at == len(self._block.payloads):
            self._block, self._at = next(self._blocks, None), 0
            if self._block is None:
                return None
        return int(self._block.times[self._at])

    def take(self, until: int | None, *, is_included: bool) -> Piece:
        """The rows of the block at hand that come before the time `until`, or at it if that `is_included`; None: all."""
        block, start = self._block, self._at
        if block is None:
            raise Internal("rows are taken from a stream whose head nothing has asked for")
        stop = len(block.payloads)
        if until is not None:
            side: Any = "right" if is_included else "left"
            stop = start + int(np.searchsorted(block.times[start:], until, side=side))
        self._at = stop
        return Piece(self, block, start, stop)


class Piece(NamedTuple):
    """Rows of one stream that follow each other."""

    stream: Stream
    block: Block
    start: int
    stop: int

    def note_gone(self, stop: int) -> None:
        """Note that the rows before index `stop` are gone through."""
        self.stream.next_position = int(self.block.positions[stop - 1]) + 1
        self.stream.time_us = int(self.block.times[stop - 1])


def merged(streams: Sequence[Stream]) -> Iterator[Piece]:
    """List the rows of all streams by time."""
    heads = {
        index: time for index, stream in enumerate(streams) if (time := stream.head()) is not None
    }
    while heads:
        first = min(heads, key=lambda index: (heads[index], index))
        others = [(time, index) for index, time in heads.items() if index != first]
        if others:
            time, index = min(others)
            yield streams[first].take(time, is_included=first < index)
        else:
            yield streams[first].take(None, is_included=True)
        head = streams[first].head()
        if head is None:
            del heads[first]
        else:
            heads[first] = head


def targets_by_key(piece: Piece, count: int) -> Any:
    """Choose the partition, of `count`, of each row of a piece: by its key as producers do, by its place without one."""
    partition = piece.stream.partition
    targets = (piece.block.positions[piece.start : piece.stop] + partition) % count
    if piece.block.keys is not None:
        known: dict[bytes, int] = {}
        for index, key in enumerate(piece.block.keys[piece.start : piece.stop]):
            if key is not None:
                if key not in known:
                    known[key] = key_hash(key) % count
                targets[index] = known[key]
    return targets
