"""Records of every message that a consumer of the demo writes down, and that the demo reads afterwards.

Each consumer writes one file of RECORDs in the order of receiving; the demo judges from these files
alone, so that nothing it shows is a claim of the broker about itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from danube_fast.client.consume.batch import Batch

__all__ = ["RECORD", "Records", "fingerprint", "ranges_of", "read_records", "records_of"]

RECORD = np.dtype(
    [
        ("partition", np.int64),
        ("offset", np.int64),
        ("row", np.uint64),  # fingerprint of the payload
        ("key", "S8"),
        ("publish_ns", np.int64),  # wall clock, when the producer packed the frame
        ("receive_ns", np.int64),  # wall clock, when receive_batch() returned
    ]
)
Records = npt.NDArray[Any]
"""One-dimensional array of RECORD."""

PARTITION_MARK = "-part-"


def fingerprint(payloads: Sequence[bytes | None]) -> npt.NDArray[np.uint64]:
    """64 bits that stand for each payload; uint64."""
    digest = xxhash.xxh64_intdigest
    return np.fromiter((digest(payload or b"") for payload in payloads), np.uint64, len(payloads))


def partition_number(topic: str) -> int:
    """2 of `/default/flights-part-2`; 0 of a topic without partitions."""
    number = topic.rpartition(PARTITION_MARK)[2]
    return int(number) if number.isdecimal() else 0


def records_of(batch: Batch, receive_ns: int) -> Records:
    """A received batch as RECORDs."""
    records = np.empty(len(batch), RECORD)
    numbers: dict[str, int] = {}
    partitions, publish_times = [], []
    for message in batch:
        topic = message.topic
        if topic not in numbers:
            numbers[topic] = partition_number(topic)
        partitions.append(numbers[topic])
        publish_times.append(message.publish_time)
    records["partition"] = partitions
    records["offset"] = batch.offsets
    records["row"] = fingerprint(batch.payloads())
    keys = batch.keys()
    records["key"] = [key or b"" for key in keys]
    records["publish_ns"] = publish_times
    records["receive_ns"] = receive_ns
    return records


def ranges_of(records: Records) -> list[tuple[int, int, int]]:
    """Runs of neighbouring offsets: (partition, first, one past the last)."""
    if not len(records):
        return []
    partitions, offsets = records["partition"], records["offset"]
    breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(partitions) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(records)])) - 1
    return list(
        zip(
            partitions[starts].tolist(),
            offsets[starts].tolist(),
            (offsets[stops] + 1).tolist(),
            strict=True,
        )
    )


def read_records(path: Path) -> Records:
    """The file of one consumer. Raises OSError, ValueError."""
    return np.fromfile(path, RECORD)
