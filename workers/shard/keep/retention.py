"""Ages and sizes that policies of topics limit: messages that are too old or too many are given up.

Messages that were not acked in time count as acked, and consumers are told which those were. They go with
their segment (trimming.py), or at once from a topic that is kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from danube_fast.broker.admission.gate import Cause
from danube_fast.broker.admission.layout import PartitionWord
from danube_fast.broker.history_messages import Extent
from danube_fast.broker.partition import Partition
from danube_fast.broker.sizes import Sizes
from danube_fast.broker.topics.policy import BacklogPolicy, RetentionPolicy
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import NotFound
from danube_fast.wal.index import Run
from danube_fast.wal.log import Log
from danube_fast.workers.shard.deliver.gaps import Gaps
from danube_fast.workers.shard.deliver.subscriptions import Subscriptions
from danube_fast.workers.shard.history.ages import HistoryAges
from danube_fast.workers.shard.history.sizes import HistorySizes, size_before
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.read.places import first_run, live_runs
from danube_fast.workers.shard.read.times import offset_at
from danube_fast.workers.shard.state import ShardState

__all__ = ["Retention"]

POLICE_NS = 100 * MILLISECOND_NS
"""How often ages and sizes are checked."""
AGE_STEP_NS_MAX = 100 * MILLISECOND_NS
AGE_STEPS = 200
"""Checks in one time to live: ages of messages are known to that part of it."""
COUNT_NS_MAX = 5 * MILLISECOND_NS
"""Time in each tick for counting what a partition keeps."""
COUNT_BYTES = 1 << 18
"""Frames of so many bytes are looked up at a time."""


class Retention(Job):
    """Apply policies on ages, sizes and idle subscriptions to the partitions of one worker."""

    def __init__(
        self,
        state: ShardState,
        gaps: Gaps,
        subscriptions: Subscriptions,
        ages: HistoryAges,
        history: HistorySizes,
    ) -> None:
        self._state, self._gaps, self._subscriptions, self._ages = state, gaps, subscriptions, ages
        self._history = history
        self._policed: dict[int, Partition] = {}
        """Partitions with a policy on ages, sizes or subscriptions."""
        self._countings: dict[int, Iterator[None]] = {}
        """By id of a partition whose sizes are not known yet: the steps of counting."""
        self._police_at_ns = 0
        state.policy_listeners.append(self._apply)
        state.removal_listeners.append(self._forget)

    # ------------------------------------------------------------ policies

    def _apply(self, partition: Partition) -> None:
        partition.check_ages_at(0)
        if partition.policy.bounds_storage or partition.quota.namespace_storage_bytes_max:
            self._policed[partition.partition_id] = partition
        else:
            self._policed.pop(partition.partition_id, None)
            self._countings.pop(partition.partition_id, None)
            partition.forget_sizes()
            for cause in (Cause.BACKLOG, Cause.STORAGE):
                self._state.gate.open(partition, cause)

    def _forget(self, partition: Partition) -> None:
        if self._policed.get(partition.partition_id) is partition:
            del self._policed[partition.partition_id]
            self._countings.pop(partition.partition_id, None)

    def policed(self) -> list[Partition]:
        """List the partitions with such a policy."""
        return list(self._policed.values())

    @property
    def is_busy(self) -> bool:
        """Whether partitions are being counted."""
        return bool(self._countings)

    def do_work(self, now_ns: int) -> None:
        """Check ages and sizes, if it is time."""
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

    # ------------------------------------------------------------ ages

    def _log(self, partition: Partition) -> Log:
        return self._state.logs[partition.log_slot]

    def _older_than(self, partition: Partition, age_ns: int) -> int:
        """Find the first message of the log that is not older; those that only history has are old with the log's
        first one."""
        time_ns, log = self._state.steady_wall_ns - age_ns, self._log(partition)
        found = offset_at(partition, log, max(0, time_ns))
        if partition.is_in_history(partition.first_offset):
            first = first_run(log, partition, partition.first_offset)
            if first is None or found <= first.base_offset:
                return partition.first_offset
        return found

    def expire_old(self, partition: Partition) -> None:
        """Expire messages above their time to live before a consumer gets them: they count as acked."""
        state, ttl_ns = self._state, partition.policy.message_ttl_ms * MILLISECOND_NS
        if not ttl_ns or state.now_ns < partition.old_at_ns or not partition.subscriptions:
            return
        interval_ns = min(max(ttl_ns // AGE_STEPS, MILLISECOND_NS), AGE_STEP_NS_MAX)
        partition.check_ages_at(state.now_ns + interval_ns)
        if any(sub.cursor < partition.visible for sub in partition.subscriptions.values()):
            until = self._older_than(partition, ttl_ns)
            until = max(until, self._ages.young_from(partition, ttl_ns))
            self._expire(partition, until, "these messages were older than message_ttl_ms")

    def _expire(self, partition: Partition, until: int, reason: str) -> None:
        for sub in partition.subscriptions.values():
            gap = sub.expire(until, reason)
            if gap is not None:
                self._gaps.tell(partition, sub, gap)
                self._state.mark_cursor(partition)

    def _expire_retained(self, partition: Partition) -> None:
        """Give up messages that are too old or too many, acked or not (until_expired)."""
        if partition.policy.retention_policy is not RetentionPolicy.UNTIL_EXPIRED:
            return
        until = self.retained_from(partition)
        if until <= partition.first_offset:
            return
        partition.trim(until)
        self._expire(partition, until, "the topic's retention is over")
        oldest = partition.oldest_in_tail()
        while partition.keeps_memory and oldest is not None and oldest.end_offset <= until:
            partition.evict()
            oldest = partition.oldest_in_tail()

    def retained_from(self, partition: Partition) -> int:
        """Find the first message that `retention_seconds` and `retention_bytes` leave."""
        policy = partition.policy
        first = partition.first_offset
        if policy.retention_seconds:
            first = max(first, self._older_than(partition, policy.retention_seconds * SECOND_NS))
        if policy.retention_bytes and partition.sizes is not None:
            first = max(first, partition.sizes.start_of_last(policy.retention_bytes))
        return min(first, partition.visible)

    def _expire_subscriptions(self, partition: Partition, now_ns: int) -> None:
        """Delete subscriptions that had no consumer for too long."""
        limit = partition.policy.subscription_expiry_seconds
        for name, sub in list(partition.subscriptions.items()):
            if not limit:
                sub.forget_idle()
            elif sub.idle_ns(now_ns) >= limit * SECOND_NS:
                cause = NotFound(f"subscription {name!r} was left for {limit} s and is deleted")
                self._subscriptions.drop(partition, sub, cause)

    # ------------------------------------------------------------ sizes

    def _note_size(self, partition: Partition) -> None:
        """Note the size of a partition; sizes from before the first look are counted in the index."""
        number = partition.partition_id
        if partition.sizes is None and number not in self._countings:
            self._countings[number] = self._sizes_before(partition)
            self._count()
        if partition.sizes is None:
            return
        if partition.sizes.is_guess and number not in self._countings:
            self._history.find(partition, partial(self._count_with, partition))
        base = partition.sizes_base
        partition.sizes.note(partition.visible, base + partition.byte_count)
        partition.sizes.forget_below(partition.first_offset)

    def _count(self) -> None:
        """Go on with counting: a partition may have millions of frames."""
        clock = self._state.clock
        until_ns = clock.monotonic_ns() + COUNT_NS_MAX
        for number, steps in list(self._countings.items()):
            for _ in steps:
                if clock.monotonic_ns() >= until_ns:
                    return
            del self._countings[number]

    def _count_with(self, partition: Partition, history: list[Extent], until: int) -> None:
        """Count anew, now that it is known where the bytes of history lie below an offset."""
        if self._policed.get(partition.partition_id) is partition:
            self._countings[partition.partition_id] = self._sizes_before(partition, history, until)

    def _sizes_before(
        self, partition: Partition, history: Sequence[Extent] = (), known_until: int = 0
    ) -> Iterator[None]:
        at, total = partition.first_offset, 0
        known, log_start = Sizes(at), partition.visible
        runs: list[Run] = []
        while partition.logged and at < partition.visible:
            runs = live_runs(self._log(partition), partition, at, COUNT_BYTES)
            if not runs:
                break
            log_start = min(log_start, runs[0].base_offset)
            for run in runs:
                at = run.end_offset
                if at > partition.visible:
                    break
                known.note(run.base_offset, total)  # what is before it, the log does not have
                total += run.byte_count
                known.note(at, total)
            yield
        for stored in partition.tail_frames():
            if stored.base_offset >= known.end:
                log_start = min(log_start, stored.base_offset)
                known.note(stored.base_offset, total)
                total += stored.frame_bytes
                known.note(stored.end_offset, total)
        if partition.is_in_history(partition.first_offset) and log_start > partition.first_offset:
            before, is_guess = size_before(partition, log_start, known, history, known_until)
            known.put_before(before, is_guess=is_guess)
            total += before.below(before.end)
        partition.know_sizes(known, total)

    def size_of(self, partition: Partition) -> int:
        """Count the bytes that a partition with a policy keeps; what log and history both have counts once."""
        start, in_history = partition.first_offset, 0
        if partition.is_in_history(start):
            start, in_history = partition.uploaded.until, partition.uploaded.byte_count
        sizes = partition.sizes
        return in_history + (0 if sizes is None else sizes.between(start, partition.visible))

    def measure(self, partition: Partition) -> tuple[int, bool]:
        """Count the bytes that a partition keeps just now, those included that are on their way into the log, about; and
        say whether all of it is known."""
        self._note_size(partition)
        row = self._state.tables.partitions[partition.slot]
        unseen = int(row[PartitionWord.NEXT_OFFSET]) - partition.visible
        mean = partition.byte_count // max(1, partition.message_count)
        return self.size_of(partition) + unseen * mean, partition.sizes is not None

    def _bound_backlog(self, partition: Partition) -> None:
        limit, sizes, text = partition.policy.backlog_bytes_max, partition.sizes, ""
        if limit and sizes is not None:
            backlog = sizes.between(partition.oldest_needed(), partition.visible)
            evicts = partition.policy.backlog_policy is BacklogPolicy.EVICT
            if backlog > limit and evicts:
                until = sizes.start_of_last(limit)
                self._expire(partition, until, "the backlog grew above backlog_bytes_max")
            elif backlog > limit:
                text = (
                    f"{partition.topic} has {backlog} bytes that its subscriptions did not ack, and its "
                    f"policy allows backlog_bytes_max {limit}; let them consume, or raise it"
                )
        self._state.gate.set(partition, Cause.BACKLOG, text)

    # ------------------------------------------------------------ segments

    def trim_memory(self, partition: Partition) -> None:
        """Drop frames of a memory topic that all subscriptions acked; refuse publishes above its quota."""
        needed = partition.oldest_needed()
        quota = self._state.settings.memory_topic_bytes_max
        oldest = partition.oldest_in_tail()
        while oldest is not None and (
            oldest.end_offset <= needed if partition.subscriptions else partition.tail_bytes > quota
        ):
            partition.evict()
            oldest = partition.oldest_in_tail()
        if self._state.partition(partition.partition_id) is not partition:
            return
        text = ""
        if partition.tail_bytes > quota:
            text = (
                f"{partition.topic} keeps {partition.tail_bytes} unacked bytes in memory, its limit "
                f"is memory_topic_bytes_max ({quota}); let its subscriptions consume"
            )
        self._state.gate.set(partition, Cause.MEMORY, text)
