"""What a worker keeps and what may go: segments that nobody needs, and room in memory.

A segment goes when no partition needs anything in it; what a partition needs is for its topic's
policy and its subscriptions to say. Ages and sizes that policies name are looked at here, messages
that nobody acked in time count as acked, and consumers are told which those were.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from danube_fast.broker import records as r
from danube_fast.broker.admission.layout import INT64_MAX, Mode, PartitionWord
from danube_fast.broker.partition import Partition
from danube_fast.broker.sizes import Sizes
from danube_fast.broker.topics.policy import BacklogPolicy, RetentionPolicy
from danube_fast.errors import ResourceExhausted
from danube_fast.wal.index import Run
from danube_fast.wal.log import Log
from danube_fast.workers.shard.keep.rewrites import Rewrites
from danube_fast.workers.shard.read.places import breaks_left, first_run, live_runs, lowest_position
from danube_fast.workers.shard.read.positions import purged_below
from danube_fast.workers.shard.read.times import offset_at

if TYPE_CHECKING:
    from danube_fast.workers.shard.worker import ShardWorker

__all__ = ["Retention"]

MS = 1_000_000
SECOND_NS = 1000 * MS
POLICE_NS = 100 * MS
"""Ages and sizes are looked at so often."""
AGE_STEP_NS_MAX = 100 * MS
AGE_STEPS = 200
"""Whatever the time to live: its messages' ages are known to so small a part of it."""
COUNT_NS_MAX = 5 * MS
"""Of each tick, for counting what a partition keeps."""
COUNT_BYTES = 1 << 18
"""Frames of so many bytes are looked up at a time."""
LEFT_NS = 60 * SECOND_NS
"""For so long a log is trimmed as far as it goes after a partition was removed or purged, by snapshots of
its own."""


