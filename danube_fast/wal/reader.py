"""Reading back: bytes of the log by position, checked runs by partition and offset.

Reads go through pread on descriptors that stay open for the segments in use; what was read is
checked frame by frame before anyone trusts it, and a fault names the file and the position.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from danube_fast.errors import DataLoss, InvalidArgument
from danube_fast.frame.kernel import address_of, direct
from danube_fast.wal.background import Background
from danube_fast.wal.index import Run
from danube_fast.wal.scan import (
    STATE_LOG_ID,
    STATE_POSITION,
    STATE_WORDS,
    check_run,
    describe_scan,
)
from danube_fast.wal.segment import Chain, Segment
from danube_fast.wal.writer import signed

__all__ = ["LogReader"]

_FETCH_BYTES = 1 << 20
_OPEN_MAX = 64  # descriptors of closed segments that are kept; a log may have thousands of segments

_call_check = direct(check_run)


class LogReader:
    """Reads a chain. `keep_open_from` guards descriptors that a sync may still use."""

    def __init__(self, chain: Chain, log_id: int, background: Background) -> None:
        self._chain, self._background = chain, background
        self._state = np.zeros(STATE_WORDS, dtype=np.int64)
        self._state[STATE_LOG_ID] = signed(log_id)
        self._recent: collections.OrderedDict[int, Segment] = collections.OrderedDict()

    def read(self, position: int, byte_count: int, end_position: int) -> bytearray:
        """Bytes [position, position + byte_count), from one segment or several.

        Raises InvalidArgument beyond `end_position`, DataLoss if trimmed or unreadable.
        """
        self._check_bounds(position, byte_count, end_position)
        buffer = bytearray(byte_count)
        view = memoryview(buffer)
        for segment, start, end in self._parts(position, byte_count):
            self._read_part(segment, start, view[start - position : end - position])
        return buffer

    def _check_bounds(self, position: int, byte_count: int, end_position: int) -> None:
        if byte_count < 0 or position + byte_count > end_position:
            raise InvalidArgument(
                f"positions {position} to {position + byte_count} are not written yet; "
                f"the log ends at {end_position}"
            )
        if position < self._chain.oldest_position:
            raise DataLoss(
                f"position {position} was trimmed; the log starts at "
                f"{self._chain.oldest_position}: read on from the earliest offset"
            )

    def _parts(self, position: int, byte_count: int) -> Iterator[tuple[Segment, int, int]]:
        """Segments that hold [position, position + byte_count), and which positions each has of it."""
        index, at, stop = self._chain.index_of(position), position, position + byte_count
        while at < stop:
            end = min(stop, self._chain.end_of(index))
            if end > at:
                yield self._chain[index], at, end
                at = end
            index += 1

    def files(self, position: int, byte_count: int) -> list[tuple[str, int, int]]:
        """Where [position, position + byte_count) stands: path, place in the file, number of bytes."""
        return [
            (str(segment.path), segment.file_offset(start), end - start)
            for segment, start, end in self._parts(position, byte_count)
        ]

    def _read_part(self, segment: Segment, position: int, view: memoryview) -> None:
        done = 0
        try:
            fd = self._open(segment)
            while done < len(view):
                got = os.preadv(fd, [view[done:]], segment.file_offset(position) + done)
                if got == 0:
                    raise DataLoss(
                        f"{segment.path} ends before position {position + len(view)}; "
                        "run `danube-fast wal verify`"
                    )
                done += got
        except OSError as fault:
            raise DataLoss(
                f"{segment.path} cannot be read at position {position}: {fault.strerror}; "
                "check the disk, then run `danube-fast wal verify`"
            ) from fault

    def _open(self, segment: Segment) -> int:
        if segment.fd >= 0:
            return segment.fd
        fd = segment.open()
        self._recent[segment.first_position] = segment
        if len(self._recent) > _OPEN_MAX:
            _, oldest = self._recent.popitem(last=False)
            oldest.close()
        return fd

    def forget(self, segment: Segment) -> None:
        """Close a segment that leaves the chain."""
        self._recent.pop(segment.first_position, None)
        segment.close()

    def read_run(self, run: Run, end_position: int) -> bytearray:
        """The frames of a run, each checked. Raises DataLoss naming the file and the position."""
        data = self.read(run.position, run.byte_count, end_position)
        self.check(run, data)
        return data

    def read_cached(self, run: Run, end_position: int) -> bytearray | None:
        """`read_run` if that need not wait for the disk, else None. Raises InvalidArgument beyond
        `end_position`, DataLoss."""
        self._check_bounds(run.position, run.byte_count, end_position)
        data = bytearray(run.byte_count)
        view = memoryview(data)
        try:
            for segment, start, end in self._parts(run.position, run.byte_count):
                fd, place = self._open(segment), segment.file_offset(start)
                part = view[start - run.position : end - run.position]
                if not self._background.read_cached(fd, part, place):
                    return None
        except OSError:
            return None  # who has to have it says what is wrong
        self.check(run, data)
        return data

    def prefetch(self, position: int, byte_count: int) -> Callable[[], None]:
        """Return work that brings bytes of the log into the page cache; call it once, in another thread."""
        parts = []
        with contextlib.suppress(OSError):  # the read that follows says what is wrong
            for segment, start, end in self._parts(position, byte_count):
                fd = os.dup(self._open(segment))
                parts.append((fd, segment.file_offset(start), end - start))
        return lambda: _fetch(parts)

    def fetch(self, runs: list[Run]) -> Callable[[], dict[int, bytearray]]:
        """Return work that reads runs, by position; call it once, in another thread. What it returns is not checked; a
        run that cannot be read is missing."""
        descriptors: dict[int, int] = {}
        """By first position of a segment: of its own, as the loop may close the segment's meanwhile."""
        parts: list[tuple[Run, list[tuple[int, int, int]]]] = []
        with contextlib.suppress(OSError):  # the read that follows says what is wrong
            for run in runs:
                places = []
                for segment, start, end in self._parts(run.position, run.byte_count):
                    if segment.first_position not in descriptors:
                        descriptors[segment.first_position] = os.dup(self._open(segment))
                    fd = descriptors[segment.first_position]
                    places.append((fd, segment.file_offset(start), end - start))
                parts.append((run, places))
        return lambda: _fetch_runs(parts, descriptors.values())

    def check(self, run: Run, data: bytearray) -> None:
        """Check the frames of a run that was read. Raises DataLoss naming the file and the position."""
        code = _call_check(
            self._state.ctypes.data,
            address_of(data),
            run.byte_count,
            run.position,
            run.partition_id,
        )
        if code < 0:
            position = int(self._state[STATE_POSITION])
            segment = self._chain[self._chain.index_of(position)]
            raise DataLoss(
                f"{segment.path} is damaged at position {position}: {describe_scan(code)}; "
                "run `danube-fast wal verify`"
            )


def _fetch(parts: list[tuple[int, int, int]]) -> None:
    """Read ranges, each of a descriptor that is closed then: what cannot be read is told to the one that has to
    have it."""
    for fd, place, byte_count in parts:
        with contextlib.suppress(OSError):
            for at in range(place, place + byte_count, _FETCH_BYTES):
                os.preadv(fd, [bytearray(min(_FETCH_BYTES, place + byte_count - at))], at)
        os.close(fd)


def _fetch_runs(
    runs: list[tuple[Run, list[tuple[int, int, int]]]], descriptors: Iterable[int]
) -> dict[int, bytearray]:
    """Read runs whole, and close the descriptors; runs that cannot be read are left out."""
    found = {}
    for run, parts in runs:
        data, done = bytearray(run.byte_count), 0
        with contextlib.suppress(OSError):
            for fd, place, byte_count in parts:
                done += os.preadv(fd, [memoryview(data)[done : done + byte_count]], place)
        if done == run.byte_count:
            found[run.position] = data
    for fd in descriptors:
        os.close(fd)
    return found
