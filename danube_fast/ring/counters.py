"""CounterBlock: what every process counts, in shared memory; written by workers, read by tools.

    header line | process 0: COUNTERS_PER_PROCESS words | process 1: ... | ...

Each process writes only its own words, and each counter has one thread that adds to it, or several under one lock,
so an addition is a plain load and store; a reader sees some recent value of each. No kernels, no numba.

To count something new, add a member to `Counter` with the next free number; numbers are never
reused or changed, because a reader of another version may be mapped.
"""

from __future__ import annotations

import enum
import os

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.ring import layout
from danube_fast.ring.memory import create_memfd, map_fd, words_of

__all__ = [
    "HISTOGRAM_BUCKETS",
    "HISTOGRAM_WORDS",
    "Counter",
    "CounterBlock",
    "CounterKind",
    "Histogram",
    "observe",
]

_WORD = layout.WORD_BYTES
_HEADER_WORDS = layout.COUNTER_HEADER_BYTES // _WORD
_SLOT_WORDS = layout.COUNTERS_PER_PROCESS


class CounterKind(enum.StrEnum):
    """How a counter moves."""

    TOTAL = "total"
    """Only grows; starts at 0 with every start of its process."""
    LEVEL = "level"
    """Goes up and down, or is set."""


class Counter(enum.IntEnum):
    """Everything that is counted: number, kind, unit, label."""

    kind: CounterKind
    unit: str
    label: str

    def __new__(cls, number: int, kind: CounterKind, unit: str, label: str) -> Counter:
        """A member from its number, kind, unit and label."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.kind = kind
        member.unit = unit
        member.label = label
        return member

    MESSAGES_IN = 0, CounterKind.TOTAL, "messages", "accepted from producers"
    BYTES_IN = 1, CounterKind.TOTAL, "bytes", "of frames accepted from producers"
    MESSAGES_OUT = 2, CounterKind.TOTAL, "messages", "sent to consumers"
    BYTES_OUT = 3, CounterKind.TOTAL, "bytes", "of frames sent to consumers"
    FRAMES_IN = 4, CounterKind.TOTAL, "frames", "accepted from producers"
    BUNDLES_IN = 5, CounterKind.TOTAL, "bundles", "received from producers"
    GROUPS = 6, CounterKind.TOTAL, "groups", "written to logs"
    SYNCS = 7, CounterKind.TOTAL, "syncs", "of logs"
    SYNC_BYTES = 8, CounterKind.TOTAL, "bytes", "made durable by syncs"
    ACKS_OUT = 9, CounterKind.TOTAL, "frames", "acknowledged to producers"
    SESSIONS = 10, CounterKind.LEVEL, "sessions", "open"
    PRODUCERS = 11, CounterKind.LEVEL, "producers", "open"
    CONSUMERS = 12, CounterKind.LEVEL, "consumers", "attached"
    DUPLICATES = 13, CounterKind.TOTAL, "frames", "dropped because they were accepted before"
    REFUSED = 14, CounterKind.TOTAL, "frames", "refused with an error"
    REDELIVERED = 15, CounterKind.TOTAL, "messages", "sent to a consumer again"
    LOST_NON_RELIABLE = 16, CounterKind.TOTAL, "messages", "of non_reliable topics dropped"
    LOG_BYTES = 17, CounterKind.LEVEL, "bytes", "held by logs"
    LOG_POSITION = 18, CounterKind.LEVEL, "bytes", "position up to which logs are written"
    PARTITIONS = 19, CounterKind.LEVEL, "partitions", "served"
    LOGS_FAILING = 20, CounterKind.LEVEL, "logs", "that take no messages because syncs fail"
    SCRAPES = 21, CounterKind.TOTAL, "scrapes", "of /metrics answered"
    HISTORY_LAG_BYTES = (
        22,
        CounterKind.LEVEL,
        "bytes",
        "of topics with history not uploaded yet, about",
    )
    HISTORY_LAG_SECONDS = (
        23,
        CounterKind.LEVEL,
        "seconds",
        "of age of the oldest message not uploaded",
    )
    HISTORY_OBJECTS = 24, CounterKind.TOTAL, "objects", "uploaded"
    HISTORY_BYTES = 25, CounterKind.TOTAL, "bytes", "uploaded"
    HISTORY_DELETED = 26, CounterKind.TOTAL, "objects", "of history deleted"
    HISTORY_PUTS = 27, CounterKind.TOTAL, "requests", "that write to the object store"
    HISTORY_PARTS = 28, CounterKind.TOTAL, "parts", "of objects sent"
    HISTORY_REQUEST_RETRIES = (
        29,
        CounterKind.TOTAL,
        "requests",
        "that the object store's client sent again by itself",
    )
    HISTORY_ROUND_RETRIES = 30, CounterKind.TOTAL, "rounds", "of upload begun again after an error"
    HISTORY_CACHE_HITS = 31, CounterKind.TOTAL, "pieces", "of history that were fetched already"
    HISTORY_CACHE_MISSES = (
        32,
        CounterKind.TOTAL,
        "pieces",
        "of history fetched from the object store",
    )
    IPC_TAKEN = 33, CounterKind.LEVEL, "names", "of ipc that another process holds"
    RINGS_TAKEN = 34, CounterKind.LEVEL, "names", "of shared memory that another process holds"
    THREADS_LOST = (
        35,
        CounterKind.LEVEL,
        "threads",
        "that an authorizer or authenticator has not answered in time",
    )
    FIRST_KEYS = 36, CounterKind.LEVEL, "keys", "of a first administrator that wait for their use"


HISTOGRAM_BUCKETS = 27
"""Bucket i counts what took less than 2**i microseconds, and not less than half of that; the last one
all that took longer."""
HISTOGRAM_WORDS = HISTOGRAM_BUCKETS + 1
"""The buckets, and the sum in nanoseconds."""


class Histogram(enum.IntEnum):
    """How long things took: where the words of each begin, behind the counters."""

    ACK = layout.COUNTERS_PER_PROCESS - 2 * HISTOGRAM_WORDS
    """Publishes into a log, from a worker's first look at the group they are in to its ack."""
    SYNC = layout.COUNTERS_PER_PROCESS - HISTOGRAM_WORDS
    """Calls of fdatasync on segments."""


