"""Messages of a partition in objects that its manifest does not name.

    offsets that are needed   |--------------------------------------|
    objects, newest first            |===== A =====|
                               |===== B =====|                |~ C ~|      C: one block is damaged
    named as they are                |===== A =====|
    copied into new objects    |= B =|                        |=|
    lost                                           |----------|  |---|

An object that is sound and lies in the offsets that are needed is named as it is. Of others only frames that are
needed and sound are copied, so that sections never overlap. All that is left is lost.

What is sound of a damaged section comes before all of these, for a manifest has named it: an orphan may be of another
life of the topic. For the same reason no orphan fills offsets that were never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from danube_fast.errors import DanubeError
from danube_fast.frame.view import FrameView
from danube_fast.history.catalog import Damage
from danube_fast.history.layout import Blocks, ObjectHeader
from danube_fast.history.manifest import Manifest, Section
from danube_fast.history.objects import ObjectWriter, section_of, table_position
from danube_fast.history.ranges import Range, common, subtract
from danube_fast.history.reader import HistoryReader
from danube_fast.history.stores.store import ObjectStore

__all__ = ["Cover", "Piece", "Source", "copy_piece", "cover", "section_in", "sound_ranges"]

PART_BYTES = 8 << 20


class Source(NamedTuple):
    """The messages that one object has of the partition."""

    section: Section
    sound: list[Range]
    """Offsets that can be read."""

    @property
    def is_whole(self) -> bool:
        """Whether all of it can be read."""
        return self.sound == [(self.section.base_offset, self.section.end_offset)]


class Piece(NamedTuple):
    """Frames that are copied out of an object."""

    section: Section
    """What the object has of the partition."""
    base_offset: int
    end_offset: int


class Cover(NamedTuple):
    """Where each offset that is needed is found."""

    named: list[Section]
    pieces: list[Piece]
    left: list[Range]
    """Those that no object has."""


def section_in(key: str, rows: Blocks, partition_id: int) -> Section | None:
    """Make the section of one partition from an object's table of blocks; None: it has nothing there."""
    own = np.flatnonzero(rows["partition_id"] == partition_id)
    if not len(own):
        return None
    return section_of(key, rows, int(own[0]), int(own[-1]) + 1, table_position(rows))


def sound_ranges(section: Section, damages: Iterable[Damage]) -> list[Range]:
    """Find the offsets of a section that can be read, for all that an audit has found wrong with it."""
    bad = [
        (damage.base_offset, damage.end_offset)
        for damage in damages
        if damage.base_offset is not None and damage.end_offset is not None
    ]
    return subtract([(section.base_offset, section.end_offset)], bad)


def cover(
    store: ObjectStore,
    partition_id: int,
    needed: Sequence[Range],
    unused: Sequence[Range],
    given_up: Sequence[Source],
    orphans: Sequence[Source],
    first_offset: int,
) -> Cover:
    """Find the offsets that are needed in objects: first in the sections that are `given_up`, then in orphans, those
    that stand first before others. `unused`: offsets that no message ever had; what begins before `first_offset` may be
    named and copied with it. Raises what the store raises."""
    left = subtract(needed, unused)
    pieces, left = _cut(store, partition_id, given_up, left, first_offset)
    named: list[Section] = []
    for source in orphans:
        section = source.section
        extent = (max(section.base_offset, first_offset), section.end_offset)
        is_free = not subtract([extent], [*left, *unused]) and common([extent], left)
        if source.is_whole and is_free:
            if _has_frames(store, partition_id, section, common([extent], unused)):
                continue  # it is of another life of the topic, or of a log that was rolled back
            named.append(section)
            left = subtract(left, [extent])
    more, left = _cut(store, partition_id, orphans, left, first_offset)
    return Cover(named, pieces + more, left)


def _cut(
    store: ObjectStore,
    partition_id: int,
    sources: Sequence[Source],
    left: list[Range],
    first_offset: int,
) -> tuple[list[Piece], list[Range]]:
    """Cut the pieces with the offsets that are left out of objects; what is left then."""
    pieces: list[Piece] = []
    for source in sources:
        for base, end in common(left, source.sound):
            piece, found = _trim(
                store, partition_id, Piece(source.section, base, end), first_offset
            )
            if piece is not None:
                pieces.append(piece)
            left = subtract(left, [found])
    return pieces, left


def _has_frames(
    store: ObjectStore, partition_id: int, section: Section, ranges: Sequence[Range]
) -> bool:
    """Whether a section that is sound has messages with some offsets."""
    return any(
        True for base, end in ranges for _ in _frames(store, partition_id, section, base, end)
    )


def _trim(
    store: ObjectStore, partition_id: int, piece: Piece, first_offset: int
) -> tuple[Piece | None, Range]:
    """Cut a piece to whole frames, and how far these reach; None: there are none."""
    section, base, end = piece
    start: int | None = None
    for frame in _frames(store, partition_id, section, base, end):
        frame_end = frame.base_offset + frame.offset_span
        if frame_end > end:
            end = frame.base_offset
        elif frame.base_offset < base > first_offset:
            base = frame_end
        elif start is None:
            start = min(base, frame.base_offset)
    return Piece(section, start, end) if start is not None else None, (base, end)


def _frames(
    store: ObjectStore, partition_id: int, section: Section, base: int, end: int
) -> Iterator[FrameView]:
    """Frames with offsets between two others, block by block. Raises DataLoss if a block is damaged."""
    alone = Manifest()
    alone.sections = [section]
    reader, at = HistoryReader(store, partition_id, alone), base
    while at < end:
        spans = reader.spans(at, 1)
        if not spans or int(spans[0].rows["base_offset"][0]) >= end:
            return  # what is behind may be damaged
        fetched = reader.read(spans[0])
        place = 0
        while place < len(fetched.data):
            frame = FrameView(fetched.data, place)
            if frame.base_offset + frame.offset_span > base and frame.base_offset < end:
                yield frame
            place += frame.frame_bytes
        at = max(fetched.end_offset, at + 1)


def copy_piece(
    store: ObjectStore, partition_id: int, piece: Piece, header: ObjectHeader
) -> Section:
    """Copy the frames of a piece into a new object; its section. Raises what the store raises."""
    writer = ObjectWriter(header, max(PART_BYTES, store.part_bytes_min))
    upload = store.begin(writer.key)
    try:
        sent = []
        writer.begin(partition_id, piece.base_offset)
        for frame in _frames(store, partition_id, *piece):
            is_inside = piece.base_offset <= frame.base_offset
            if not is_inside or frame.base_offset + frame.offset_span > piece.end_offset:
                continue
            writer.space(frame.frame_bytes)[:] = frame.frame
            for part in writer.add(frame.frame_bytes, piece.section.key):
                sent.append(store.put_part(upload, *part))
        parts, sections = writer.finish()
        sent.extend(store.put_part(upload, *part) for part in parts)
        store.complete(upload, sent)
    except DanubeError:
        store.abort(upload)
        raise
    return sections[0]
