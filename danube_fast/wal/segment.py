"""Segments: the files that hold a log, and the chain they form.

A `Segment` is one file that is part of the log; the `Chain` is all of them in order. Segments are
made by the worker's loop out of spare files (see spares.py) by writing a header and renaming, so
that a file with a segment's name always has its full size.

    spare-7.seg --header--> rename --> 00000000000008380416.seg --trim--> rename --> spare-9.seg

The directory entry is made durable (an fsync of the folder, queued before the segment's own sync)
before anything in the segment counts as synced.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from danube_fast.descriptors import open_file
from danube_fast.errors import DataLoss, FailedPrecondition
from danube_fast.wal.layout import (
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    SegmentHeader,
    position_from_name,
    position_name,
)
from danube_fast.wal.rewrite import WrittenGroup
from danube_fast.wal.writer import WriteFault, write_all

__all__ = ["Chain", "Segment", "list_segments", "usable_segments"]

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC


class Segment:
    """One file of the log. `fault` says what is wrong with its header, if anything is."""

    __slots__ = (
        "created_ns",
        "direct_fd",
        "end_position",
        "epoch",
        "fault",
        "fd",
        "file_bytes",
        "first_position",
        "is_reserve",
        "log_id",
        "path",
        "previous_position",
    )

    def __init__(self, path: Path, first_position: int, file_bytes: int) -> None:
        self.path = path
        self.first_position = first_position
        self.file_bytes = file_bytes
        self.end_position = first_position
        self.previous_position: int | None = None
        self.epoch = 0
        self.created_ns = 0
        self.log_id: int | None = None
        self.fault: str | None = None
        self.is_reserve = False
        self.fd = self.direct_fd = -1

    @classmethod
    def adopt(
        cls, source: Path, header: SegmentHeader, groups: Iterable[WrittenGroup] = ()
    ) -> Segment:
        """Turn the spare file `source` into the segment of `header`, with `groups` in front.

        Raises OSError or WriteFault; there is no such segment then.
        """
        target = source.parent / position_name(header.first_position, SEGMENT_SUFFIX)
        fd = open_file(source, _OPEN_FLAGS)
        try:
            written = os.pwrite(fd, header.encode(), 0)
            if written != SEGMENT_HEADER_BYTES:
                raise OSError(f"only {written} bytes of a segment header were written")
            for group in groups:
                at = SEGMENT_HEADER_BYTES + group.position - header.first_position
                write_all(fd, group.buffers, group.byte_count, at, str(target))
            os.rename(source, target)
        except (OSError, WriteFault):
            os.close(fd)
            raise
        segment = cls(target, header.first_position, os.fstat(fd).st_size)
        segment._take(header)
        segment.fd = fd
        return segment

    @classmethod
    def load(cls, path: Path, first_position: int, segment_bytes: int) -> Segment:
        """Read the header of a segment file; a damaged one is noted in `fault`, not raised.

        `segment_bytes` is the size to believe in when the header cannot say. Raises
        FailedPrecondition if the format is newer than this program.
        """
        with open(path, "rb", buffering=0) as file:
            head = file.read(SEGMENT_HEADER_BYTES)
            segment = cls(path, first_position, os.fstat(file.fileno()).st_size)
        try:
            header = SegmentHeader.decode(head, str(path))
        except DataLoss as fault:
            segment.fault = str(fault)
            segment._take_name(segment_bytes)
            return segment
        if header.first_position != first_position:
            segment.fault = (
                f"{path} is named {first_position} but its header says {header.first_position}"
            )
            if header.first_position < first_position:
                segment._take_name(segment_bytes)
            else:
                segment.end_position = first_position
                segment.previous_position = -1
            return segment
        segment._take(header)
        return segment

    def _take_name(self, segment_bytes: int) -> None:
        """Believe the name alone: where it starts; what stands in it must say so of itself."""
        size = max(self.file_bytes, segment_bytes)
        self.end_position = self.first_position + size - SEGMENT_HEADER_BYTES
        self.previous_position = None

    def _take(self, header: SegmentHeader) -> None:
        size = max(header.segment_bytes, self.file_bytes)
        self.end_position = header.first_position + size - SEGMENT_HEADER_BYTES
        self.previous_position = header.previous_position
        self.epoch = header.epoch
        self.created_ns = header.created_ns
        self.log_id = header.log_id

    @property
    def is_foreign(self) -> bool:
        """Whether the file was recycled for another place, further on, and its rename was lost."""
        return self.previous_position == -1

    @property
    def is_short(self) -> bool:
        """Whether the file is smaller than it was made; of one without a sound header little is known."""
        known_bytes = self.segment_bytes if self.fault is None else SEGMENT_HEADER_BYTES + 1
        return self.file_bytes < known_bytes

    def open(self) -> int:
        """The file descriptor, opened at the first use. Raises OSError."""
        if self.fd < 0:
            self.fd = open_file(self.path, _OPEN_FLAGS)
        return self.fd

    def open_direct(self) -> int:
        """A descriptor that writes around the page cache, durably, opened at the first use. Raises OSError."""
        if self.direct_fd < 0:
            self.direct_fd = open_file(self.path, _OPEN_FLAGS | os.O_DIRECT | os.O_DSYNC)
        return self.direct_fd

    def close(self) -> None:
        """Close the descriptors, if there are any."""
        if self.direct_fd >= 0:
            fd, self.direct_fd = self.direct_fd, -1
            os.close(fd)
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    @property
    def segment_bytes(self) -> int:
        """Size that the file has when it is whole."""
        return SEGMENT_HEADER_BYTES + self.end_position - self.first_position

    def restore(self, header: SegmentHeader) -> None:
        """Make the file whole again before it is written on: its size, and `header` if damaged.

        Raises OSError.
        """
        fd = self.open()
        if self.fault is not None:
            os.pwrite(fd, header.encode(), 0)
            self._take(header)
            self.fault = None
        if self.file_bytes < self.segment_bytes:
            os.posix_fallocate(fd, 0, self.segment_bytes)
            self.file_bytes = self.segment_bytes

    def file_offset(self, position: int) -> int:
        """Where the byte of log position `position` stands in the file."""
        return SEGMENT_HEADER_BYTES + position - self.first_position


class Chain:
    """The segments of a log by position. Each ends where the next begins."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments
        """Oldest first."""
        self._firsts = [segment.first_position for segment in segments]

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __getitem__(self, index: int) -> Segment:
        return self.segments[index]

    @property
    def oldest_position(self) -> int:
        """First position that the chain holds, 0 if it is empty."""
        return self._firsts[0] if self._firsts else 0

    @property
    def bytes_on_disk(self) -> int:
        """Sum of the file sizes."""
        return sum(segment.file_bytes for segment in self.segments)

    def index_of(self, position: int) -> int:
        """Index of the last segment that starts at or below `position`; -1 if none does."""
        return bisect.bisect_right(self._firsts, position) - 1

    def end_of(self, index: int) -> int:
        """Position behind the last byte that segment `index` may hold."""
        if index + 1 < len(self.segments):
            return self._firsts[index + 1]
        return self.segments[index].end_position

    def position_before(self, wall_ns: int) -> int:
        """A position below which everything was written before `wall_ns` (wall clock, ns).

        The clock may have been set back meanwhile: a segment is never older than the one before it.
        """
        older = itertools.takewhile(lambda segment: segment.created_ns <= wall_ns, self.segments)
        return max((segment.first_position for segment in older), default=self.oldest_position)

    def append(self, segment: Segment) -> None:
        """Add the newest segment. Raises FailedPrecondition if it does not come last."""
        if self._firsts and segment.first_position < self._firsts[-1]:
            raise FailedPrecondition("a segment can only be added behind the newest one")
        self.segments.append(segment)
        self._firsts.append(segment.first_position)

    def pop_first(self) -> Segment:
        """Take the oldest segment out."""
        self._firsts.pop(0)
        return self.segments.pop(0)

    def pop_last(self) -> Segment:
        """Take the newest segment out."""
        self._firsts.pop()
        return self.segments.pop()

    def close(self) -> None:
        """Close every descriptor."""
        for segment in self.segments:
            segment.close()


