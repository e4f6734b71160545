"""Reading a partition's history: from an offset or a time to frames, with as few requests as can be.

    offset --manifest--> section --its blocks, one read--> block --one read--> frames, checked

The manifest is in memory; blocks that were read are kept. So the first message at any offset costs two
requests to the store, however many objects there are, and the ones behind it one for each range.
"""

from __future__ import annotations

import collections
import struct
import threading
from typing import NamedTuple

import numpy as np

from danube_fast.errors import DanubeError, DataLoss, NotFound
from danube_fast.frame.layout import At
from danube_fast.history.layout import Blocks
from danube_fast.history.manifest import Manifest, Section
from danube_fast.history.objects import read_block_frames, read_blocks
from danube_fast.history.stores.store import ObjectStore

__all__ = ["Fetched", "HistoryReader", "Span"]

BLOCK_TABLES_KEPT = 64
"""Tables of blocks of the sections that were read last: about 20 KiB for 64 MiB of frames."""
_HEADER = struct.Struct(
    f"<{At.FRAME_BYTES}xI{At.BASE_OFFSET - At.FRAME_BYTES - 4}xQq"
)  # frame_bytes, base_offset, append_time_ns


class Fetched(NamedTuple):
    """Whole frames of a partition, in the order of offsets, back to back."""

    base_offset: int
    end_offset: int
    """Behind the last message."""
    data: bytes
    key: str
    """Of the object."""
    rows: Blocks
    """The blocks, with their positions in the object."""


class Span(NamedTuple):
    """Blocks of one object that stand back to back."""

    start: int
    """There is no message from here to the first block, or it is in that."""
    section: Section
    rows: Blocks

    @property
    def end_offset(self) -> int:
        """Behind the last message."""
        return int(self.rows["end_offset"][-1])


class HistoryReader:
    """Read the history of one partition as a manifest tells it. Threads may share it."""

    def __init__(self, store: ObjectStore, partition_id: int, manifest: Manifest) -> None:
        self._store, self._partition_id = store, partition_id
        self.manifest = manifest
        self._blocks: collections.OrderedDict[Section, Blocks] = collections.OrderedDict()
        self._lock = threading.Lock()
        """While a table of blocks is read."""

    def fetch(self, offset: int, bytes_max: int) -> Fetched | None:
        """Read the first of `spans`; None: there is none. Raises as `read`."""
        found = self.spans(offset, bytes_max)
        return self.read(found[0]) if found else None

    def spans(self, offset: int, bytes_max: int, count: int = 1) -> list[Span]:
        """Whole blocks of one object, from the one with `offset` on, or with the first message behind it; then the
        next ones: `count` spans, or as many as there are. Each has `bytes_max` bytes at most but one block at least.

        Reads tables of blocks, and no frames. Raises what the store raises; DataLoss that names object and offsets
        if such a table is not there.
        """
        found: list[Span] = []
        while len(found) < count:
            section = self.manifest.find(offset)
            if section is None:
                break
            try:
                rows = self._blocks_of(section)
            except DanubeError:
                if found:  # those before are sound
                    break
                raise
            first = int(np.searchsorted(rows["end_offset"], offset, side="right"))
            ends = np.cumsum(rows["byte_count"][first:], dtype=np.int64)
            last = first + max(1, int(np.searchsorted(ends, bytes_max, side="right")))
            found.append(Span(offset, section, rows[first:last]))
            offset = found[-1].end_offset
        return found

    def read(self, span: Span) -> Fetched:
        """Read the frames of a span, or of the blocks before the first damaged one. Frames that end before its
        `start` may come first.

        Raises what the store raises; DataLoss that names object and offsets if they are not there.
        """
        count = len(span.rows)
        while True:
            try:
                return self._read(span.section, span.rows[:count])
            except DataLoss:
                if count == 1:
                    raise
                count //= 2  # the blocks before the damaged one are sound

    def find_time(self, time_ns: int) -> int | None:
        """Offset of the first message that the broker got at `time_ns` (Unix time, ns) or later; None if
        all of the history is older. Reads one section's blocks and one block at most. Raises as `fetch`."""
        section = self.manifest.find_time(time_ns)
        if section is None:
            return None
        if section.append_min_ns >= time_ns:
            return section.base_offset
        rows = self._blocks_of(section)
        # a clock that was set back makes later blocks older
        latest = np.maximum.accumulate(rows["append_max_ns"])
        block = rows[int(np.searchsorted(latest, time_ns))]
        if int(block["append_min_ns"]) >= time_ns:
            return int(block["base_offset"])
        data = self._read(section, np.array([block])).data
        at, (size, base_offset, append_ns) = 0, _HEADER.unpack_from(data)
        while append_ns < time_ns:
            at += size
            size, base_offset, append_ns = _HEADER.unpack_from(data, at)
        return int(base_offset)

    def _blocks_of(self, section: Section) -> Blocks:
        with self._lock:
            rows = self._blocks.get(section)
            if rows is None:
                try:
                    rows = self._blocks[section] = read_blocks(self._store, section)
                except (NotFound, DataLoss) as error:
                    raise self._lost(section.base_offset, section.end_offset, error) from None
                if len(self._blocks) > BLOCK_TABLES_KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(section)
            return rows

    def _read(self, section: Section, rows: Blocks) -> Fetched:
        base, end = int(rows["base_offset"][0]), int(rows["end_offset"][-1])
        try:
            data = read_block_frames(self._store, section.key, rows)
        except (NotFound, DataLoss) as error:
            raise self._lost(base, end, error) from None
        return Fetched(base, end, data, section.key, rows)

    def _lost(self, base: int, end: int, error: DanubeError) -> DataLoss:
        return DataLoss(f"offsets {base} to {end} of {self.manifest.topic} are lost: {error}")
