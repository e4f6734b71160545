"""Reading a log from front to back, strictly: the driver around the scan kernel.

One `Walk` serves recovery (every byte checked), the index (headers only) and `wal verify`. It reads
with pread into memory of its own, never through a mapping: a bad sector must be an error that can
be named, not a SIGBUS.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from danube_fast.frame.kernel import address_of, direct
from danube_fast.wal.layout import GROUP_ALIGNMENT, REPLAY_DTYPE, RUN_DTYPE
from danube_fast.wal.scan import (
    EVIDENCE_EPOCH,
    EVIDENCE_FIRST,
    EVIDENCE_SYNCED,
    EVIDENCE_WORDS,
    STATE_CHECK_BODIES,
    STATE_END,
    STATE_EPOCH,
    STATE_LOG_ID,
    STATE_NEEDED,
    STATE_POSITION,
    STATE_ROWS,
    STATE_ROWS_MAX,
    STATE_SYNCED,
    STATE_WORDS,
    ScanCode,
    find_evidence,
    find_next,
    scan_frames,
)
from danube_fast.wal.segment import Chain, Segment
from danube_fast.wal.writer import signed

__all__ = [
    "Evidence",
    "ReplayBlock",
    "Walk",
    "collect_evidence",
    "next_group",
    "read_at",
    "rows_to_runs",
]

_CHUNK_BYTES = 4 * 1024 * 1024
_SEARCH_BYTES = 1024 * 1024  # a multiple of GROUP_ALIGNMENT
_ROWS_MAX = 16_384

_call_scan = direct(scan_frames)
_call_evidence = direct(find_evidence)
_call_next = direct(find_next)


class ReplayBlock(NamedTuple):
    """Valid frames in the order of the log.

    `rows` are REPLAY_DTYPE; the frame of a row starts in `view` at position - base_position. Both
    belong to the block and stay valid as long as it is kept.
    """

    rows: np.ndarray[Any, Any]
    view: memoryview
    base_position: int


class Walk:
    """Walks a chain from a position to the first byte that is not a frame of this log.

    After `blocks()` is exhausted: `position` is where it stopped, `code` why, `segment` in which
    file, `epoch` and `synced` what the frames before it said at most.
    """

    def __init__(
        self, chain: Chain, log_id: int, position: int, epoch: int, *, check_bodies: bool = True
    ) -> None:
        self.chain = chain
        self.position = position
        self.code = ScanCode.END
        self.segment: Segment | None = None
        self._state = np.zeros(STATE_WORDS, dtype=np.int64)
        self._state[STATE_LOG_ID] = signed(log_id)
        self._state[STATE_EPOCH] = epoch
        self._state[STATE_CHECK_BODIES] = int(check_bodies)
        self._state[STATE_ROWS_MAX] = _ROWS_MAX

    @property
    def epoch(self) -> int:
        """Epoch of the last frame that was taken."""
        return int(self._state[STATE_EPOCH])

    @property
    def synced(self) -> int:
        """Largest synced_position of the frames that were taken."""
        return int(self._state[STATE_SYNCED])

    @property
    def met_short_file(self) -> bool:
        """Whether it stopped where a file ends that was larger once."""
        segment = self.segment
        return self.code == ScanCode.TRUNCATED and segment is not None and segment.is_short

    def blocks(self, stop: int | None = None) -> Iterator[ReplayBlock]:
        """Every block up to the first fault, the end of the chain, or position `stop`."""
        index = max(self.chain.index_of(self.position), 0)
        while index < len(self.chain) and self.code == ScanCode.END:
            self.segment = self.chain[index]
            if self.segment.first_position > self.position or self.segment.is_foreign:
                self.code = ScanCode.MISSING
                return
            end = self.chain.end_of(index)
            if end > self.segment.end_position:
                end = self.segment.end_position  # what lies between is missing
            self._state[STATE_END] = end if stop is None else min(end, stop)
            yield from self._segment_blocks(self.segment)
            if stop is not None and self.position >= stop:
                return
            index += 1

    def _segment_blocks(self, segment: Segment) -> Iterator[ReplayBlock]:
        wanted = _CHUNK_BYTES
        while self.position < self._state[STATE_END]:
            start = self.position
            wanted = min(wanted, int(self._state[STATE_END]) - start)
            view = read_at(segment, start, wanted)
            rows = np.empty(_ROWS_MAX, dtype=REPLAY_DTYPE)
            self._state[STATE_POSITION] = start
            code = _call_scan(
                self._state.ctypes.data,
                address_of(view) if view else 0,
                len(view),
                rows.ctypes.data,
            )
            self.position = int(self._state[STATE_POSITION])
            count = int(self._state[STATE_ROWS])
            if count:
                yield ReplayBlock(rows[:count].copy(), memoryview(view), start)
            if code < 0:
                self.code = ScanCode(code)
                return
            if code == ScanCode.MORE and self.position == start and len(view) < wanted:
                self.code = ScanCode.TRUNCATED
                return
            wanted = max(_CHUNK_BYTES, int(self._state[STATE_NEEDED]))


def read_at(segment: Segment, position: int, byte_count: int) -> bytearray:
    """Up to `byte_count` bytes from `position` on, fewer at the end of the file. Raises OSError."""
    buffer = bytearray(byte_count)
    view = memoryview(buffer)
    fd = segment.open()
    done = 0
    while done < byte_count:
        got = os.preadv(fd, [view[done:]], segment.file_offset(position) + done)
        if got == 0:
            break
        done += got
    if done < byte_count:
        view.release()
        del buffer[done:]
    return buffer


class Evidence(NamedTuple):
    """The word of valid headers of this log behind the place where a walk stopped."""

    synced: int
    epoch: int
    first_position: int | None


def collect_evidence(chain: Chain, log_id: int, position: int) -> Evidence:
    """Look at every 4096th byte behind `position`, to the end of the newest segment."""
    words = np.zeros(EVIDENCE_WORDS, dtype=np.int64)
    words[EVIDENCE_FIRST] = -1
    for at, data in _remaining(chain, position):
        _call_evidence(words.ctypes.data, address_of(data), len(data), at, signed(log_id))
    first = int(words[EVIDENCE_FIRST])
    return Evidence(
        int(words[EVIDENCE_SYNCED]),
        int(words[EVIDENCE_EPOCH]),
        first if first >= 0 else None,
    )


def _remaining(chain: Chain, position: int) -> Iterator[tuple[int, memoryview]]:
    """(position, bytes) of all that stands at or behind `position`, from a group's start on.

    The bytes are valid until the next step. Ranges of a file that were never written are skipped.
    """
    buffer = memoryview(bytearray(_SEARCH_BYTES))
    for index in range(max(chain.index_of(position), 0), len(chain)):
        segment = chain[index]
        fd = segment.open()
        at = max(position + -position % GROUP_ALIGNMENT, segment.first_position)
        while at < segment.end_position:
            try:
                data_offset = os.lseek(fd, segment.file_offset(at), os.SEEK_DATA)
            except OSError as fault:
                if fault.errno == errno.ENXIO:  # no data behind here
                    break
                raise
            at += (data_offset - segment.file_offset(at)) & -GROUP_ALIGNMENT
            room = min(_SEARCH_BYTES, segment.end_position - at)
            got = os.preadv(fd, [buffer[:room]], segment.file_offset(at))
            if got == 0:
                break
            yield at, buffer[:got]
            at += _SEARCH_BYTES


def next_group(chain: Chain, log_id: int, position: int, epoch: int) -> int | None:
    """Position of the first group behind `position` that opens with a header not older than `epoch`."""
    for at, data in _remaining(chain, position + 1):
        found = _call_next(address_of(data), len(data), at, signed(log_id), epoch)
        if found >= 0:
            return at + int(found)
    return None


def rows_to_runs(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """RUN_DTYPE rows, one for each frame, as a writer has them. A frame that was written to this log
    twice, since its partition left and came back, is found where it was written last."""
    runs = np.zeros(len(rows), dtype=RUN_DTYPE)
    for field in ("base_offset", "position", "append_time_ns", "partition_id", "offset_span"):
        runs[field] = rows[field]
    runs["byte_count"] = rows["frame_bytes"]
    return runs
