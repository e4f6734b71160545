"""What an upload costs without a broker: the same frames out of the same files of the log, in one loop.

    write_frames    preadv, the uploader's check, pwrite; fdatasync behind each part
    send_frames     boto3's own multipart upload of the same bytes, with its own threads

Where the frames stand is looked up before the clock starts.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from danube_fast.bench.load.member import Link
from danube_fast.bench.workloads.history.stores import BUCKET, plain_s3
from danube_fast.errors import DataLoss
from danube_fast.history.blocks import BlockTable
from danube_fast.wal.inspect import inspect_log
from danube_fast.wal.layout import SEGMENT_HEADER_BYTES, SEGMENT_SUFFIX
from danube_fast.wal.segment import Chain, list_segments
from danube_fast.wal.walk import Walk

__all__ = ["frames_in_log", "hold_log", "send_frames", "write_frames"]

READ_BYTES = 4 << 20
"""As the uploader reads."""

Range = tuple[str, int, int]
"""Path, position in the file and number of bytes."""


def hold_log(data_dir: Path, folder: Path) -> None:
    """Give the segments of all logs second names in `folder`, so that they outlive their trim."""
    for path in data_dir.rglob(f"*{SEGMENT_SUFFIX}"):
        held = folder / path.parent.name / path.name
        held.parent.mkdir(parents=True, exist_ok=True)
        held.hardlink_to(path)


def frames_in_log(data_dir: Path, messages: int) -> tuple[int, list[Range]]:
    """Id and ranges of the one partition that has so many messages. Raises DataLoss if none has."""
    for folder in sorted({path.parent for path in data_dir.rglob(f"*{SEGMENT_SUFFIX}")}):
        counts: dict[int, int] = {}
        ranges: dict[int, list[Range]] = {}
        for partition_id, count, where in _frames(folder):
            counts[partition_id] = counts.get(partition_id, 0) + count
            _extend(ranges.setdefault(partition_id, []), where)
        for partition_id, count in counts.items():
            if count == messages:
                return partition_id, ranges[partition_id]
    raise DataLoss(f"no partition of the log in {data_dir} has {messages} messages")


def _frames(folder: Path) -> Iterator[tuple[int, int, Range]]:
    """Partition, number of messages and place of each frame of a log."""
    log_id = inspect_log(folder).log_id
    chain = Chain(list_segments(folder, SEGMENT_HEADER_BYTES))
    try:
        walk = Walk(chain, log_id or 0, chain.oldest_position, chain[0].epoch, check_bodies=False)
        for block in walk.blocks():
            for row in block.rows:
                position, size = int(row["position"]), int(row["frame_bytes"])
                segment = chain[chain.index_of(position)]
                where = str(segment.path), segment.file_offset(position), size
                yield int(row["partition_id"]), int(row["message_count"]), where
    finally:
        chain.close()


def _extend(ranges: list[Range], where: Range) -> None:
    if ranges:
        path, position, size = ranges[-1]
        if path == where[0] and position + size == where[1] and size + where[2] <= READ_BYTES:
            ranges[-1] = path, position, size + where[2]
            return
    ranges.append(where)


def _read(where: Range) -> bytearray:
    path, position, size = where
    data = bytearray(size)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.preadv(fd, [data], position) != size:
            raise DataLoss(f"{path} ends within a frame")
    finally:
        os.close(fd)
    return data


def write_frames(link: Link, options: dict[str, Any]) -> None:
    """Check all frames and write them into the new file `path`, which goes at the end."""
    ranges: list[Range] = options["ranges"]
    table = BlockTable(0)
    fd = os.open(options["path"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        link.ready()
        began = time.monotonic()
        table.begin(options["partition_id"])
        written = unsynced = 0
        for where in ranges:
            data = _read(where)
            table.add(data, where[0])
            written += _write_all(fd, data, written)
            unsynced += len(data)
            if unsynced >= options["part_bytes"]:
                os.fdatasync(fd)
                unsynced = 0
        os.fdatasync(fd)
        seconds = time.monotonic() - began
    finally:
        os.close(fd)
        os.unlink(options["path"])
    messages = int(table.rows["message_count"].sum())
    link.say({"bytes": written, "messages": messages, "bytes_per_s": written / seconds})
    link.hear()


def _write_all(fd: int, data: bytearray, offset: int) -> int:
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
    return len(data)


def send_frames(link: Link, options: dict[str, Any]) -> None:
    """Send all frames, from memory, in objects as large as those of the broker, which go at the end."""
    from boto3.s3.transfer import TransferConfig

    table = BlockTable(0)
    table.begin(options["partition_id"])
    whole = bytearray()
    for where in options["ranges"]:
        data = _read(where)
        table.add(data, where[0])
        whole += data
    some = options["object_bytes"]
    pieces = [bytes(whole[start : start + some]) for start in range(0, len(whole), some)]
    part_bytes = options["part_bytes"]
    config = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes)
    client = plain_s3(options["endpoint"])
    names = [f"bare/{number}" for number in range(len(pieces))]
    client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)  # connects
    link.ready()
    began = time.monotonic()
    for name, piece in zip(names, pieces, strict=True):
        client.upload_fileobj(io.BytesIO(piece), BUCKET, name, Config=config)
    seconds = time.monotonic() - began
    sizes = [client.head_object(Bucket=BUCKET, Key=name)["ContentLength"] for name in names]
    if sum(sizes) != len(whole):
        raise DataLoss(f"boto3 sent {len(whole)} bytes, and {sum(sizes)} are there")
    for name in names:
        client.delete_object(Bucket=BUCKET, Key=name)
    messages = int(table.rows["message_count"].sum())
    link.say({"bytes": len(whole), "messages": messages, "bytes_per_s": len(whole) / seconds})
    link.hear()
