"""State records that wait for a journal's next group, and those that want to know when they are durable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danube_fast.broker.admission.layout import LogWord
from danube_fast.broker.records import Record, encode_record
from danube_fast.countdown import Done
from danube_fast.errors import DanubeError
from danube_fast.frame.layout import HEADER_BYTES
from danube_fast.wal.control import make_control_frame, stamp_control_frame
from danube_fast.wal.log import Log

__all__ = ["RECORD_BYTES_PER_GROUP_MAX", "RecordQueue", "stamped_frames"]

RECORD_OVERHEAD_BYTES = 16
FRAME_OVERHEAD_BYTES = HEADER_BYTES + 256
RECORDS_PER_FRAME_MAX = 4096
RECORD_BYTES_PER_GROUP_MAX = 1024 * 1024
"""Many records go in several groups, each of about this size."""


class RecordQueue:
    """Encoded records, oldest first. Used by the worker's loop only."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._byte_count = 0
        self._callbacks: list[Done] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, done: Done | None = None) -> None:
        """Queue a record; `done` when it, and all before it, is durable."""
        data = encode_record(record)
        self._records.append(data)
        self._byte_count += len(data)
        if done is not None:
            self._callbacks.append(done)

    def wait(self, done: Done) -> None:
        """Call `done`, maybe once more, when all that is queued is durable."""
        self._callbacks.append(done)

    def put_back(self, records: list[bytes]) -> None:
        """Queue records of a failed write again, before those that came since."""
        self._records[:0] = records
        self._byte_count += sum(map(len, records))

    def room_bytes(self, count: int | None = None) -> int:
        """Compute the room that the first `count` records need in a log at most; None: all."""
        if not self._records:
            return 0
        if count is None or count == len(self._records):
            count, size = len(self._records), self._byte_count
        else:
            size = sum(map(len, self._records[:count]))
        frames = 1 + count // RECORDS_PER_FRAME_MAX
        return size + count * RECORD_OVERHEAD_BYTES + frames * FRAME_OVERHEAD_BYTES

    def count_for_group(self, segment_bytes: int) -> int:
        """Count the records that go into one group of a log with such segments; at least one."""
        limit = min(RECORD_BYTES_PER_GROUP_MAX, segment_bytes // 4)
        if self._byte_count <= limit:
            return len(self._records)
        size = count = 0
        while size < limit and count < len(self._records):
            size += len(self._records[count]) + RECORD_OVERHEAD_BYTES
            count += 1
        return max(1, count - 1)

    def take(self, count: int | None = None) -> list[bytes]:
        """Take the first `count` records; None: all."""
        records = self._records[:count]
        del self._records[: len(records)]
        self._byte_count -= sum(map(len, records))
        return records

    def take_callbacks(self) -> list[Done]:
        """Take those that wait: once no record is queued any more, with the group that the last of them is in."""
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def fail(self, error: DanubeError) -> None:
        """Tell those that wait. The records stay queued: memory has the state that they describe."""
        for done in self.take_callbacks():
            done(error)


def stamped_frames(records: Sequence[bytes], log: Log, row: Any) -> list[memoryview]:
    """Make the control frames of encoded records, stamped for where the log's next bytes go; `row`: the words of the log
    in the tables of admission, which go on behind them."""
    frames = []
    for at in range(0, len(records), RECORDS_PER_FRAME_MAX):
        some = records[at : at + RECORDS_PER_FRAME_MAX]
        frame = make_control_frame(some)
        position = int(row[LogWord.POSITION])
        stamp_control_frame(
            frame, len(some), log_id=log.log_id, position=position, base_offset=0,
            append_time_ns=0, synced_position=log.synced_position, epoch=log.epoch,
        )  # fmt: skip
        row[LogWord.POSITION] = position + len(frame)
        frames.append(memoryview(frame))
    return frames
