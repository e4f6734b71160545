"""Reads of partitions behind their tail, which never wait for the disk.

    read --> in the page cache: Ready, or a Gap
         --> not there: Pending; a thread reads it --> the partition is marked ready, and asks again

Each log has one such thread at a time. Partitions that wait for it have their turns one after the other.

The thread reads what follows in the log, too, which serves all that are behind. If one partition alone waits and has little of what
follows, the thread reads that partition's next runs instead, and hands them over.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import PENDING, Read, Ready, Stored
from danube_fast.wal.background import Background
from danube_fast.wal.index import Run
from danube_fast.wal.log import Log
from danube_fast.workers.shard.history.fetches import HistoryReads
from danube_fast.workers.shard.read.frames import frames_of
from danube_fast.workers.shard.read.places import first_run, gap_in_log, live_runs
from danube_fast.workers.shard.state import ShardState

__all__ = ["LogReader"]

PREFETCH_BYTES = 4 << 20
"""Bytes that a thread reads at once."""
OWN_BYTES = 256 << 10
"""The same of the runs of one partition alone."""
OWN_RUNS_MAX = 64
"""Such runs that a thread reads at once: each is a read of its own."""
SEEK_BYTES = 128 << 10
"""A read elsewhere costs about as much as to read on for so many bytes."""


class _Fetch:
    """A read of one log by a thread, and the partitions that wait for it."""

    __slots__ = ("is_over", "of", "owner_id", "position", "runs", "waiting", "was_alone")

    def __init__(self, owner_id: int, position: int, log: Log) -> None:
        self.owner_id, self.position = owner_id, position
        self.of = log.log_id, log.epoch
        self.was_alone = True
        self.runs: dict[int, bytearray] = {}
        """Runs that were read for the owner, not checked, by position."""
        self.is_over = False
        """Set by the thread, before it wakes the loop."""
        self.waiting: dict[int, Partition] = {}


class LogReader:
    """Read the logs of one worker, and count the bytes."""

    def __init__(self, state: ShardState, background: Background, history: HistoryReads) -> None:
        self._state, self._history = state, history
        self._start = background.make_fetch(state.boot.mailbox.fileno())
        self.bytes_read = 0
        self.fetches: dict[int, _Fetch] = {}
        """By slot of the log."""
        self._fetched: dict[int, _Fetch] = {}
        """The newest fetch that ended, by slot."""

    def read(self, partition: Partition, offset: int, byte_limit: int) -> Read:
        """Frames of a partition from `offset` on, about `byte_limit` bytes; the gap there; or PENDING, and the
        partition is marked ready when they have come. Raises DataLoss."""
        return self._read(partition, offset, byte_limit, waits=False)

    def read_now(self, partition: Partition, offset: int, byte_limit: int = 1) -> Read:
        """Read like `read`, but wait for the disk, for a caller that cannot come again. PENDING: nothing is visible
        there, or it comes from history (`is_in_history`)."""
        return self._read(partition, offset, byte_limit, waits=True)

    def read_log(self, partition: Partition, offset: int, byte_limit: int) -> Read:
        """Read like `read_now`, but nothing of history: what is not in the log is a gap."""
        return self._read(partition, offset, byte_limit, waits=True, only_log=True)

    def is_in_history(self, partition: Partition, offset: int) -> bool:
        """Whether a message has to be fetched from history."""
        if not partition.is_in_history(offset):
            return False
        run = first_run(self._state.logs[partition.log_slot], partition, offset)
        return run is None or run.base_offset > offset

    def _read(
        self,
        partition: Partition,
        offset: int,
        byte_limit: int,
        *,
        waits: bool,
        only_log: bool = False,
    ) -> Read:
        log = self._state.logs[partition.log_slot]
        runs = live_runs(log, partition, offset, byte_limit)
        if not runs or runs[0].base_offset > offset:
            end = runs[0].base_offset if runs else partition.visible
            if partition.is_in_history(offset) and not only_log:
                return self._read_history(partition, offset, end, byte_limit)
            first = partition.first_offset
            if offset < first and partition.is_in_history(first) and not only_log:
                end = min(end, first)  # history has what is behind
            return gap_in_log(partition, offset, end) if offset < end else PENDING
        frames: list[Stored] = []
        for run in runs:
            data = log.read_run(run) if waits else self._run(partition, run)
            if data is None:
                break
            self.bytes_read += len(data)
            frames.extend(frames_of(partition.partition_id, data))
        found = [frame for frame in frames if offset < frame.end_offset <= partition.visible]
        return Ready(found) if found else PENDING

    def _read_history(self, partition: Partition, offset: int, end: int, byte_limit: int) -> Read:
        read = self._history.read(partition, offset, min(end, partition.uploaded.until), byte_limit)
        if isinstance(read, Ready):
            self.bytes_read += sum(frame.frame_bytes for frame in read.frames)
        return read

    def _run(self, partition: Partition, run: Run) -> bytearray | None:
        """`read_run`, but what was fetched last is not fetched again: if it is not there even so, for lack of
        memory or because the disk fails, it is waited for."""
        fetched = self._fetched.get(partition.log_slot)
        if fetched is None or fetched.position != run.position:
            return self.read_run(partition, run)
        log = self._state.logs[partition.log_slot]
        data = self._handed_over(log, run, fetched) or log.read_cached(run)
        return log.read_run(run) if data is None else data

    def read_run(self, partition: Partition, run: Run) -> bytearray | None:
        """The frames of a run; None if they are not in the page cache: then they are fetched. Raises DataLoss."""
        slot = partition.log_slot
        log = self._state.logs[slot]
        data = self._handed_over(log, run, self._fetched.get(slot)) or log.read_cached(run)
        if data is not None:
            return data
        fetch = self.fetches.get(slot)
        if fetch is None:
            fetch = _Fetch(partition.partition_id, run.position, log)
            self._start(self._work(log, partition, run, fetch))
            self.fetches[slot] = fetch
        fetch.waiting[partition.partition_id] = partition
        return None

    @staticmethod
    def _handed_over(log: Log, run: Run, fetched: _Fetch | None) -> bytearray | None:
        """Take a run that a thread has read; None if there is none. Raises DataLoss."""
        if fetched is None or fetched.of != (log.log_id, log.epoch):
            return None  # another log has that slot, or what was not durable was written again
        data = fetched.runs.pop(run.position, None)
        if data is None or len(data) != run.byte_count:
            return None
        log.reader.check(run, data)
        return data

    def _work(self, log: Log, partition: Partition, run: Run, fetch: _Fetch) -> Callable[[], None]:
        """Return the work of a thread for `fetch`."""
        runs = self._scattered_runs(log, partition, run)
        read: Callable[[], dict[int, bytearray] | None] = (
            log.reader.fetch(runs) if runs else log.prefetch(run, PREFETCH_BYTES)
        )

        def work() -> None:
            fetch.runs = read() or {}
            fetch.is_over = True

        return work

    def _scattered_runs(self, log: Log, partition: Partition, run: Run) -> list[Run]:
        """List the next runs of a partition that is alone behind, if that reads less than all between them; else none."""
        before = self._fetched.get(partition.log_slot)
        if before is not None and not before.was_alone:
            return []
        byte_limit = min(OWN_BYTES, OWN_RUNS_MAX * run.byte_count)
        runs = live_runs(log, partition, run.base_offset, byte_limit)[:OWN_RUNS_MAX]
        cost_bytes = sum(run.byte_count + SEEK_BYTES for run in runs)
        return runs if runs and runs[-1].position - run.position > cost_bytes else []

    def collect(self) -> None:
        """Let partitions whose frames have come read them: the one that they were fetched for goes last, as it may
        want more."""
        for slot, fetch in list(self.fetches.items()):
            if not fetch.is_over:
                continue
            del self.fetches[slot]
            self._fetched[slot] = fetch
            # The owner may have left, and come back: the one that waits is another then, of the same id.
            last = fetch.waiting.pop(fetch.owner_id)
            fetch.was_alone = not fetch.waiting
            others, fetch.waiting = fetch.waiting, {}
            for partition in (*others.values(), last):
                if self._state.partition(partition.partition_id) is partition:
                    self._state.mark_ready(partition)
