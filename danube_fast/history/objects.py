"""Objects of history: made part by part as frames come, and read by ranges.

ObjectWriter     frames of one partition after the other -> parts, sections, table of blocks
WriterState      how far a writer is: another one goes on from it, once it has the frames that were not sent
read_blocks      the blocks of a section, by one ranged read; `read_block_frames`: their frames, checked
read_table       the blocks of a whole object
verify_object    every byte of an object
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from danube_fast.errors import DataLoss, Internal, NotFound
from danube_fast.frame.crc import crc32c
from danube_fast.frame.table import producer_ids
from danube_fast.history.blocks import BlockTable
from danube_fast.history.layout import (
    BLOCK_DTYPE,
    OBJECT_HEADER_BYTES,
    TRAILER_BYTES,
    Blocks,
    ObjectHeader,
    Trailer,
    decode_blocks,
    object_key,
)
from danube_fast.history.manifest import Section
from danube_fast.history.stores.store import ObjectStore

__all__ = [
    "Frames",
    "ObjectWriter",
    "OutgoingPart",
    "WriterState",
    "read_block_frames",
    "read_blocks",
    "read_table",
    "section_of",
    "table_position",
    "verify_object",
]


class OutgoingPart(NamedTuple):
    """Bytes of an object that are complete."""

    number: int
    """From 1 on."""
    offset: int
    """Where they stand in the object."""
    data: memoryview


class Frames(NamedTuple):
    """Whole frames of a partition, back to back."""

    partition_id: int
    base_offset: int
    byte_count: int


class WriterState(msgspec.Struct, frozen=True, array_like=True):
    """How far a writer was when its last part was complete, while frames of a partition were being added.

        | part 1 | part 2 | buffer |
        | block | block | block |         `frames_again`: from the block on that the buffer begins in

    The rows tell whether the frames that are added again have the same content, and a digest whether those that part 1
    has already are the very same bytes: a crc over frames does not depend on their headers, which end with their own.
    """

    part_count: int
    sent: int
    """Bytes of these parts."""
    rows: bytes
    """The table of blocks."""
    ended: list[tuple[int, int]]
    first_row: int
    """Of the partition whose frames were being added."""
    sent_digest: int = -1
    """xxh3 of the bytes that are read again and were sent; -1: not known, by a version before."""

    def table(self) -> Blocks:
        """Read the table of blocks. Raises ValueError if it cannot be one."""
        return np.frombuffer(self.rows, BLOCK_DTYPE)

    def again_row(self) -> int:
        """The first block that is read again: the one that the last part ends in, or the last one, which may take
        more frames."""
        return _row_at(self.table(), self.sent)

    def frames_again(self) -> list[Frames]:
        """Name the frames that another writer needs to go on, in their order."""
        found: list[Frames] = []
        for row in self.table()[self.again_row() :]:
            partition_id, byte_count = int(row["partition_id"]), int(row["byte_count"])
            if found and found[-1].partition_id == partition_id:
                byte_count += found.pop().byte_count
            else:
                base_offset = int(row["base_offset"])
            found.append(Frames(partition_id, base_offset, byte_count))
        return found


class ObjectWriter:
    """The bytes of one object, in memory only until a part is complete.

        writer = ObjectWriter(header, part_bytes)
        writer.begin(partition_id, next_offset)
        space = writer.space(byte_count)            read whole frames into it
        for part in writer.add(byte_count, where):  checked; send what is complete
            ...
        writer.end()
        parts, sections = writer.finish()           table and trailer; what the manifests get

    All parts but the last have `part_bytes` bytes.
    """

    def __init__(self, header: ObjectHeader, part_bytes: int) -> None:
        self.key = object_key(header.epoch, header.number)
        self._part_bytes = part_bytes
        self._buffer = bytearray(part_bytes)
        self._fill = 0
        self._sent = self._number = 0
        self._table = BlockTable(OBJECT_HEADER_BYTES)
        self._first_row: int | None = None
        """Of the partition whose frames are being added."""
        self._ended: list[tuple[int, int]] = []
        """Partitions whose frames are all there: the first row of each, and the one behind its last."""
        self._cut, self._cut_position = b"", 0
        """What was sent of the block that the last part ends in."""
        self.producers: set[int] = set()
        """Ids of those who published the frames that were added of this partition, by this writer."""
        self._put(header.encode())

    @classmethod
    def resume(
        cls, header: ObjectHeader, part_bytes: int, state: WriterState, frames: Any
    ) -> ObjectWriter:
        """Go on where another writer of the object was. `frames`: the bytes of `state.frames_again()`.

        Raises DataLoss if they are not the bytes that it had.
        """
        writer, rows, first = cls(header, part_bytes), state.table(), state.again_row()
        position = int(rows["position"][first])
        where = f"what is read again for {writer.key}"
        view, at = memoryview(frames), 0
        writer._table = table = BlockTable.behind(rows[:first], position)
        for some in state.frames_again():
            table.begin(some.partition_id, some.base_offset)
            table.add(view[at : at + some.byte_count], where)
            at += some.byte_count
        cut = bytes(view[: max(0, state.sent - position)])
        if (
            at != len(view)
            or table.rows.tobytes() != state.rows
            or xxhash.xxh3_64_intdigest(cut) != state.sent_digest
        ):
            raise DataLoss(f"{where} is not what was there before")
        writer._cut, writer._cut_position = cut, position
        writer._fill = 0
        writer._put(view[state.sent - position :])
        writer._sent, writer._number = state.sent, state.part_count
        writer._ended, writer._first_row = list(state.ended), state.first_row
        return writer

    def state(self) -> WriterState:
        """How far it is. Only while frames of a partition are added, and once a part is complete."""
        if self._first_row is None or not self._number:
            raise Internal(f"{self.key} has no state yet that another writer could go on from")
        rows = self._table.rows.tobytes()
        digest = xxhash.xxh3_64_intdigest(self._cut)
        return WriterState(
            self._number, self._sent, rows, list(self._ended), self._first_row, digest
        )

    @property
    def size(self) -> int:
        """Bytes up to now."""
        return self._sent + self._fill

    @property
    def end_offset(self) -> int:
        """Behind the last message that was added; -1 if there is none."""
        rows = self._table.rows
        return int(rows["end_offset"][-1]) if len(rows) else -1

    def begin(self, partition_id: int, next_offset: int) -> None:
        """Begin the frames of a partition; none may begin before `next_offset`."""
        self.end()
        self._first_row = self._table.begin(partition_id, next_offset)
        self.producers = set()

    def space(self, byte_count: int) -> memoryview:
        """Room for the next frames. It is valid until the next call."""
        needed = self._fill + byte_count
        if needed > len(self._buffer):
            larger = bytearray(needed)
            larger[: self._fill] = memoryview(self._buffer)[: self._fill]
            self._buffer = larger
        return memoryview(self._buffer)[self._fill : needed]

    def add(self, byte_count: int, where: str) -> Iterator[OutgoingPart]:
        """Check the frames that were put into `space`; the parts that are complete with them.

        Raises DataLoss, and nothing of them is in the object, if they are not sound frames of the
        partition in the order of offsets.
        """
        frames = memoryview(self._buffer)[self._fill : self._fill + byte_count]
        self._table.add(frames, where)
        with contextlib.suppress(DataLoss):  # who reads such a frame is told
            self.producers.update(producer_ids(frames))
        self._fill += byte_count
        return self._complete()

    def end(self) -> bool:
        """End the frames of the partition; whether there are any: else it is not in the object."""
        first, self._first_row = self._first_row, None
        if first is None or len(self._table.rows) <= first:
            return False
        self._ended.append((first, len(self._table.rows)))
        return True

    def finish(self) -> tuple[list[OutgoingPart], list[Section]]:
        """End the object: its last parts, and what it holds of each partition."""
        self.end()
        rows = self._table.rows
        blocks_position = self._table.position
        table = rows.tobytes()
        size = blocks_position + len(table) + TRAILER_BYTES
        self._put(table)
        self._put(Trailer(len(rows), blocks_position, size, crc32c(table)).encode())
        parts = list(self._complete())
        if self._fill:
            parts.append(self._take(self._fill))
        sections = [
            section_of(self.key, rows, first, end, blocks_position) for first, end in self._ended
        ]
        return parts, sections

    def _put(self, data: bytes | memoryview) -> None:
        self.space(len(data))[:] = data
        self._fill += len(data)

    def _complete(self) -> Iterator[OutgoingPart]:
        while self._fill >= self._part_bytes:
            yield self._take(self._part_bytes)

    def _take(self, size: int) -> OutgoingPart:
        """The first bytes of the buffer, which stay as they are; the rest goes into a new one."""
        taken = memoryview(self._buffer)[:size]
        rest = memoryview(self._buffer)[size : self._fill]
        room = len(self._buffer)  # as much as the frames that were added needed
        self._buffer = bytearray(
            room if room <= 2 * self._part_bytes else max(self._part_bytes, len(rest))
        )
        self._buffer[: len(rest)] = rest
        self._fill = len(rest)
        self._number += 1
        part = OutgoingPart(self._number, self._sent, taken)
        self._sent += size
        self._keep_cut(part)
        return part

    def _keep_cut(self, part: OutgoingPart) -> None:
        """Keep what this part, and those before, have of the block that it ends in."""
        rows = self._table.rows
        if not len(rows):
            return
        position = int(rows["position"][_row_at(rows, self._sent)])
        before = self._cut[position - self._cut_position :] if position < part.offset else b""
        self._cut = before + bytes(part.data[max(0, position - part.offset) :])
        self._cut_position = position


def _row_at(rows: Blocks, sent: int) -> int:
    """The block that so many bytes of an object end in, or the last one, which may take more frames."""
    ends = rows["position"] + rows["byte_count"]
    return min(int(np.searchsorted(ends, sent, side="right")), len(rows) - 1)


def section_of(
    key: str, table: Blocks, first_row: int, end_row: int, blocks_position: int
) -> Section:
    """Tell of rows of an object's table of blocks, which begins at `blocks_position`, as a manifest does."""
    rows = table[first_row:end_row]
    return Section(
        key=key,
        position=int(rows["position"][0]),
        byte_count=int(rows["byte_count"].sum()),
        base_offset=int(rows["base_offset"][0]),
        end_offset=int(rows["end_offset"][-1]),
        message_count=int(rows["message_count"].sum()),
        append_min_ns=int(rows["append_min_ns"].min()),
        append_max_ns=int(rows["append_max_ns"].max()),
        publish_min_ns=int(rows["publish_min_ns"].min()),
        publish_max_ns=int(rows["publish_max_ns"].max()),
        blocks_position=blocks_position + first_row * BLOCK_DTYPE.itemsize,
        block_count=len(rows),
        blocks_crc=crc32c(rows.tobytes()),
    )