class Retention:
    """Trimming of one worker's logs and memory topics."""

    def __init__(self, worker: ShardWorker) -> None:
        self._worker = worker
        self._policed: dict[int, Partition] = {}
        """Partitions with a policy on ages, sizes or subscriptions."""
        self._countings: dict[int, Iterator[None]] = {}
        """By id of a partition whose sizes are not known yet: the steps of counting."""
        self._police_at_ns = 0
        self._left_ns: dict[int, int] = {}
        """By slot of a log: when a partition was removed from it, or purged, the last time."""
        self.rewrites = Rewrites(worker.state, self)

    # ------------------------------------------------------------ policies

    def apply(self, partition: Partition) -> None:
        """A partition is new here, or its policy changed."""
        partition.old_at_ns = 0
        self.rewrites.apply(partition)
        if partition.policy.bounds_storage:
            self._policed[partition.partition_id] = partition
        else:
            self._policed.pop(partition.partition_id, None)
            self._countings.pop(partition.partition_id, None)
            partition.sizes = None
            for cause in ("backlog", "storage"):
                self.refuse(partition, cause, "")

    def hasten(self, partition: Partition) -> None:
        """Give the space of a partition back soon, even if nothing more is written to its log."""
        self._left_ns[partition.log_slot] = self._worker.state.now_ns

    def forget(self, partition: Partition) -> None:
        """A partition was removed."""
        self.hasten(partition)
        self.rewrites.forget(partition)
        if self._policed.get(partition.partition_id) is partition:
            del self._policed[partition.partition_id]
            self._countings.pop(partition.partition_id, None)

    def policed(self) -> list[Partition]:
        """Partitions whose sizes are known."""
        return list(self._policed.values())

    def do_work(self, now_ns: int) -> None:
        """Look at ages and sizes, if it is time."""
        if self._countings:
            self._count()
        if not self._policed or now_ns < self._police_at_ns:
            return
        self._police_at_ns = now_ns + POLICE_NS
        for partition in list(self._policed.values()):
            self._note_size(partition)
            self.expire_old(partition)
            self._expire_retained(partition)
            self._bound_backlog(partition)
            self._expire_subscriptions(partition, now_ns)

    def refuse(self, partition: Partition, cause: str, text: str) -> None:
        """Refuse publishes for a reason, or with an empty text for that reason no more."""
        if partition.refusals.get(cause, "") == text:
            return
        partition.refusals.pop(cause, None)
        if text:
            partition.refusals[cause] = text
        if partition.switching:
            return
        row = self._worker.state.tables.partitions[partition.slot]
        mode = Mode.LOGGED if partition.logged else Mode.MEMORY
        row[PartitionWord.MODE] = Mode.CLOSED if partition.refusals else mode
        row[PartitionWord.REFUSAL] = ResourceExhausted.code

    # ------------------------------------------------------------ ages

    def _log(self, partition: Partition) -> Log:
        return self._worker.state.logs[partition.log_slot]

    def _older_than(self, partition: Partition, age_ns: int) -> int:
        """The first message that is not older."""
        time_ns = self._worker.state.steady_wall_ns - age_ns
        return offset_at(partition, self._log(partition), max(0, time_ns))

    def expire_old(self, partition: Partition) -> None:
        """Messages above their time to live count as acked, before anybody gets them."""
        worker, ttl_ns = self._worker, partition.policy.message_ttl_ms * MS
        if not ttl_ns or worker.state.now_ns < partition.old_at_ns or not partition.subscriptions:
            return
        partition.old_at_ns = worker.state.now_ns + min(
            max(ttl_ns // AGE_STEPS, MS), AGE_STEP_NS_MAX
        )
        if any(sub.cursor < partition.visible for sub in partition.subscriptions.values()):
            until = self._older_than(partition, ttl_ns)
            self._expire(partition, until, "these messages were older than message_ttl_ms")

    def _expire(self, partition: Partition, until: int, reason: str) -> None:
        worker = self._worker
        for sub in partition.subscriptions.values():
            gap = sub.expire(until, reason)
            if gap is not None:
                worker.gaps.tell(partition, sub, gap)
                worker.state.mark_cursor(partition)

    def _expire_retained(self, partition: Partition) -> None:
        """until_expired: what is too old or too much is gone, acked or not."""
        if partition.policy.retention_policy is not RetentionPolicy.UNTIL_EXPIRED:
            return
        until = self._retained_from(partition)
        if until <= partition.first_offset:
            return
        partition.first_offset = until
        self._expire(partition, until, "the topic's retention is over")
        oldest = partition.oldest_in_tail()
        while partition.keeps_memory and oldest is not None and oldest.end_offset <= until:
            partition.evict()
            oldest = partition.oldest_in_tail()

    def _retained_from(self, partition: Partition) -> int:
        """First message that `retention_seconds` and `retention_bytes` leave."""
        policy = partition.policy
        first = partition.first_offset
        if policy.retention_seconds:
            first = max(first, self._older_than(partition, policy.retention_seconds * SECOND_NS))
        if policy.retention_bytes and partition.sizes is not None:
            first = max(first, partition.sizes.start_of_last(policy.retention_bytes))
        return min(first, partition.visible)

    def _expire_subscriptions(self, partition: Partition, now_ns: int) -> None:
        """Those that were left by everybody for too long are deleted."""
        worker, limit = self._worker, partition.policy.subscription_expiry_seconds
        for name, sub in list(partition.subscriptions.items()):
            if sub.consumers or not limit:
                sub.idle_since_ns = 0
            elif not sub.idle_since_ns:
                sub.idle_since_ns = now_ns
            elif now_ns - sub.idle_since_ns >= limit * SECOND_NS:
                partition.forget_subscription(name)
                worker.gaps.forget(partition.partition_id, name)
                record = r.SubscriptionDeleted(partition.partition_id, name)
                worker.state.journals[partition.log_slot].record(record)

    # ------------------------------------------------------------ sizes

    def _note_size(self, partition: Partition) -> None:
        """Sizes are known from the first look on, older ones from the index, soon."""
        number = partition.partition_id
        if partition.sizes is None and number not in self._countings:
            self._countings[number] = self._sizes_before(partition)
            self._count()
        if partition.sizes is None:
            return
        base = partition.sizes_base
        partition.sizes.note(partition.visible, base + partition.byte_count)
        partition.sizes.forget_below(partition.first_offset)

    def _count(self) -> None:
        """Go on with counting: a partition may have millions of frames."""
        clock = self._worker.state.clock
        until_ns = clock.monotonic_ns() + COUNT_NS_MAX
        for number, steps in list(self._countings.items()):
            for _ in steps:
                if clock.monotonic_ns() >= until_ns:
                    return
            del self._countings[number]

    def _sizes_before(self, partition: Partition) -> Iterator[None]:
        at, total = partition.first_offset, 0
        known = Sizes(at)
        runs: list[Run] = []
        while partition.logged and at < partition.visible:
            runs = live_runs(self._log(partition), partition, at, COUNT_BYTES)
            if not runs:
                break
            for run in runs:
                at = run.end_offset
                if at > partition.visible:
                    break
                total += run.byte_count
                known.note(at, total)
            yield
        for stored in partition.tail_frames():
            if stored.base_offset >= known.end:
                total += stored.frame_bytes
                known.note(stored.end_offset, total)
        partition.sizes_base = total - partition.byte_count
        partition.sizes = known

    def size_of(self, partition: Partition) -> int:
        """Bytes that a policed partition keeps."""
        sizes = partition.sizes
        return 0 if sizes is None else sizes.between(partition.first_offset, partition.visible)

    def _bound_backlog(self, partition: Partition) -> None:
        limit, sizes = partition.policy.backlog_bytes_max, partition.sizes
        if not limit or sizes is None:
            self.refuse(partition, "backlog", "")
            return
        backlog = sizes.between(partition.oldest_needed(), partition.visible)
        if partition.policy.backlog_policy is BacklogPolicy.EVICT:
            self.refuse(partition, "backlog", "")
            if backlog > limit:
                until = sizes.start_of_last(limit)
                self._expire(partition, until, "the backlog grew above backlog_bytes_max")
        elif backlog > limit:
            self.refuse(
                partition,
                "backlog",
                f"{partition.topic} has {backlog} bytes that its subscriptions did not ack, and its "
                f"policy allows backlog_bytes_max {limit}; let them consume, or raise it",
            )
        else:
            self.refuse(partition, "backlog", "")

    # ------------------------------------------------------------ segments

    def trim(self, slot: int, *, over: bool) -> None:
        """Give back segments whose messages nobody needs any more."""
        worker = self._worker
        log = worker.state.logs[slot]
        if log.segment_count < 2 or log.snapshot_position == 0:
            return
        limit, pin = self._needed(slot, over=over)
        before = log.oldest_position
        held = worker.state.pins.lowest(slot)
        limit = limit if held is None else min(limit, held)
        if limit > before:
            left_ns = self._left_ns.get(slot)
            left = left_ns is not None and worker.state.now_ns - left_ns < LEFT_NS
            self.give_back(slot, limit, urgent=over or left)
        pinned = over and pin is not None and log.oldest_position == before
        # else only a snapshot is missing: it is due
        pinned = pinned and limit < log.oldest_end and not self.rewrites.unpin(slot)
        self._limit(slot, pin if pinned else None)

    def give_back(self, slot: int, position: int, *, urgent: bool) -> None:
        """Nothing below `position` is needed any more; `urgent`: whatever the snapshots say."""
        worker, log = self._worker, self._worker.state.logs[slot]
        before = log.oldest_position
        log.trim(position, urgent=urgent)
        # a snapshot that is due although nothing was written since the last: move the log on
        idle = not worker.state.journals[slot].has_open_group
        if log.snapshot_due and idle and log.written_position == log.snapshot_position:
            worker.upkeep.write_marker(slot, again=True)
        if log.oldest_position > before:
            self._move_first_offsets(slot)

    def _needed(self, slot: int, *, over: bool) -> tuple[int, tuple[Partition, str] | None]:
        """Position below which nothing of a log is needed, and who needs what lies there."""
        worker, log = self._worker, self._worker.state.logs[slot]
        mine = worker.state.catalog.of_log(slot)
        keep_ns = worker.state.settings.retention_seconds_min * SECOND_NS
        limit = log.position_before(INT64_MAX)
        if not over and any(map(self._keeps_by_default, mine)):
            limit = log.position_before(worker.state.steady_wall_ns - keep_ns)
        limit = max(limit, purged_below(worker, slot))
        pin: tuple[Partition, str] | None = None
        for partition in mine:
            if limit <= log.oldest_position:
                break
            for offset, who in self.claims(partition, over=over):
                lowest = lowest_position(log, partition, offset)
                if lowest is not None and lowest < limit:
                    limit, pin = lowest, (partition, who)
        return limit, pin

    @staticmethod
    def _keeps_by_default(partition: Partition) -> bool:
        """Whether the broker's own setting says how long its acked messages stay."""
        policy = partition.policy
        own = policy.retention_seconds or policy.retention_bytes
        until_acked = policy.retention_policy is RetentionPolicy.UNTIL_ACKED
        own = own or policy.compaction
        return until_acked and not own and partition.first_offset < partition.visible

    def claims(self, partition: Partition, *, over: bool) -> list[tuple[int, str]]:
        """Offsets from which on a partition needs its messages, and what needs them."""
        policy = partition.policy
        if policy.retention_policy is RetentionPolicy.FOREVER:
            return [(partition.first_offset, "retention_policy forever")]
        if policy.compaction:
            return [(partition.first_offset, "the newest message of every key")]
        claims = [
            (sub.cursor, f"subscription {sub.name!r}") for sub in partition.subscriptions.values()
        ]
        own = policy.retention_seconds or policy.retention_bytes
        if own and not over:
            claims.append((self._retained_from(partition), "its retention"))
        return claims

    def _move_first_offsets(self, slot: int) -> None:
        worker = self._worker
        log = worker.state.logs[slot]
        for partition in worker.state.catalog.of_log(slot):
            if partition.logged:
                run = first_run(log, partition, partition.first_offset)
                first = run.base_offset if run is not None else partition.visible
                partition.first_offset = max(partition.first_offset, first)
                if partition.breaks:
                    partition.breaks = breaks_left(log, partition)

    def find_first_offsets(self, slot: int) -> None:
        """At the start: what was trimmed is known to the log, not to the last snapshot."""
        log = self._worker.state.logs[slot]
        for partition in self._worker.state.catalog.of_log(slot):
            if partition.reliable:
                first = max(partition.assigned.first_offset, partition.purged_until)
                if partition.breaks or partition.compacted.until:
                    log.note_rewritten(partition.partition_id)
                run = first_run(log, partition, first)
                partition.first_offset = run.base_offset if run is not None else partition.visible
                partition.first_offset = max(partition.first_offset, first)

    def _limit(self, slot: int, pin: tuple[Partition, str] | None) -> None:
        """At `wal_bytes_max`, refuse the topic whose subscription pins the oldest segment."""
        worker = self._worker
        for partition in worker.state.catalog.of_log(slot):
            if not partition.logged:
                continue
            text = ""
            if pin is not None and pin[0] is partition:
                remedy = "wait until it is compacted, delete keys, or raise wal_bytes_max"
                if not partition.policy.compaction:
                    remedy = (
                        "let it consume, or delete it (danube-fast subscriptions delete), or raise "
                        "wal_bytes_max"
                    )
                text = (
                    f"the log reached wal_bytes_max ({worker.quota.allowance_bytes} bytes here) and "
                    f"{pin[1]} of {partition.topic} still needs its oldest segment; {remedy}"
                )
            self.refuse(partition, "log", text)

    def trim_memory(self, partition: Partition) -> None:
        """Drop frames of a memory topic that everybody acked; refuse publishes above its quota."""
        worker = self._worker
        needed = partition.oldest_needed()
        quota = worker.state.settings.memory_topic_bytes_max
        oldest = partition.oldest_in_tail()
        while oldest is not None and (
            oldest.end_offset <= needed if partition.subscriptions else partition.tail_bytes > quota
        ):
            partition.evict()
            oldest = partition.oldest_in_tail()
        if worker.state.partition(partition.partition_id) is not partition:
            return
        text = ""
        if partition.tail_bytes > quota:
            text = (
                f"{partition.topic} keeps {partition.tail_bytes} unacked bytes in memory, its limit "
                f"is memory_topic_bytes_max ({quota}); let its subscriptions consume"
            )
        self.refuse(partition, "memory", text)
