"""Segments of a log: which partitions still need something in them; those that none needs are given back.

A topic's policy and its subscriptions say what a partition needs; other claims on a log (a move, a
rewrite) are among the pins of the state.
"""

from __future__ import annotations

from danube_fast.broker.admission.layout import INT64_MAX
from danube_fast.broker.partition import Partition
from danube_fast.broker.topics.policy import RetentionPolicy
from danube_fast.clock import SECOND_NS
from danube_fast.workers.shard.keep.checkpoints import Checkpoints
from danube_fast.workers.shard.keep.retention import Retention
from danube_fast.workers.shard.read.places import breaks_left, first_run, lowest_position
from danube_fast.workers.shard.state import ShardState

__all__ = ["Segments"]


class Segments:
    """Find and give back unneeded segments of one worker's logs."""

    def __init__(self, state: ShardState, checkpoints: Checkpoints, retention: Retention) -> None:
        self._state, self._checkpoints, self._retention = state, checkpoints, retention

    def needed(self, slot: int, *, over: bool) -> tuple[int, tuple[Partition, str] | None]:
        """Find the position below which nothing of a log is needed, and the partition and claim that need it."""
        log = self._state.logs[slot]
        mine = self._state.catalog.of_log(slot)
        keep_ns = self._state.settings.retention_seconds_min * SECOND_NS
        limit = log.position_before(INT64_MAX)
        if not over and any(map(self._keeps_by_default, mine)):
            limit = log.position_before(self._state.steady_wall_ns - keep_ns)
        limit = max(limit, self._purged_below(slot))
        pin: tuple[Partition, str] | None = None
        for partition in mine:
            if limit <= log.oldest_position:
                break
            for offset, who in self.claims(partition, over=over):
                lowest = lowest_position(log, partition, offset)
                if lowest is not None and lowest < limit:
                    limit, pin = lowest, (partition, who)
        return limit, pin

    def _purged_below(self, slot: int) -> int:
        """Find the position below which purges have left no message; 0: there were none."""
        mine = self._state.catalog.of_log(slot)
        if not any(partition.purged_until for partition in mine):
            return 0
        log = self._state.logs[slot]
        position = log.written_position
        for partition in mine:
            lowest = lowest_position(log, partition, partition.first_offset)
            if lowest is not None:
                position = min(position, lowest)
        return position

    @staticmethod
    def _keeps_by_default(partition: Partition) -> bool:
        """Whether the broker's own setting says how long its acked messages stay."""
        policy = partition.policy
        own = policy.retention_seconds or policy.retention_bytes
        until_acked = policy.retention_policy is RetentionPolicy.UNTIL_ACKED
        own = own or policy.compaction
        return until_acked and not own and partition.first_offset < partition.visible

    def claims(self, partition: Partition, *, over: bool) -> list[tuple[int, str]]:
        """List offsets from which on a partition needs its messages in the log, and what needs them."""
        claims = self._claims(partition, over=over)
        if not self._state.keeps_history(partition):
            return claims
        until = partition.uploaded.until
        claims = [(max(offset, until), who) for offset, who in claims]
        return [
            *claims,
            (max(partition.first_offset, until), "its history, which is not uploaded yet"),
        ]

    def _claims(self, partition: Partition, *, over: bool) -> list[tuple[int, str]]:
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
            claims.append((self._retention.retained_from(partition), "its retention"))
        return claims

    def give_back(self, slot: int, position: int, *, urgent: bool) -> None:
        """Give back segments below `position`; `urgent`: even without a snapshot behind them."""
        log = self._state.logs[slot]
        before = log.oldest_position
        log.trim(position, urgent=urgent)
        # a snapshot that is due although nothing was written since the last: move the log on
        idle = not self._state.journals[slot].has_open_group
        if log.snapshot_due and idle and log.written_position == log.snapshot_position:
            self._checkpoints.write_marker(slot, again=True)
        if log.oldest_position > before:
            self._move_first_offsets(slot)

    def _move_first_offsets(self, slot: int) -> None:
        log = self._state.logs[slot]
        for partition in self._state.catalog.of_log(slot):
            if partition.logged:
                if not partition.is_in_history(partition.first_offset):
                    run = first_run(log, partition, partition.first_offset)
                    first = run.base_offset if run is not None else partition.visible
                    partition.trim(first)
                if partition.breaks:
                    partition.keep_breaks(breaks_left(log, partition))

    def find_first_offsets(self, slot: int) -> None:
        """Find the first offsets at the start: the last snapshot does not know what was trimmed since."""
        log = self._state.logs[slot]
        for partition in self._state.catalog.of_log(slot):
            if partition.reliable:
                first = max(partition.assigned.first_offset, partition.purged_until)
                if partition.breaks or partition.compacted.until:
                    log.note_rewritten(partition.partition_id)
                uploaded = partition.uploaded
                first = max(first, uploaded.first_offset)
                run = first_run(log, partition, first)
                found = run.base_offset if run is not None else partition.visible
                partition.begin_at(first if first < uploaded.until else max(found, first))
