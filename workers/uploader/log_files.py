"""Frames on their way from a log's files into an object. Runs in a thread."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from danube_fast.broker.messages import FileRange
from danube_fast.descriptors import open_file
from danube_fast.errors import Unavailable
from danube_fast.frame.layout import At
from danube_fast.history.objects import ObjectWriter, OutgoingPart

__all__ = ["add_ranges", "frames_below", "read_frames"]

_HEAD = struct.Struct(
    f"<{At.FRAME_BYTES}xI{At.BASE_OFFSET - At.FRAME_BYTES - 4}xQ{At.OFFSET_SPAN - At.BASE_OFFSET - 8}xI"
)  # frame_bytes, base_offset, offset_span


def add_ranges(
    writer: ObjectWriter, ranges: Sequence[FileRange], offset: int
) -> list[OutgoingPart]:
    """Read ranges of a log's files into an object, but no frame that ends at `offset` or before; the parts that are
    complete with them.

    Raises Unavailable if something else stands there: a file that was given back is used again. Raises DataLoss if
    the frames are damaged.
    """
    parts: list[OutgoingPart] = []
    for found in ranges:
        space = writer.space(found.byte_count)
        where = _read_range(space, found)
        skipped = _bytes_before(space, offset)
        if skipped:
            space[: len(space) - skipped] = bytes(space[skipped:])
        parts += writer.add(found.byte_count - skipped, where)
        if writer.end_offset != found.end_offset:
            raise Unavailable(f"{where}: other messages stand there")
    return parts


def read_frames(ranges: Sequence[FileRange], offset: int, byte_count: int) -> bytes:
    """Read `byte_count` bytes of frames, or as many as there are, from the first one on that ends behind `offset`.

    They are not checked. Raises Unavailable if a file was given back.
    """
    frames = bytearray()
    for found in ranges:
        if len(frames) >= byte_count:
            break
        space = memoryview(bytearray(found.byte_count))
        _read_range(space, found)
        frames += space[_bytes_before(space, offset) :]
    return bytes(frames[:byte_count])


def frames_below(ranges: Sequence[FileRange], offset: int, end: int) -> bytes:
    """Read the frames from the first one on that ends behind `offset`; none that ends behind `end`.

    They are not checked. Raises Unavailable if something else stands there: a file that was given back is used again.
    """
    frames = memoryview(read_frames(ranges, offset, sum(found.byte_count for found in ranges)))
    last = ranges[-1].end_offset if ranges else offset
    if not _bytes_before(frames, last - 1) < _bytes_before(frames, last) == len(frames) and ranges:
        raise Unavailable(f"{ranges[-1].path}: other messages stand there")
    return bytes(frames[: _bytes_before(frames, end)])


def _bytes_before(frames: memoryview, offset: int) -> int:
    """Count the bytes of the frames at the beginning that end at an offset or before: a run is read from its start."""
    at = 0
    while at + _HEAD.size <= len(frames):
        frame_bytes, base_offset, span = _HEAD.unpack_from(frames, at)
        if base_offset + span > offset or not frame_bytes:
            break
        at += frame_bytes
    return min(at, len(frames))


def _read_range(space: memoryview, found: FileRange) -> str:
    """Fill `space` with a range; how it is called in errors. Raises Unavailable if it is not there any more."""
    where = f"{found.path}, {found.position} bytes on"
    try:
        fd = open_file(found.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            got = _read(fd, space, found.position)
        finally:
            os.close(fd)
    except OSError as error:
        raise Unavailable(f"{where}: {error.strerror}") from None
    if got != found.byte_count:
        raise Unavailable(f"{where}: the file ends before")
    return where


def _read(fd: int, space: memoryview, position: int) -> int:
    done = 0
    while done < len(space):
        got = os.preadv(fd, [space[done:]], position + done)
        if not got:
            break
        done += got
    return done
