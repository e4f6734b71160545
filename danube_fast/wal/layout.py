"""The files of one log, byte for byte, and who writes them.

    <data>/logs/<i>/
      lock                          flock of the one process that has the log open; holds its pid
      00000000000000000000.seg      segments: position 0 and on        written by the worker's loop
      00000000000004190208.seg      the next one starts where the previous one ended
      spare-3.seg                   ready for use, made in the background or recycled
      reserve.seg                   small; for control records when the disk is full
      00000000000004190208.snap     the state that all frames below its position add up to
      00000000000004190208.trim     segments below this position were given up (trims.py)
      losses.jsonl                  what an operator accepted to lose, one line each
      index/                        LMDB: only a cache

    segment   0      8      12     16       24         32         40        48       56   60   64
              +------+------+------+--------+----------+----------+---------+--------+----+----+
              | magic| vers | epoch| log_id | first    | previous | segment | created|    | crc|
              |      |      |      |        | _position| _position| _bytes  | _ns    |    |    |
              +------+------+------+--------+----------+----------+---------+--------+----+----+
              zeros up to 4096, then frames: position p is at file offset 4096 + p - first_position

A segment ends where the next one begins, whatever its file still holds behind that. Groups of
frames start at multiples of 4096 and are closed by a PAD frame, so the log has no holes.

Both headers are as `frame/file_header.py` draws them.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from danube_fast.frame.file_header import FILE_HEADER_BYTES, open_header, seal_header
from danube_fast.frame.layout import HEADER_BYTES

__all__ = [
    "GROUP_ALIGNMENT",
    "REPLAY_DTYPE",
    "RUN_DTYPE",
    "SEGMENT_HEADER_BYTES",
    "SegmentHeader",
    "SnapshotHeader",
    "group_bytes",
    "pad_bytes",
]

FORMAT_VERSION = 1
SEGMENT_HEADER_BYTES = 4096
GROUP_ALIGNMENT = 4096
SEGMENT_MAGIC = int.from_bytes(b"DanubeSg", "little")
SNAPSHOT_MAGIC = int.from_bytes(b"DanubeSn", "little")
RESERVE_SEGMENT_BYTES = 1024 * 1024
"""Size of the segment that is kept for control records when the disk is full."""

LOCK_NAME = "lock"
LOSSES_NAME = "losses.jsonl"
INDEX_NAME = "index"
RESERVE_NAME = "reserve.seg"
SEGMENT_SUFFIX = ".seg"
SNAPSHOT_SUFFIX = ".snap"
TRIM_SUFFIX = ".trim"
SPARE_PREFIX = "spare-"
TEMPORARY_SUFFIX = ".tmp"
NAME_DIGITS = 20

_SEGMENT = struct.Struct("<QIIQQQQqII")
_SNAPSHOT = struct.Struct("<QIIQQQqIIII")

RUN_DTYPE = np.dtype(
    [
        ("base_offset", "<u8"),
        ("position", "<u8"),
        ("append_time_ns", "<i8"),
        ("partition_id", "<u4"),
        ("offset_span", "<u4"),
        ("byte_count", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""One contiguous run of frames of one partition inside one group."""

