"""The kernel that checks frames on their way into an object, or out of one, and notes their blocks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from danube_fast.errors import DataLoss
from danube_fast.frame.check import Code, body_crc, check_header_crc
from danube_fast.frame.crc import crc32c_extend
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.layout import FRAME_ALIGNMENT, FRAME_MAGIC, FRAME_VERSION, HEADER_BYTES, At
from danube_fast.frame.memory import (
    load_i64,
    load_u8,
    load_u32,
    load_word,
    store_u32,
    store_u64,
    store_word,
)
from danube_fast.history.layout import BLOCK_BYTES, BLOCK_DTYPE, Blocks

__all__ = ["BlockTable", "HistoryFault"]


class HistoryFault(Code):
    """Why bytes are not frames of a partition in the order of their offsets."""

    TRUNCATED = -1, "the bytes end inside a frame"
    MAGIC = -2, "there is no frame"
    HEADER_CRC = -3, "the crc of the frame's header is wrong"
    VERSION = -4, "the frame's format version is newer than this program"
    LENGTH = -5, "the frame's length is impossible"
    PARTITION = -6, "the frame is of another partition"
    ORDER = -7, "the frame's offsets do not follow those before"
    BODY_CRC = -8, "the crc of the frame's body is wrong"


class BlockWord(enum.IntEnum):
    """Words of the state array."""

    PARTITION_ID = 0
    POSITION = 1  # in and out: where the next frame stands in the object
    NEXT_OFFSET = 2  # in and out: no frame may begin before it
    ROW_COUNT = 3  # in and out
    IS_OPEN = 4  # in and out: whether the last row takes more frames
    CONSUMED = 5  # out: bytes of whole frames that were taken


class BlockField(enum.IntEnum):
    """Where the fields of a row stand, bytes."""

    BASE_OFFSET = 0
    END_OFFSET = 8
    POSITION = 16
    APPEND_MIN_NS = 24
    APPEND_MAX_NS = 32
    PUBLISH_MIN_NS = 40
    PUBLISH_MAX_NS = 48
    PARTITION_ID = 56
    BYTE_COUNT = 60
    MESSAGE_COUNT = 64
    FRAME_COUNT = 68
    CRC = 72


ROW_BYTES = BLOCK_DTYPE.itemsize
_ROWS_MIN = 64


@kernel("int64(int64,int64,int64)")
def _check_frame(state: int, address: int, available: int) -> int:
    """frame_bytes if a sound frame is here that follows the ones before, else a fault."""
    if available < HEADER_BYTES:
        return HistoryFault.TRUNCATED
    if load_u32(address + At.MAGIC) != FRAME_MAGIC:
        return HistoryFault.MAGIC
    if check_header_crc(address) == 0:
        return HistoryFault.HEADER_CRC
    if load_u8(address + At.VERSION) != FRAME_VERSION:
        return HistoryFault.VERSION
    frame_bytes = load_u32(address + At.FRAME_BYTES)
    if frame_bytes < HEADER_BYTES or frame_bytes & (FRAME_ALIGNMENT - 1) != 0:
        return HistoryFault.LENGTH
    if frame_bytes > available:
        return HistoryFault.TRUNCATED
    if load_u32(address + At.PARTITION_ID) != load_word(state, BlockWord.PARTITION_ID):
        return HistoryFault.PARTITION
    if load_i64(address + At.BASE_OFFSET) < load_word(state, BlockWord.NEXT_OFFSET):
        return HistoryFault.ORDER
    if load_u32(address + At.OFFSET_SPAN) == 0:
        return HistoryFault.ORDER
    if body_crc(address, frame_bytes) != load_u32(address + At.BODY_CRC32C):
        return HistoryFault.BODY_CRC
    return frame_bytes


@kernel("void(int64,int64,int64)")
def _begin_row(row: int, frame: int, position: int) -> None:
    """Begin a row with the frame at the address `frame`."""
    append_ns = load_i64(frame + At.APPEND_TIME_NS)
    publish_ns = load_i64(frame + At.PUBLISH_TIME_NS)
    store_u64(row + BlockField.BASE_OFFSET, load_i64(frame + At.BASE_OFFSET))
    store_u64(row + BlockField.POSITION, position)
    store_u64(row + BlockField.APPEND_MIN_NS, append_ns)
    store_u64(row + BlockField.APPEND_MAX_NS, append_ns)
    store_u64(row + BlockField.PUBLISH_MIN_NS, publish_ns)
    store_u64(row + BlockField.PUBLISH_MAX_NS, publish_ns)
    store_u32(row + BlockField.PARTITION_ID, load_u32(frame + At.PARTITION_ID))
    store_u32(row + BlockField.BYTE_COUNT, 0)
    store_u32(row + BlockField.MESSAGE_COUNT, 0)
    store_u32(row + BlockField.FRAME_COUNT, 0)
    store_u64(row + BlockField.CRC, 0)


@kernel("void(int64,int64,int64)")
def _widen(low: int, high: int, value: int) -> None:
    """Let the range [*low, *high] hold `value`."""
    if value < load_i64(low):
        store_u64(low, value)
    if value > load_i64(high):
        store_u64(high, value)


@kernel("void(int64,int64,int64)")
def _extend_row(row: int, frame: int, frame_bytes: int) -> None:
    """Add a frame to a row."""
    end = load_i64(frame + At.BASE_OFFSET) + load_u32(frame + At.OFFSET_SPAN)
    store_u64(row + BlockField.END_OFFSET, end)
    _widen(
        row + BlockField.APPEND_MIN_NS,
        row + BlockField.APPEND_MAX_NS,
        load_i64(frame + At.APPEND_TIME_NS),
    )
    _widen(
        row + BlockField.PUBLISH_MIN_NS,
        row + BlockField.PUBLISH_MAX_NS,
        load_i64(frame + At.PUBLISH_TIME_NS),
    )
    store_u32(row + BlockField.BYTE_COUNT, load_u32(row + BlockField.BYTE_COUNT) + frame_bytes)
    messages = load_u32(row + BlockField.MESSAGE_COUNT) + load_u32(frame + At.MESSAGE_COUNT)
    store_u32(row + BlockField.MESSAGE_COUNT, messages)
    store_u32(row + BlockField.FRAME_COUNT, load_u32(row + BlockField.FRAME_COUNT) + 1)
    crc = crc32c_extend(load_u32(row + BlockField.CRC), frame, frame_bytes)
    store_u32(row + BlockField.CRC, crc)


@kernel("int64(int64,int64,int64,int64,int64)", nogil=True)
def add_frames(state: int, address: int, byte_count: int, rows: int, rows_max: int) -> int:
    """Enter the frames of `byte_count` bytes into a table of blocks. 0: all; 1: `rows` is full; else a fault.

    `state` is the address of the words of BlockWord. CONSUMED says how far it came.
    """
    at, code = 0, 0
    count = load_word(state, BlockWord.ROW_COUNT)
    is_open = load_word(state, BlockWord.IS_OPEN)
    position = load_word(state, BlockWord.POSITION)
    while at < byte_count:
        frame = address + at
        if is_open == 0 and count == rows_max:
            code = 1
            break
        frame_bytes = _check_frame(state, frame, byte_count - at)
        if frame_bytes < 0:
            code = frame_bytes
            break
        if is_open == 0:
            _begin_row(rows + ROW_BYTES * count, frame, position)
            count += 1
        row = rows + ROW_BYTES * (count - 1)
        _extend_row(row, frame, frame_bytes)
        is_open = 1 if load_u32(row + BlockField.BYTE_COUNT) < BLOCK_BYTES else 0
        store_word(state, BlockWord.NEXT_OFFSET, load_i64(row + BlockField.END_OFFSET))
        at += frame_bytes
        position += frame_bytes
    store_word(state, BlockWord.ROW_COUNT, count)
    store_word(state, BlockWord.IS_OPEN, is_open)
    store_word(state, BlockWord.POSITION, position)
    store_word(state, BlockWord.CONSUMED, at)
    return code


_add_frames = direct(add_frames)


class BlockTable:
    """The blocks of an object that is being written or checked."""

    def __init__(self, position: int) -> None:
        """`position`: where the next frame will stand in the object."""
        self._state = np.zeros(len(BlockWord), dtype=np.int64)
        self._state[BlockWord.POSITION] = position
        self._rows = np.zeros(_ROWS_MIN, dtype=BLOCK_DTYPE)

    @classmethod
    def behind(cls, rows: Blocks, position: int) -> BlockTable:
        """Go on behind rows that were made before: the next frame begins a block, at `position`."""
        table = cls(position)
        table._rows = np.concatenate([rows, table._rows])
        table._state[BlockWord.ROW_COUNT] = len(rows)
        return table

    @property
    def position(self) -> int:
        """Where the next frame will stand in the object, bytes."""
        return int(self._state[BlockWord.POSITION])

    @property
    def rows(self) -> Blocks:
        """The rows; they change with the next frames."""
        return self._rows[: int(self._state[BlockWord.ROW_COUNT])]

    def begin(self, partition_id: int, next_offset: int = 0) -> int:
        """Begin the frames of a partition, none before `next_offset`; how many rows stand before."""
        self._state[BlockWord.PARTITION_ID] = partition_id
        self._state[BlockWord.NEXT_OFFSET] = next_offset
        self._state[BlockWord.IS_OPEN] = 0
        return len(self.rows)

    def add(self, frames: Any, where: str) -> None:
        """Check whole frames and note them.

        Raises DataLoss that names the position in `where`, and notes none of them.
        """
        view = memoryview(frames).cast("B")
        base, at = address_of(view) if len(view) else 0, 0
        before, last = self._state.copy(), self.rows[-1:].copy()
        while at < len(view):
            code = _add_frames(
                self._state.ctypes.data,
                base + at,
                len(view) - at,
                self._rows.ctypes.data,
                len(self._rows),
            )
            at += int(self._state[BlockWord.CONSUMED])
            if code < 0:
                self._state[:] = before
                self.rows[-1:] = last
                raise DataLoss(f"{where}, {at} bytes on: {HistoryFault(code).text}")
            if code:
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])


def _prove() -> None:
    fields: Mapping[str, Any] = BLOCK_DTYPE.fields or {}
    for field in BlockField:
        if fields[field.name.lower()][1] != field:
            raise ImportError(f"a row of blocks has its {field.name} elsewhere")


_prove()
