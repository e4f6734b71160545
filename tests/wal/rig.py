"""What the tests of the log share: small logs in a folder, frames that name themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import HEADER_DTYPE, Flag
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import stamp
from danube_fast.wal.layout import RUN_DTYPE
from danube_fast.wal.log import Log

LOG_ID = 0x1234_5678_9ABC_DEF0
MIB = 1024 * 1024
SETTINGS = Settings(
    segment_bytes=4 * MIB, spare_segments=0, index_map_bytes=1 * MIB, index_flush_entries=64
)


def open_log(directory: Path, settings: Settings = SETTINGS, **options: Any) -> Log:
    """Open, not replayed."""
    options.setdefault("lock_timeout_ms", 0)
    return Log.open(directory, log_id=LOG_ID, settings=settings, clock=SystemClock(), **options)


def start_log(directory: Path, settings: Settings = SETTINGS, **options: Any) -> Log:
    """Open, replay, begin an epoch."""
    log = open_log(directory, settings, **options)
    try:
        for _ in log.replay():
            pass
        log.begin_epoch([b"epoch"])
    except BaseException:
        log.close()
        raise
    return log


def abandon(log: Log) -> None:
    """Let go of the folder as a killed process would: no last sync, no clean flag, no snapshot."""
    log._ready = False
    log.close()


def make_frame(payloads: list[bytes]) -> bytearray:
    return encode_frame(payloads)


def stamp_frame(
    frame: bytearray,
    position: int,
    *,
    epoch: int,
    base_offset: int = 0,
    partition_id: int = 5,
    span: int = 1,
    synced: int = 0,
    time_ns: int = 1,
    log_id: int = LOG_ID,
) -> bytearray:
    stamp(
        address_of(frame), log_id, position, base_offset, time_ns, synced, partition_id, epoch, span
    )
    return frame


def put(
    log: Log,
    groups: Iterable[list[bytes]],
    *,
    base_offset: int = 0,
    partition_id: int = 5,
    sync: bool = True,
    time_ns: int | None = None,
) -> int:
    """Append one group of one frame for each list of payloads; returns the next offset."""
    offset = base_offset
    for payloads in groups:
        frame = make_frame(payloads)
        position = log.reserve(len(frame))
        append_time_ns = offset + 1 if time_ns is None else time_ns
        stamp_frame(
            frame,
            position,
            epoch=log.epoch,
            base_offset=offset,
            partition_id=partition_id,
            span=len(payloads),
            synced=log.synced_position,
            time_ns=append_time_ns,
        )
        run = np.zeros(1, dtype=RUN_DTYPE)
        run["partition_id"], run["base_offset"] = partition_id, offset
        run["offset_span"], run["position"] = len(payloads), position
        run["byte_count"], run["append_time_ns"] = len(frame), append_time_ns
        log.append([frame], len(frame), run)
        offset += len(payloads)
        if sync:
            log.sync()
    return offset


def wait_synced(log: Log, seconds: float = 60.0) -> None:
    """Until all that was written is durable."""
    deadline = time.monotonic() + seconds
    while log.synced_position < log.written_position:
        assert log.sync_fault is None, f"a sync failed: {log.sync_fault}"
        if log.sync_is_put_off:  # the queue was full: who uses a log comes back to it
            log.sync()
        assert time.monotonic() < deadline, (
            f"synced {log.synced_position}, written {log.written_position} after {seconds} s"
        )
        time.sleep(0.0005)


def wait_until(condition: Any, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {seconds} s"
        time.sleep(0.001)


def descriptors_of(folder: Path) -> list[str]:
    """Descriptors of this process that are open on what lies in a folder; other threads open and close others."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(f"{folder}/"):
                found.append(entry.name)
    return sorted(found)


def data_rows(log: Log) -> list[tuple[int, int, int]]:
    """Exhaust the replay: (partition, base offset, position) of every frame that is no control."""
    rows = []
    for block in log.replay():
        for row in block.rows:
            assert block.base_position <= row["position"]
            start = int(row["position"]) - block.base_position
            header = np.frombuffer(block.view, HEADER_DTYPE, 1, start)[0]
            assert header["log_position"] == row["position"]
            assert start + int(row["frame_bytes"]) <= len(block.view)
            if not int(row["flags"]) & Flag.CONTROL:
                rows.append(
                    (int(row["partition_id"]), int(row["base_offset"]), int(row["position"]))
                )
    return rows


def segments(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.seg") if path.name[0].isdigit())