REPLAY_DTYPE = np.dtype(
    [
        ("position", "<u8"),
        ("base_offset", "<u8"),
        ("producer_id", "<u8"),
        ("base_sequence", "<u8"),
        ("append_time_ns", "<i8"),
        ("partition_id", "<u4"),
        ("offset_span", "<u4"),
        ("message_count", "<u4"),
        ("frame_bytes", "<u4"),
        ("producer_epoch", "<u4"),
        ("epoch", "<u4"),
        ("flags", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""One valid frame as recovery found it, in the order of the log. PAD frames are left out."""


def _at(dtype: np.dtype[Any], field: str) -> int:
    fields = dtype.fields
    if fields is None or field not in fields:
        raise ImportError(f"log layout has no field {field!r}")
    return int(fields[field][1])


# Offsets for kernels.
ROW_BYTES = REPLAY_DTYPE.itemsize
ROW_POSITION = _at(REPLAY_DTYPE, "position")
ROW_BASE_OFFSET = _at(REPLAY_DTYPE, "base_offset")
ROW_PRODUCER_ID = _at(REPLAY_DTYPE, "producer_id")
ROW_BASE_SEQUENCE = _at(REPLAY_DTYPE, "base_sequence")
ROW_APPEND_TIME_NS = _at(REPLAY_DTYPE, "append_time_ns")
ROW_PARTITION_ID = _at(REPLAY_DTYPE, "partition_id")
ROW_OFFSET_SPAN = _at(REPLAY_DTYPE, "offset_span")
ROW_MESSAGE_COUNT = _at(REPLAY_DTYPE, "message_count")
ROW_FRAME_BYTES = _at(REPLAY_DTYPE, "frame_bytes")
ROW_PRODUCER_EPOCH = _at(REPLAY_DTYPE, "producer_epoch")
ROW_EPOCH = _at(REPLAY_DTYPE, "epoch")
ROW_FLAGS = _at(REPLAY_DTYPE, "flags")


def pad_bytes(byte_count: int) -> int:
    """Length of the PAD frame that closes a group of `byte_count` bytes; 0 if it needs none.

    An empty group is one PAD frame of 4096 bytes: a marker.
    """
    gap = -byte_count % GROUP_ALIGNMENT
    if byte_count and not gap:
        return 0
    return gap if gap >= HEADER_BYTES else gap + GROUP_ALIGNMENT


def group_bytes(byte_count: int) -> int:
    """Bytes of the log that a group of `byte_count` bytes of frames takes with its PAD frame."""
    return byte_count + pad_bytes(byte_count)


def position_name(position: int, suffix: str) -> str:
    """File name of a segment or snapshot that starts at `position`."""
    return f"{position:0{NAME_DIGITS}d}{suffix}"


def position_from_name(name: str, suffix: str) -> int | None:
    """The position in the name of a segment or snapshot; None if it is not such a name."""
    digits = name.removesuffix(suffix)
    if digits == name or len(digits) != NAME_DIGITS or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits)


class SegmentHeader(NamedTuple):
    """The first 64 bytes of a segment. `previous_position` is its own position in the first one."""

    log_id: int
    first_position: int
    previous_position: int
    segment_bytes: int
    created_ns: int
    epoch: int

    def encode(self) -> bytes:
        """The 4096 bytes that open the file."""
        head = _SEGMENT.pack(
            SEGMENT_MAGIC,
            FORMAT_VERSION,
            self.epoch,
            self.log_id,
            self.first_position,
            self.previous_position,
            self.segment_bytes,
            self.created_ns,
            0,
            0,
        )
        return seal_header(head).ljust(SEGMENT_HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes, path: str) -> SegmentHeader:
        """Read a header. Raises FailedPrecondition for a newer format, DataLoss if it is damaged."""
        fields = _SEGMENT.unpack(_open(data, SEGMENT_MAGIC, f"segment {path}"))
        _, _, epoch, log_id, first, previous, segment_bytes, created_ns, _, _ = fields
        return cls(log_id, first, previous, segment_bytes, created_ns, epoch)


class SnapshotHeader(NamedTuple):
    """The first 64 bytes of a snapshot; the state follows at once."""

    log_id: int
    position: int
    state_bytes: int
    created_ns: int
    epoch: int
    clean: bool
    state_crc: int

    def encode(self) -> bytes:
        """The 64 bytes that open the file."""
        return seal_header(
            _SNAPSHOT.pack(
                SNAPSHOT_MAGIC,
                FORMAT_VERSION,
                self.epoch,
                self.log_id,
                self.position,
                self.state_bytes,
                self.created_ns,
                int(self.clean),
                self.state_crc,
                0,
                0,
            )
        )

    @classmethod
    def decode(cls, data: bytes, path: str) -> SnapshotHeader:
        """Read a header. Raises FailedPrecondition for a newer format, DataLoss if it is damaged."""
        fields = _SNAPSHOT.unpack(_open(data, SNAPSHOT_MAGIC, f"snapshot {path}"))
        _, _, epoch, log_id, position, state_bytes, created_ns, clean, state_crc, _, _ = fields
        return cls(log_id, position, state_bytes, created_ns, epoch, bool(clean), state_crc)


def _open(data: bytes, magic: int, what: str) -> bytes:
    return open_header(data, magic, FORMAT_VERSION, what, "run `danube-fast wal verify`")


def _prove() -> None:
    for name, size in (("segment", _SEGMENT.size), ("snapshot", _SNAPSHOT.size)):
        if size != FILE_HEADER_BYTES:
            raise ImportError(f"{name} header is {size} bytes, not {FILE_HEADER_BYTES}")
    if RUN_DTYPE.itemsize != 40 or REPLAY_DTYPE.itemsize != 72:
        raise ImportError("rows of runs and replays are not 40 and 72 bytes")
    if GROUP_ALIGNMENT < 2 * HEADER_BYTES or SEGMENT_HEADER_BYTES % GROUP_ALIGNMENT:
        raise ImportError("groups are smaller than two frame headers or headers shift them")


_prove()