def list_segments(directory: Path, segment_bytes: int) -> list[Segment]:
    """Every segment file of a log's folder in order. Raises FailedPrecondition for a newer format."""
    found: list[Segment] = []
    for name in sorted(os.listdir(directory)):
        first = position_from_name(name, SEGMENT_SUFFIX)
        if first is not None:
            found.append(Segment.load(directory / name, first, segment_bytes))
    return found


def usable_segments(directory: Path, segment_bytes: int, log_id: int) -> list[Segment]:
    """The segments of log `log_id`. Raises FailedPrecondition if the folder is another log's.

    The oldest files may have been recycled just before a power cut that undid their renaming: they
    hold nothing of their old place and are removed. So are files that a cut had given up (see
    `Appender.cut_at`) when the process was killed before it removed them. A newer one may have its new
    name already and the header of its old place: what it holds is what its frames say, as with any
    damaged header.
    """
    segments = list_segments(directory, segment_bytes)
    while segments and segments[0].is_foreign:
        segments.pop(0).path.unlink()
    for segment in segments:
        if segment.is_foreign:
            segment._take_name(segment_bytes)
    segments = _without_given_up(segments)
    for segment in segments:
        if segment.log_id not in (None, log_id):
            raise FailedPrecondition(
                f"{directory} belongs to log {segment.log_id}, not to log {log_id}; "
                "put the folders of the logs back where they were"
            )
    return segments


def _without_given_up(segments: list[Segment]) -> list[Segment]:
    """Removes those that stand behind one of a later epoch without having been made after it."""
    kept: list[Segment] = []
    epoch = 0
    for segment in segments:
        is_linked = not kept or segment.previous_position == kept[-1].first_position
        if segment.fault is None and segment.epoch < epoch and not is_linked:
            segment.path.unlink()
            continue
        kept.append(segment)
        epoch = max(epoch, segment.epoch)
    return kept
