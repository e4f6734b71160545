"""Objects of history: made part by part as frames come, and read by ranges.

ObjectWriter     frames of one partition after the other -> parts, sections, table of blocks
read_blocks      the blocks of a section, by one ranged read
verify_object    every byte of an object
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from danube_fast.errors import DataLoss, NotFound
from danube_fast.frame.crc import crc32c
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

__all__ = ["ObjectWriter", "OutgoingPart", "read_blocks", "section_of", "verify_object"]


class OutgoingPart(NamedTuple):
    """Bytes of an object that are complete."""

    number: int
    """From 1 on."""
    offset: int
    """Where they stand in the object."""
    data: memoryview


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
        self._put(header.encode())

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
        self._table.add(memoryview(self._buffer)[self._fill : self._fill + byte_count], where)
        self._fill += byte_count
        return self._complete()

    def end(self) -> None:
        """End the frames of the partition; one without any is not in the object."""
        if self._first_row is not None and len(self._table.rows) > self._first_row:
            self._ended.append((self._first_row, len(self._table.rows)))
        self._first_row = None

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

    def _put(self, data: bytes) -> None:
        self.space(len(data))[:] = data
        self._fill += len(data)

    def _complete(self) -> Iterator[OutgoingPart]:
        while self._fill >= self._part_bytes:
            yield self._take(self._part_bytes)

    def _take(self, size: int) -> OutgoingPart:
        """The first bytes of the buffer, which stay as they are; the rest goes into a new one."""
        taken = memoryview(self._buffer)[:size]
        rest = memoryview(self._buffer)[size : self._fill]
        self._buffer = bytearray(max(self._part_bytes, len(rest)))
        self._buffer[: len(rest)] = rest
        self._fill = len(rest)
        self._number += 1
        part = OutgoingPart(self._number, self._sent, taken)
        self._sent += size
        return part


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


def verify_object(store: ObjectStore, key: str, identity: bytes) -> Blocks:
    """Check every byte of an object; its table of blocks.

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
    checked = BlockTable(OBJECT_HEADER_BYTES)
    partition_id = -1
    for row in rows:
        if int(row["partition_id"]) != partition_id:
            partition_id = int(row["partition_id"])
            checked.begin(partition_id)
        position = int(row["position"])
        frames = store.read(key, position, int(row["byte_count"]))
        checked.add(frames, f"{where}, position {position}")
    if checked.rows.tobytes() != data or checked.position != trailer.blocks_position:
        raise DataLoss(f"the frames of {where} are not those that its table of blocks tells of")
    return rows
