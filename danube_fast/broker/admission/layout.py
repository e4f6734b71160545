"""Tables of a worker's admission kernel: int64 words in numpy arrays, one row a thing.

Written by the worker's loop only (Python between kernel calls, kernels during them). One process,
one thread: no atomics here.

    state block -> addresses of the tables, so that a kernel call has few arguments
    slot_of[partition_id] -> row of `partitions`, or -1
    partitions[slot]      where the next message goes
    logs[slot]            where the next frame goes
    producers[slot]       what a producer sent last; windows[slot] its last batches
    hash[cell]            open addressing over (partition_id, producer_id) -> producer slot + 1
    results[i]            outcome of the i-th frame of the open group
"""

from __future__ import annotations

import enum
from typing import Any

__all__ = [
    "LogWord",
    "Mode",
    "NamespaceWord",
    "PartitionWord",
    "ProducerWord",
    "ResultWord",
    "StateWord",
    "WindowWord",
    "is_passed_on",
    "passed_on_session",
    "peer_of",
]

INT64_MAX = (1 << 63) - 1
SESSION_ARRIVED = -(1 << 40)
"""In place of a session: the producer came with its partition and was not opened here since."""
_PEERS = 1 << 10
"""More than a broker has processes."""


def passed_on_session(peer: int, client: int) -> int:
    """Return what stands for a client's session on another worker, which passes its producers on; `client`: the number
    of that session, 0 for what the peer publishes itself. Below -1, which stands for no session."""
    return -1 - peer - _PEERS * client


def peer_of(session: Any) -> Any:
    """Return the worker that passes on for such a session, or for each one of an array."""
    return (-1 - session) % _PEERS


def is_passed_on(session: Any) -> Any:
    """Whether a number, or each one of an array, stands for a client's session on another worker."""
    return (session < -_PEERS) & (session != SESSION_ARRIVED)


class Mode(enum.IntEnum):
    """The way that a partition's frames take."""

    CLOSED = 0
    """Refuses with the partition's `refusal` status."""
    LOGGED = 1
    """Written to the log (durability os, fsync)."""
    MEMORY = 2
    """Kept in memory only (durability memory, or non_reliable)."""


class PartitionWord(enum.IntEnum):
    """Columns of `partitions`."""

    PARTITION_ID = 0
    NEXT_OFFSET = 1
    APPEND_TIME_NS = 2
    MODE = 3
    REFUSAL = 4
    LOG_SLOT = 5
    RESERVED_UNTIL = 6
    """Offsets from here on may not be given out before the log has reserved more."""
    EPOCH = 7
    MESSAGE_BYTES_MAX = 8
    """Largest payload; 0: as large as a message may be."""
    IS_PACED = 9
    """1: a rate is charged for each bundle, and may close the partition for the next one."""
    OUTLET = 10
    """Address of its outlet during a turn over rings (`workers/shard/publish/turn_layout.py`); 0: it is not made,
    less than 0: it is refused."""
    NAMESPACE = 11
    """Address of the words of its namespace's quota (`NamespaceWord`); 0: it has none that a publish meets."""


class NamespaceWord(enum.IntEnum):
    """Words on the quota of a namespace: addresses of words that all workers share, 0 = no such limit."""

    MESSAGES = 0
    """Until when the messages that were published are paid for (`ring/buckets.py`)."""
    BYTES = 1
    BURST_NS = 2
    UNTIL = 3
    """So many bytes may all workers together accept, counted since the broker's start; 0 there: not known yet,
    publishers are to come again."""
    OWN = 4
    """Bytes that this worker has accepted since then."""
    WORKERS = 5
    """Number of the words behind."""
    ACCEPTED = 6
    """The first of them: those of all workers, like `OWN`."""


class LogWord(enum.IntEnum):
    """Columns of `logs`."""

    LOG_ID = 0
    POSITION = 1
    """Where the next frame of the open group goes; negative: the log refuses, minus the status."""
    EPOCH = 2
    SYNCED_POSITION = 3


class ProducerWord(enum.IntEnum):
    """Columns of `producers`."""

    PARTITION_ID = 0
    PRODUCER_ID = 1
    EPOCH = 2
    SESSION = 3
    NEXT_SEQUENCE = 4
    BATCH_COUNT = 5
    """Batches ever accepted; the window holds the last DEDUP_BATCHES of them."""
    LAST_USED_NS = 6
    ANNOUNCED = 7
    """Number of the consumer that was told its name last (`Consumer.number`)."""


class WindowWord(enum.IntEnum):
    """Columns of one remembered batch."""

    BASE_SEQUENCE = 0
    MESSAGE_COUNT = 1
    BASE_OFFSET = 2


class ResultWord(enum.IntEnum):
    """Columns of `results`."""

    STATUS = 0
    PARTITION_SLOT = 1
    BASE_OFFSET = 2
    MESSAGE_COUNT = 3
    FRAME_START = 4
    """Byte offset of the frame in its bundle."""
    FRAME_BYTES = 5
    LOG_POSITION = 6
    """-1 when the frame does not go to a log."""
    PRODUCER_SLOT = 7
    BASE_SEQUENCE = 8
    APPEND_TIME_NS = 9
    FLAGS = 10
    """Of the frame's header."""
    PRODUCER_ID = 11
    """Of an accepted frame."""


class StateWord(enum.IntEnum):
    """The state block."""

    PARTITIONS = 0
    SLOT_OF = 1
    SLOT_OF_COUNT = 2
    LOGS = 3
    PRODUCERS = 4
    WINDOWS = 5
    HASH = 6
    HASH_MASK = 7
    RESULTS = 8
    RESULTS_MAX = 9
    MESSAGE_BYTES_MAX = 10
    NOW_NS = 11
    """When the turn began, monotonic; kept while a namespace has a rate."""


WORD_BYTES = 8
PARTITION_WORDS = 12
LOG_WORDS = 4
PRODUCER_WORDS = 8
WINDOW_WORDS = 3
RESULT_WORDS = 12
STATE_WORDS = 16
DEDUP_BATCHES = 64
"""Batches remembered per producer (FEATURES 3)."""

for words, columns in (
    (PARTITION_WORDS, PartitionWord),
    (LOG_WORDS, LogWord),
    (PRODUCER_WORDS, ProducerWord),
    (WINDOW_WORDS, WindowWord),
    (RESULT_WORDS, ResultWord),
    (STATE_WORDS, StateWord),
):
    if max(columns) >= words:
        raise ImportError(f"{columns.__name__} does not fit into {words} words")