def observe(words: list[int], took_ns: int, count: int) -> None:
    """Enter `count` things that took so long into the words of a histogram."""
    bucket = (max(took_ns, 0) // 1000).bit_length()
    words[min(bucket, HISTOGRAM_BUCKETS - 1)] += count
    words[HISTOGRAM_BUCKETS] += took_ns * count


if max(Counter) >= min(Histogram):
    raise ImportError("more counters than COUNTERS_PER_PROCESS words; raise it in ring/layout.py")


class CounterBlock:
    """The counters of all processes of one broker. Made by `create` or `attach`.

    `process` names this process's slot for `add`, `set` and `value`; readers leave it at None.
    `fd` is the memfd to hand on with `pass_fds`. `close` unmaps and closes it.
    """

    __slots__ = ("_map", "_start", "_words", "fd", "process_count")

    def __init__(self, fd: int, process: int | None = None) -> None:
        """Map the block in `fd`; owns `fd` from here. Raises FailedPrecondition if it is none."""
        self._map = map_fd(fd)
        self._words = words_of(self._map)
        version, count = self._words[0], self._words[layout.AT_PROCESS_COUNT // _WORD]
        fits = count > 0 and len(self._map) >= layout.counter_bytes(count)
        if version != layout.COUNTER_VERSION_WORD or not fits:
            self._words.release()
            self._map.close()
            raise FailedPrecondition(
                f"descriptor {fd} holds no counter block of version {layout.COUNTER_VERSION}; all "
                "processes of a broker must run the same danube-fast"
            )
        self.fd = fd
        self.process_count = count
        self._start = len(self._words) if process is None else self._slot(process)

    @classmethod
    def create(cls, process_count: int, process: int | None = None) -> CounterBlock:
        """A new block with every counter 0."""
        if process_count < 1:
            raise InvalidArgument(f"a counter block needs at least 1 process, not {process_count}")
        fd = create_memfd("danube-fast-counters", layout.counter_bytes(process_count))
        with map_fd(fd) as memory, words_of(memory) as words:
            words[layout.AT_PROCESS_COUNT // _WORD] = process_count
            words[0] = layout.COUNTER_VERSION_WORD
        return cls(fd, process)

    @classmethod
    def attach(cls, fd: int, process: int | None = None) -> CounterBlock:
        """Map the block behind an inherited descriptor, and own the descriptor."""
        return cls(fd, process)

    def close(self) -> None:
        """Unmap and close. Kernels must no longer use `address`."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def _slot(self, process: int) -> int:
        if not 0 <= process < self.process_count:
            raise InvalidArgument(
                f"process {process} is not in this counter block of {self.process_count}"
            )
        return _HEADER_WORDS + process * _SLOT_WORDS

    # ------------------------------------------------------------ written by the process

    def add(self, counter: Counter, amount: int = 1) -> None:
        """Add to a counter of this process. A block without `process` raises IndexError."""
        self._words[self._start + counter] += amount

    def set(self, counter: int, value: int) -> None:
        """Set a counter, or a word of a histogram, of this process. A block without `process` raises
        IndexError."""
        self._words[self._start + counter] = value

    def value(self, counter: Counter) -> int:
        """A counter of this process. A block without `process` raises IndexError."""
        return self._words[self._start + counter]

    def clear(self) -> None:
        """Set all counters of this process to 0: a new life starts."""
        for index in range(_SLOT_WORDS):
            self._words[self._start + index] = 0

    # ------------------------------------------------------------ read by anyone

    def get(self, process: int, counter: Counter) -> int:
        """A counter of any process."""
        return self._words[self._slot(process) + counter]

    def histogram(self, process: int, histogram: Histogram) -> list[int]:
        """The words of a histogram of any process."""
        start = self._slot(process) + histogram
        return self._words[start : start + HISTOGRAM_WORDS].tolist()

    def total(self, counter: Counter) -> int:
        """Sum of a counter over all processes."""
        return sum(self.get(process, counter) for process in range(self.process_count))

    def snapshot(self, process: int) -> dict[Counter, int]:
        """All counters of one process."""
        start = self._slot(process)
        return {counter: self._words[start + counter] for counter in Counter}
