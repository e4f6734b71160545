"""What the processes of a crash test publish, and what they write down about it.

Every payload says who made it and carries bytes that follow from that, so that whoever receives one
can tell at once whether it is whole. Records go to plain files, one unbuffered write each: what a
process knew when it was killed is there.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "ACKED",
    "ACK_SENT",
    "DAMAGED",
    "DURABLE",
    "FAILED",
    "RECEIVED",
    "RECORD_DTYPE",
    "Recorder",
    "ident_of",
    "ident_text",
    "number_of",
    "partition_of",
    "payload_of",
    "producer_of",
    "read_records",
]

ACKED, FAILED, RECEIVED, ACK_SENT, DURABLE = 1, 2, 3, 4, 5
"""Producers: the broker's ack, or an error instead. Consumers: a message came; is about to be acked;
its ack is durable."""

_RECORD = struct.Struct("<BBHIQqqq")
RECORD_DTYPE = np.dtype(
    [
        ("kind", "u1"), ("partition", "u1"), ("generation", "<u2"), ("redelivery", "<u4"),
        ("ident", "<u8"), ("offset", "<i8"), ("sent_ns", "<i8"), ("at_ns", "<i8"),
    ]
)  # fmt: skip
assert RECORD_DTYPE.itemsize == _RECORD.size

_HEAD = struct.Struct("<Q")
_NUMBER_BITS = 48
_PATTERN = bytes((i * 37 + i // 251) & 0xFF for i in range(4096))
DAMAGED = 0
"""Ident of a payload that nobody made."""


def payload_of(producer: int, number: int) -> bytes:
    """Message `number` of producer `producer` (above 0)."""
    start = (number * 13 + producer * 101) % 3800
    size = 16 + (number * 31 + producer) % 160
    return _HEAD.pack(producer << _NUMBER_BITS | number) + _PATTERN[start : start + size]


def ident_of(payload: bytes | None) -> int:
    """Who made it and which it is; DAMAGED if the bytes are not those that were sent."""
    if payload is None or len(payload) < _HEAD.size:
        return DAMAGED
    ident = int(_HEAD.unpack_from(payload)[0])
    return ident if payload == payload_of(producer_of(ident), number_of(ident)) else DAMAGED


def producer_of(ident: int) -> int:
    """The producer's index."""
    return ident >> _NUMBER_BITS


def number_of(ident: int) -> int:
    """The message's number."""
    return ident & ((1 << _NUMBER_BITS) - 1)


def ident_text(ident: int) -> str:
    """An ident for people."""
    return f"message {number_of(ident)} of producer {producer_of(ident)}" if ident else "damage"


def partition_of(topic: str) -> int:
    """Index of a partition by its topic's name; 0 for a topic without partitions."""
    _, separator, index = topic.rpartition("-part-")
    return int(index) if separator else 0


class Recorder:
    """Appends records to a file. Thread-safe."""

    def __init__(self, path: str | Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()

    def add(self, kind: int, *, partition: int = 0, generation: int = 0, redelivery: int = 0,
            ident: int = 0, offset: int = -1, sent_ns: int = 0, at_ns: int = 0) -> None:  # fmt: skip
        """One record, on its way to the page cache when this returns."""
        self.write(
            _RECORD.pack(
                kind, partition, generation, redelivery, ident, offset, sent_ns, at_ns
            )
        )  # fmt: skip

    def write(self, data: bytes) -> None:
        """Whole records."""
        with self._lock:
            os.write(self._fd, data)

    def close(self) -> None:
        """Nothing more."""
        os.close(self._fd)


def read_records(path: str | Path, first: int = 0) -> npt.NDArray[Any]:
    """All records of a file so far, from record `first` on."""
    try:
        with open(path, "rb") as file:
            file.seek(first * RECORD_DTYPE.itemsize)
            data = file.read()
    except FileNotFoundError:
        data = b""
    whole = len(data) - len(data) % RECORD_DTYPE.itemsize
    return np.frombuffer(data[:whole], RECORD_DTYPE)
