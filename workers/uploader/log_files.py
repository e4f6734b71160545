"""Frames on their way from a log's files into an object. Runs in a thread."""

from __future__ import annotations

import os
from collections.abc import Sequence

from danube_fast.broker.messages import FileRange
from danube_fast.descriptors import open_file
from danube_fast.errors import Unavailable
from danube_fast.frame.layout import HEADER_BYTES
from danube_fast.frame.view import PLACE_FIELDS
from danube_fast.history.objects import ObjectWriter, OutgoingPart

__all__ = ["add_ranges"]


def add_ranges(
    writer: ObjectWriter, ranges: Sequence[FileRange], offset: int
) -> list[OutgoingPart]:
    """Read ranges of a log's files into an object, without frames that end before `offset`; the parts that are
    complete with them.

    Raises Unavailable if something else stands there: a file that was given back is used again. Raises DataLoss if
    the frames are damaged.
    """
    parts: list[OutgoingPart] = []
    for found in ranges:
        where = f"{found.path}, {found.position} bytes on"
        space = writer.space(found.byte_count)
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
        skipped = _bytes_before(space, offset)
        if skipped:
            space[:-skipped] = bytes(space[skipped:])
        if skipped < found.byte_count:
            parts += writer.add(found.byte_count - skipped, where)
        if skipped < found.byte_count and writer.end_offset != found.end_offset:
            raise Unavailable(f"{where}: other messages stand there")
    return parts


def _bytes_before(frames: memoryview, offset: int) -> int:
    """Bytes of the first frames, which end before an offset: frames that were written again may stand beside others
    than before."""
    at = 0
    while at + HEADER_BYTES <= len(frames):
        _, size, _, _, base, span = PLACE_FIELDS.unpack_from(frames, at)
        if base + span > offset or size < HEADER_BYTES:
            break
        at += size
    return min(at, len(frames))


def _read(fd: int, space: memoryview, position: int) -> int:
    done = 0
    while done < len(space):
        got = os.preadv(fd, [space[done:]], position + done)
        if not got:
            break
        done += got
    return done
