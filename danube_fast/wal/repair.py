"""Going on without what is lost: the work of `danube-fast wal verify --accept-loss`.

    before   | frame | frame | ?????????????? | frame | frame |
    after    | frame | frame | PAD ---------> | frame | frame |

A PAD frame over the damage makes the log contiguous again, so what stands behind it is kept and
nothing but 128 bytes is overwritten. Missing segments are replaced by empty ones that hold one PAD
frame. Every loss is appended to losses.jsonl, durably, before the first byte is changed; the index
is thrown away, it is only a cache.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from danube_fast.durable import replace_file, sync_directory
from danube_fast.frame.crc import crc32c
from danube_fast.wal.layout import (
    INDEX_NAME,
    LOSSES_NAME,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    SNAPSHOT_SUFFIX,
    TEMPORARY_SUFFIX,
    SegmentHeader,
    SnapshotHeader,
    position_name,
)
from danube_fast.wal.segment import Chain, Segment, list_segments
from danube_fast.wal.snapshot import list_snapshots, write_snapshot
from danube_fast.wal.trims import note_trim
from danube_fast.wal.writer import PadStamper

__all__ = ["Damage", "Loss", "read_losses", "repair"]

_FILLER_BYTES_MAX = 1 << 30  # a PAD frame's length must fit 32 bits


class Damage(msgspec.Struct, frozen=True):
    """Bytes of the log that cannot be trusted: [position, until) in the file `path`.

    `until` equals `position` where no frame is lost with it (headers, snapshots). `epoch` is that
    of the frame before.
    """

    path: str
    position: int
    until: int
    reason: str
    epoch: int


class Loss(msgspec.Struct, frozen=True):
    """A damage that an operator accepted, one line of losses.jsonl."""

    path: str
    position: int
    until: int
    reason: str
    accepted_ns: int


def read_losses(path: Path) -> list[Loss]:
    """Read what was accepted as lost so far."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Loss) for line in path.read_bytes().splitlines() if line]


def _record(directory: Path, faults: Sequence[Damage], wall_ns: int) -> None:
    lines = [
        msgspec.json.encode(Loss(fault.path, fault.position, fault.until, fault.reason, wall_ns))
        for fault in faults
    ]
    with open(directory / LOSSES_NAME, "ab") as file:
        file.write(b"\n".join(lines) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def repair(
    directory: Path, chain: Chain, log_id: int, faults: Sequence[Damage], wall_ns: int
) -> None:
    """Record the faults and make the log contiguous without them. Raises OSError."""
    _record(directory, faults, wall_ns)
    shutil.rmtree(directory / INDEX_NAME, ignore_errors=True)
    pads = PadStamper(log_id)
    for fault in faults:
        if fault.path.endswith(SNAPSHOT_SUFFIX):
            Path(fault.path).unlink()
    for fault in faults:
        if fault.until == fault.position:
            continue
        if fault.position < chain.oldest_position:
            snapshot = max((position for position, _ in list_snapshots(directory)), default=-1)
            if snapshot < 0:
                _write_empty_snapshot(directory, log_id, fault.until, wall_ns)
            if not 0 <= snapshot < fault.until:
                note_trim(directory, fault.until)
                continue
            note_trim(directory, fault.position)
        _cover(directory, chain, pads, log_id, fault, wall_ns)
    _relink(directory, log_id, wall_ns)
    sync_directory(directory)


def _write_empty_snapshot(directory: Path, log_id: int, position: int, wall_ns: int) -> None:
    """Let the log start at `position` with no state: that is lost with what stood before."""
    header = SnapshotHeader(log_id, position, 0, wall_ns, 0, False, crc32c(b""))
    write_snapshot(directory, header, b"")


def _cover(
    directory: Path, chain: Chain, pads: PadStamper, log_id: int, fault: Damage, wall_ns: int
) -> None:
    """Put PAD frames over [position, until)."""
    position = fault.position
    index = chain.index_of(position)
    if index >= 0 and not chain[index].is_foreign and position < chain[index].end_position:
        segment = chain[index]
        until = min(fault.until, segment.end_position)
        fd = segment.open()
        header = pads.make(until - position, position, fault.epoch, 0)
        os.pwrite(fd, header, segment.file_offset(position))
        os.fsync(fd)
        position = until
    while position < fault.until:
        until = min(fault.until, position + _FILLER_BYTES_MAX)
        header = pads.make(until - position, position, fault.epoch, 0)
        filler = SegmentHeader(
            log_id=log_id,
            first_position=position,
            previous_position=position,
            segment_bytes=until - position + SEGMENT_HEADER_BYTES,
            created_ns=wall_ns,
            epoch=fault.epoch,
        )
        _write_filler(directory / position_name(position, SEGMENT_SUFFIX), filler, header)
        position = until


def _write_filler(path: Path, header: SegmentHeader, pad: bytearray) -> None:
    replace_file(path, header.encode(), pad, temporary=path.with_suffix(TEMPORARY_SUFFIX))


def _relink(directory: Path, log_id: int, wall_ns: int) -> None:
    """Write headers anew that are damaged or name another segment as the one before; remove empty files."""
    before: Segment | None = None
    for segment in list_segments(directory, SEGMENT_HEADER_BYTES):
        if segment.fault is not None and segment.is_short:
            segment.path.unlink()  # there is nothing in it
            continue
        first = segment.first_position
        previous = before.first_position if before else segment.previous_position
        wrong = segment.fault is not None or segment.previous_position != previous
        if wrong:
            if segment.fault is not None and before is not None:
                segment.epoch = before.epoch
            header = SegmentHeader(
                log_id=log_id,
                first_position=first,
                previous_position=first if previous is None else previous,
                segment_bytes=max(segment.segment_bytes, segment.file_bytes),
                created_ns=wall_ns,
                epoch=segment.epoch,
            )
            fd = segment.open()
            os.pwrite(fd, header.encode(), 0)
            os.fsync(fd)
            segment.close()
        before = segment
