"""Frames of a partition's log, asked of its owner and read from the log's files: to compare them with history."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, DataLoss
from danube_fast.frame.layout import HEADER_BYTES
from danube_fast.frame.view import FrameView
from danube_fast.history.blocks import BlockTable
from danube_fast.history.manifest import LOST_PREFIX, Section
from danube_fast.history.objects import section_of
from danube_fast.workers.process.tasks import Ask, Do, Task
from danube_fast.workers.uploader.log_files import frames_below, read_frames
from danube_fast.workers.uploader.state import UploaderState

__all__ = ["Piece", "Unknown", "first_frame", "is_in_log", "is_last_frame", "read_piece"]

READ_BYTES = 4 << 20
"""Read from a log at a time."""


class Unknown(Exception):
    """Raised if a log cannot be looked at just now: it moves, its worker is away, its frames are not synced yet."""


class Piece(NamedTuple):
    """Frames of a log."""

    frames: bytes
    end_offset: int
    """There are no others below."""


def first_frame(
    state: UploaderState, worker: int, partition_id: int, offset: int, end: int
) -> Task:
    """Give the header of the first frame that ends behind `offset`; None if there is none before `end`. Raises
    Unknown."""
    runs: m.Runs = yield from _runs(state, worker, partition_id, offset, 1)
    if not runs.ranges:
        if runs.end_offset < end:
            raise Unknown(f"partition {partition_id} is not synced up to offset {end}")
        return None
    data: bytes = yield from _read(partial(read_frames, runs.ranges, offset, HEADER_BYTES))
    if len(data) < HEADER_BYTES or FrameView(data).partition_id != partition_id:
        raise Unknown(f"a file of the log of partition {partition_id} was given back")
    frame = FrameView(data)
    return frame if frame.base_offset < end else None


def is_last_frame(
    state: UploaderState, worker: int, partition_id: int, end: int, append_time_ns: int
) -> Task:
    """Whether a frame that came at this time ends at `end`. Raises Unknown."""
    frame: FrameView | None = yield from first_frame(state, worker, partition_id, end - 1, end)
    if frame is None:
        return False
    found = frame.base_offset + frame.offset_span, frame.append_time_ns
    return found == (end, append_time_ns)


def is_in_log(state: UploaderState, worker: int, section: Section, partition_id: int) -> Task:
    """Whether a log has the frames of a section, as far as that says of them: offsets, sizes and times. One that a repair
    has told as lost says nothing. Raises Unknown."""
    if section.key.startswith(LOST_PREFIX):
        return True
    table = BlockTable(section.position)
    table.begin(partition_id, section.base_offset)
    at = section.base_offset
    while at < section.end_offset:
        piece: Piece = yield from read_piece(state, worker, partition_id, at, section.end_offset)
        try:
            table.add(piece.frames, "the log")
        except DataLoss:
            return False
        at = piece.end_offset
    if not len(table.rows):
        return False
    found = section_of(section.key, table.rows, 0, len(table.rows), section.blocks_position)
    # frames that have moved have the places of their new log in them, and other crcs
    return msgspec.structs.replace(found, blocks_crc=section.blocks_crc) == section


def read_piece(state: UploaderState, worker: int, partition_id: int, offset: int, end: int) -> Task:
    """Read frames from the first one on that ends behind `offset`, and none that ends behind `end`. Raises Unknown."""
    runs: m.Runs = yield from _runs(state, worker, partition_id, offset, READ_BYTES)
    if runs.end_offset <= offset:
        raise Unknown(f"partition {partition_id} is not synced from offset {offset} on")
    frames = yield from _read(partial(frames_below, runs.ranges, offset, end))
    return Piece(frames, min(runs.end_offset, end))


def _runs(
    state: UploaderState, worker: int, partition_id: int, offset: int, bytes_max: int
) -> Task:
    try:
        return (yield Ask(worker, m.HistoryRuns(state.epoch, partition_id, offset, bytes_max)))
    except DanubeError as error:  # it moves, or its worker is away
        raise Unknown(error) from None


def _read(read: Callable[[], bytes]) -> Task:
    try:
        return (yield Do(read))
    except DanubeError as error:  # a file was given back just now
        raise Unknown(error) from None
