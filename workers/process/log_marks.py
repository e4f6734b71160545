"""How far each log is, as the metadata knows it: the file `logs` beside the metadata."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from danube_fast.durable import write_file

__all__ = ["MARKS_NAME", "LogMark", "read_marks", "write_marks"]

MARKS_NAME = "logs"


class LogMark(NamedTuple):
    """How far a log was, durably, when the metadata heard of it."""

    log_id: int
    epoch: int
    """Epoch that its worker had begun."""
    position: int
    losses: int
    """Damages that an operator had accepted by then."""


def read_marks(metadata: Path) -> dict[int, LogMark]:
    """Read what the metadata knows of logs: nothing, if the file is missing or damaged."""
    try:
        crc, _, data = (metadata / MARKS_NAME).read_bytes().partition(b" ")
        if int(crc, 16) != zlib.crc32(data):
            return {}
        marks = msgspec.json.decode(data, type=list[LogMark])
    except (OSError, ValueError, msgspec.MsgspecError):
        return {}
    return {mark.log_id: mark for mark in marks}


def write_marks(metadata: Path, marks: Mapping[int, LogMark]) -> None:
    """Replace what the metadata knows of logs, durably. Raises OSError."""
    data = msgspec.json.encode(list(marks.values()))
    partial = metadata / f"{MARKS_NAME}.partial"
    write_file(partial, b"%08x %s" % (zlib.crc32(data), data))
    partial.replace(metadata / MARKS_NAME)