def read_blocks(store: ObjectStore, section: Section) -> Blocks:
    """The blocks of a section, by one read. Raises DataLoss if they are damaged."""
    size = section.block_count * BLOCK_DTYPE.itemsize
    data = store.read(section.key, section.blocks_position, size)
    return decode_blocks(data, section.blocks_crc, f"{store.url}: {section.key}")


def read_block_frames(store: ObjectStore, key: str, rows: Blocks) -> bytes:
    """Read the frames of blocks that stand back to back, by one read. Raises DataLoss if the crc of one is another."""
    start, size = int(rows["position"][0]), int(rows["byte_count"].sum(dtype=np.int64))
    data = store.read(key, start, size)
    view, at = memoryview(data), 0
    for block in rows:
        after = at + int(block["byte_count"])
        if crc32c(view[at:after]) != int(block["crc"]):
            raise DataLoss(
                f"{store.url}: {key}, position {start}: the block at {start + at} is damaged, its crc is another one"
            )
        at = after
    return data


def read_table(store: ObjectStore, key: str, identity: bytes) -> Blocks:
    """Read an object's table of blocks, and none of its frames.

    Raises DataLoss that names what is wrong, NotFound if it is missing.
    """
    where = f"{store.url}: {key}"
    info = store.head(key)
    if info is None:
        raise NotFound(f"{where}: there is no such object")
    size = info.size
    if size < OBJECT_HEADER_BYTES + TRAILER_BYTES:
        raise DataLoss(f"{where} has {size} bytes, which is no object of history")
    header = ObjectHeader.decode(store.read(key, 0, OBJECT_HEADER_BYTES), where)
    if header.identity != identity or object_key(header.epoch, header.number) != key:
        raise DataLoss(f"{where} is an object of another broker, or of another name")
    trailer = Trailer.decode(store.read(key, size - TRAILER_BYTES, TRAILER_BYTES), where)
    table_bytes = trailer.block_count * BLOCK_DTYPE.itemsize
    if (
        trailer.object_bytes != size
        or trailer.blocks_position + table_bytes != size - TRAILER_BYTES
    ):
        raise DataLoss(f"{where} has {size} bytes, and its end speaks of {trailer.object_bytes}")
    data = store.read(key, trailer.blocks_position, table_bytes)
    rows = decode_blocks(data, trailer.blocks_crc, where)
    if table_position(rows) != trailer.blocks_position:
        raise DataLoss(f"the blocks of {where} do not end where its table begins")
    return rows


def table_position(rows: Blocks) -> int:
    """Where an object's table of blocks begins, bytes: behind its last block."""
    if not len(rows):
        return OBJECT_HEADER_BYTES
    return int(rows["position"][-1]) + int(rows["byte_count"][-1])


def verify_object(store: ObjectStore, key: str, identity: bytes) -> Blocks:
    """Check every byte of an object; its table of blocks.

    Raises DataLoss that names what is wrong, NotFound if it is missing.
    """
    where = f"{store.url}: {key}"
    rows = read_table(store, key, identity)
    checked = BlockTable(OBJECT_HEADER_BYTES)
    partition_id = -1
    for row in rows:
        if int(row["partition_id"]) != partition_id:
            partition_id = int(row["partition_id"])
            checked.begin(partition_id)
        position = int(row["position"])
        frames = store.read(key, position, int(row["byte_count"]))
        checked.add(frames, f"{where}, position {position}")
    if checked.rows.tobytes() != rows.tobytes():
        raise DataLoss(f"the frames of {where} are not those that its table of blocks tells of")
    return rows
