"""Bundles: frames of many partitions in one ZeroMQ part or one ring record.

    0       u32 magic | u32 frame_count
    8       frame_count x ( u32 partition_id | u32 frame_bytes )
    ...     frames back to back, each a multiple of 8 bytes

The directory tells whose frame it is and where it ends, so that one kernel can walk a bundle. It is
the sender's word: a reader of a bundle also compares each entry with what `check_frame` says.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from danube_fast.errors import DataLoss, InvalidArgument
from danube_fast.frame.check import Fault, describe_fault
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.layout import (
    AT_BUNDLE_ENTRY_FRAME_BYTES,
    AT_BUNDLE_FRAME_COUNT,
    BUNDLE_ENTRY_BYTES,
    BUNDLE_HEADER_BYTES,
    BUNDLE_MAGIC,
    FRAME_ALIGNMENT,
    HEADER_BYTES,
)
from danube_fast.frame.memory import load_u32
from danube_fast.frame.split import Cut

__all__ = ["bundle_bytes", "bundle_entries", "read_bundle", "sealed_bundle"]
__all__ += ["write_bundle"]

_MAGIC = int(Fault.BUNDLE_MAGIC)
_FRAME_COUNT = int(Fault.BUNDLE_FRAME_COUNT)
_FRAME_BYTES = int(Fault.BUNDLE_FRAME_BYTES)
_SUM = int(Fault.BUNDLE_SUM)
_HEADER = struct.Struct("<II")
_ENTRY = struct.Struct("<II")


@kernel("int64(int64,int64)")
def read_bundle(address: int, byte_count: int) -> int:
    """Check the directory of a bundle of `byte_count` bytes: frame_count (at least 1) or a fault.

    Afterwards frame i lies right behind frame i - 1, the first one behind the directory, and all of
    them inside the bundle. The frames themselves are not looked at.
    """
    if byte_count < BUNDLE_HEADER_BYTES or load_u32(address) != BUNDLE_MAGIC:
        return _MAGIC
    frame_count = load_u32(address + AT_BUNDLE_FRAME_COUNT)
    left = byte_count - BUNDLE_HEADER_BYTES - BUNDLE_ENTRY_BYTES * frame_count
    if frame_count == 0 or left < HEADER_BYTES * frame_count:
        return _FRAME_COUNT
    entry = address + BUNDLE_HEADER_BYTES
    for _ in range(frame_count):
        frame_bytes = load_u32(entry + AT_BUNDLE_ENTRY_FRAME_BYTES)
        if frame_bytes < HEADER_BYTES or frame_bytes & (FRAME_ALIGNMENT - 1) != 0:
            return _FRAME_BYTES
        left -= frame_bytes
        entry += BUNDLE_ENTRY_BYTES
    return frame_count if left == 0 else _SUM


_read_bundle = direct(read_bundle)


def bundle_entries(buffer: Any) -> list[tuple[int, int, int]]:
    """(partition_id, offset of the frame in the bundle, frame_bytes) of every frame.

    Raises DataLoss if the directory is unsound.
    """
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1:
        view = np.frombuffer(buffer, dtype=np.uint8).data
    frame_count = _read_bundle(address_of(view), view.nbytes) if view.nbytes else _MAGIC
    if frame_count < 0:
        raise DataLoss(f"not a bundle ({describe_fault(frame_count)}); ask for the data again")
    place = BUNDLE_HEADER_BYTES + BUNDLE_ENTRY_BYTES * frame_count
    entries = []
    directory = view[BUNDLE_HEADER_BYTES:place]
    for partition_id, frame_bytes in _ENTRY.iter_unpack(directory):
        entries.append((partition_id, place, frame_bytes))
        place += frame_bytes
    return entries


def bundle_bytes(frame_bytes: Sequence[int]) -> int:
    """Size of a bundle of frames of these sizes."""
    return BUNDLE_HEADER_BYTES + BUNDLE_ENTRY_BYTES * len(frame_bytes) + sum(frame_bytes)


def sealed_bundle(frames: Sequence[tuple[int, Any]]) -> bytes:
    """One bundle of (partition_id, frame) pairs; the frames are copied.

    Raises InvalidArgument if there is none, or if a size is not that of a frame.
    """
    return b"".join([*_directory(frames), *(frame for _, frame in frames)])


def write_bundle(address: int, frames: Sequence[tuple[int, Any]]) -> None:
    """Write a bundle of frames and `Cut`s to where
    `bundle_bytes` of memory are. Raises InvalidArgument."""
    directory = b"".join(_directory(frames))
    ctypes.memmove(address, directory, len(directory))
    address += len(directory)
    for _, frame in frames:
        if isinstance(frame, Cut):
            frame.write(address)
        else:
            ctypes.memmove(address, address_of(frame), len(frame))
        address += len(frame)


def _directory(frames: Sequence[tuple[int, Any]]) -> list[bytes]:
    if not frames:
        raise InvalidArgument("a bundle needs at least one frame")
    directory = [_HEADER.pack(BUNDLE_MAGIC, len(frames))]
    for index, (partition_id, frame) in enumerate(frames):
        size = len(frame) if isinstance(frame, Cut) else memoryview(frame).nbytes
        if size < HEADER_BYTES or size % FRAME_ALIGNMENT:
            raise InvalidArgument(
                f"item {index} of the bundle is {size} bytes; a frame is a multiple of "
                f"{FRAME_ALIGNMENT} of at least {HEADER_BYTES}"
            )
        directory.append(_ENTRY.pack(partition_id, size))
    return directory
