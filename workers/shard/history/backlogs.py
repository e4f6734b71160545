"""How many bytes of each partition are not uploaded yet, and the refusal of topics that have too many of them.

    | uploaded | in the log only: counted from the index once, then by what is published | tail

At `history_backlog_bytes_max` a topic with history takes no more; topics without go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.partition import Partition
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.workers.reports.quota import WorkerQuota
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.read.places import first_run, live_runs
from danube_fast.workers.shard.state import ShardState

__all__ = ["Backlogs"]

LOOK_NS = 10 * MILLISECOND_NS
"""How often bytes are counted near the limit: what comes meanwhile may be too much, and must not fill the log."""
MANY_LOOK_NS = 50 * MILLISECOND_NS
"""The same with many partitions, of which each has to be asked, and while publishes are refused."""
LOOK_NS_MAX = SECOND_NS
BYTES_PER_NS = 2
"""More than a worker takes: the limit cannot be passed before what is left of it has come at this rate."""
PAGE = 200
"""Partitions that are listed in any case, so that thousands do not hold up a turn. With each so many more the bytes are
counted LOOK_NS later."""
COUNT_NS_MAX = 5 * MILLISECOND_NS
"""Time in each look for counting what is in the log at the start."""
COUNT_BYTES = 1 << 18
"""Frames of so many bytes are looked up at a time."""
DEFAULT_PART = 2
"""Without a setting half of the room of the logs may wait for the store."""


class _Size:
    """Bytes of one partition that are not uploaded."""

    def __init__(self, partition: Partition) -> None:
        self._before = 0
        """Bytes that were counted, or left by the last upload."""
        self._counted_at = partition.byte_count
        """`byte_count` of the partition then."""
        self.start = -1
        """First message that is not uploaded, as of `came_ns`."""
        self.came_ns = 0
        """When that message came, wall clock; 0: there is none."""
        self.seen_ns = 0
        """When it was looked at first."""

    def bytes(self, partition: Partition) -> int:
        """Bytes that are not uploaded."""
        return self._before + partition.byte_count - self._counted_at

    def add(self, byte_count: int) -> None:
        """Count bytes that were in the log before."""
        self._before += byte_count

    def set(self, partition: Partition, left: int) -> None:
        """Note what an upload has left."""
        self._before, self._counted_at = left, partition.byte_count


class Backlogs(PeriodicJob):
    """Watch what waits for the store on one worker."""

    interval_ns = MANY_LOOK_NS

    def __init__(self, state: ShardState, quota: WorkerQuota) -> None:
        self._state, self._quota = state, quota
        self._sizes: dict[int, _Size] = {}
        """By id of a partition with history."""
        self._countings: dict[int, Iterator[None]] = {}
        self._page_at = 0
        """Place of the partition that `some_partitions` begins with."""
        self._ages_ns: tuple[int, ...] = ()
        """The greatest age of each of the last lists, which were of all partitions together."""
        self._refuses = False
        """Whether publishes are refused just now."""
        self.fault = ""
        """Why the uploader cannot upload, as it said last."""
        state.policy_listeners.append(self._apply)
        state.removal_listeners.append(self._forget)

    @property
    def bytes_max(self) -> int:
        """Bytes that may wait for the store."""
        setting = self._state.settings.history_backlog_bytes_max
        return setting or self._quota.allowance_bytes // DEFAULT_PART

    @property
    def bytes(self) -> int:
        """Bytes that wait for the store."""
        by_id = self._state.catalog.by_id
        return sum(size.bytes(by_id[number]) for number, size in self._sizes.items())

    def partitions(self) -> list[Partition]:
        """List the partitions with history."""
        return [self._state.catalog.by_id[number] for number in self._sizes]

    def partitions_of(self, named: Iterable[int]) -> list[Partition]:
        """List those of some partitions that have history here."""
        return [self._state.catalog.by_id[number] for number in named if number in self._sizes]

    def some_partitions(self, named: Iterable[int]) -> list[Partition]:
        """List the partitions that are named, those of which a whole object waits, and some others: all in turn."""
        by_id, sizes = self._state.catalog.by_id, self._sizes
        if len(sizes) <= PAGE:
            self._page_at = 0
            return self.partitions()
        ids = list(sizes)
        page = ids[self._page_at : self._page_at + PAGE]
        self._page_at += PAGE
        if self._page_at >= len(ids):
            self._page_at = 0
        large = self._state.settings.history_object_bytes
        chosen = [number for number, size in sizes.items() if size.bytes(by_id[number]) >= large]
        chosen += [number for number in named if number in sizes]
        return [by_id[number] for number in dict.fromkeys([*page, *chosen])]

    def oldest_ns(self, ages_ns: Iterable[int]) -> int:
        """Age of the oldest message that is not uploaded. `ages_ns`: those of the partitions that were listed just now;
        ages of the others are of when they were listed last."""
        newest = max(ages_ns, default=0)
        self._ages_ns = newest, *self._ages_ns[: len(self._sizes) // PAGE]
        return max(self._ages_ns)

    def size_of(self, partition: Partition) -> int:
        """Count the bytes of a partition that are not uploaded."""
        size = self._sizes.get(partition.partition_id)
        return 0 if size is None else size.bytes(partition)

    def age_ns(self, partition: Partition) -> int:
        """Age of its oldest message that is not uploaded, 0 without any."""
        size = self._sizes.get(partition.partition_id)
        start = max(partition.uploaded.until, partition.first_offset)
        if size is None or start >= partition.visible:
            return 0
        if size.start != start:
            size.start, size.seen_ns, size.came_ns = start, self._state.now_ns, 0
        if not size.came_ns:
            run = first_run(self._state.logs[partition.log_slot], partition, start)
            size.came_ns = run.append_time_ns if run is not None else 0
        # by the wall clock it becomes no older for as long as that was set back
        seen_ns = self._state.now_ns - size.seen_ns
        return max(seen_ns, self._state.now_wall_ns - size.came_ns) if size.came_ns else 0

    def note_uploaded(self, partition: Partition, before: int) -> None:
        """Note that a partition is uploaded up to its `uploaded.until`, and was up to `before`."""
        size = self._sizes.get(partition.partition_id)
        if size is None:
            return
        self._countings.pop(partition.partition_id, None)
        until, span = partition.uploaded.until, partition.visible - before
        left = size.bytes(partition) * (partition.visible - until) // span if span > 0 else 0
        size.set(partition, max(0, left))

    # ------------------------------------------------------------ partitions

    def _apply(self, partition: Partition) -> None:
        number = partition.partition_id
        if not self._state.keeps_history(partition):
            self._forget(partition)
            self._state.gate.open(partition, Cause.HISTORY)
        elif number not in self._sizes:
            self._sizes[number] = _Size(partition)
            self._countings[number] = self._count(partition)
            self._next_ns = 0

    def _forget(self, partition: Partition) -> None:
        self._sizes.pop(partition.partition_id, None)
        self._countings.pop(partition.partition_id, None)

    def _count(self, partition: Partition) -> Iterator[None]:
        """Count what is in the log already."""
        size, end = self._sizes[partition.partition_id], partition.visible
        at = max(partition.uploaded.until, partition.first_offset)
        while at < end and (
            runs := live_runs(self._state.logs[partition.log_slot], partition, at, COUNT_BYTES)
        ):
            size.add(sum(run.byte_count for run in runs if run.base_offset < end))
            at = runs[-1].end_offset
            yield

    @property
    def is_busy(self) -> bool:
        """Whether partitions are being counted."""
        return bool(self._countings)

    # ------------------------------------------------------------ refusals

    def run(self, now_ns: int) -> None:
        """Count on, and refuse topics of which too much waits."""
        if not self._sizes:
            return
        self._count_on()
        waiting, limit, text = self.bytes, self.bytes_max, ""
        if not self._countings and waiting <= limit:
            quiet_ns = (limit - waiting) // BYTES_PER_NS
            look_ns = min(LOOK_NS * (1 + len(self._sizes) // PAGE), MANY_LOOK_NS)
            self._next_ns = now_ns + min(max(quiet_ns, look_ns), LOOK_NS_MAX)
        if waiting > limit:
            store = self.fault or f"{self._state.settings.store} takes less than is published"
            text = (
                f"{waiting} bytes wait for the object store, and history_backlog_bytes_max allows {limit} "
                f"here: {store}; wait until it has caught up"
            )
        if not text and not self._refuses:
            return
        self._refuses = bool(text)
        for partition in self.partitions():
            self._state.gate.set(partition, Cause.HISTORY, text)

    def _count_on(self) -> None:
        clock = self._state.clock
        until_ns = clock.monotonic_ns() + COUNT_NS_MAX
        for number, steps in list(self._countings.items()):
            for _ in steps:
                if clock.monotonic_ns() >= until_ns:
                    return
            self._countings.pop(number, None)
